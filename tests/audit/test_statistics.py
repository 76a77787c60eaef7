"""The tests have their known values, their false-alarm rate and the power that is claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ggufspec.audit.statistics import (
    Test,
    energy,
    holm,
    kolmogorov_smirnov,
    kolmogorov_tail,
    smallest_shift,
    text_profiles,
    uniform_shift,
)


def with_p(p: float) -> Test:
    return Test("", 0.0, None, None, p, p)


@pytest.mark.parametrize(
    ("x", "tail"), [(0.5, 0.9639452), (1.0, 0.2699997), (1.3581, 0.0499997), (1.6276, 0.0100002)]
)
def test_kolmogorovs_distribution(x: float, tail: float) -> None:
    assert kolmogorov_tail(x) == pytest.approx(tail, abs=2e-5)


def test_kolmogorovs_distribution_is_whole_at_its_ends() -> None:
    assert kolmogorov_tail(0.0) == 1.0
    assert kolmogorov_tail(0.2) == pytest.approx(1.0, abs=1e-9)
    assert 0 <= kolmogorov_tail(40.0) < 1e-300


def test_ks_of_samples_that_do_not_overlap_and_of_the_same() -> None:
    low, high = np.linspace(0, 0.4, 50), np.linspace(0.6, 1, 30)
    apart = kolmogorov_smirnov("", low, high, 0.01)
    assert apart.effect == 1.0
    assert apart.p < 1e-15
    same = kolmogorov_smirnov("", low, low, 0.01)
    assert (same.effect, same.p, same.low) == (0.0, 1.0, 0.0)


def test_a_shift_and_its_interval() -> None:
    """1,000 values each: the standard error is sqrt(1/6000) = 0.01291, 2.5758 of them 0.03325."""
    plain, speculative = np.full(1000, 0.5), np.full(1000, 0.45)
    test = uniform_shift("", plain, speculative, 0.01)
    assert test.effect == pytest.approx(-0.05)
    assert (test.low, test.high) == pytest.approx((-0.08325, -0.01675), abs=1e-5)
    assert test.p == pytest.approx(math.erfc(0.05 * math.sqrt(6000) / math.sqrt(2)))


def test_holms_adjustment_equals_the_reference() -> None:
    tests = holm([with_p(p) for p in (0.01, 0.04, 0.03, 0.005)])
    assert [test.p_holm for test in tests] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [test.p_holm for test in holm([with_p(0.7), with_p(0.9)])] == [1.0, 1.0]


def test_energy_finds_other_texts_and_is_exact_for_few() -> None:
    rng = np.random.default_rng(0)
    texts = [[1, 2, 3, 4]] * 10 + [[4, 3, 2, 1]] * 10
    labels, groups = np.arange(20) >= 10, np.zeros(20, np.int64)
    found = energy("", text_profiles(texts), labels, groups, rng)
    assert found.p < 0.002
    assert found.effect > 0.5
    # Two texts can only be swapped, and are then as far apart as before.
    two = energy("", text_profiles([[1, 2], [3]]), np.array([False, True]), np.zeros(2, int), rng)
    assert two.p == 1.0


def test_energy_sees_a_difference_between_prompts_as_none() -> None:
    """Each prompt has its own text, which both kinds write."""
    texts = [[prompt] * 5 for prompt in range(10)] * 2
    labels, groups = np.arange(20) >= 10, np.tile(np.arange(10), 2)
    assert energy("", text_profiles(texts), labels, groups, np.random.default_rng(0)).p == 1.0


def family(rng: np.random.Generator, shift: float, n: int) -> tuple[Test, ...]:
    """A simulated audit: two dependent columns of places a kind, and ten texts each."""
    columns = []
    for moved in (0.0, shift):
        first = rng.random(n)
        # The distribution with the density 1 + 12 * moved * (u - 1/2) has its mean at 1/2 + moved.
        if moved:
            slope = 12 * moved
            root = np.sqrt((1 - slope / 2) ** 2 + 2 * slope * first)
            first = (root - (1 - slope / 2)) / slope
        mixed = np.where(rng.random(n) < 0.5, first, rng.random(n))
        columns.append((first, mixed))
    tests = []
    for plain, speculative in zip(*columns, strict=True):
        tests.append(uniform_shift("", plain, speculative, 0.05))
        tests.append(kolmogorov_smirnov("", plain, speculative, 0.05))
    labels, groups = np.arange(20) >= 10, np.tile(np.arange(10) % 2, 2)
    tests.append(energy("", rng.random((20, 3)), labels, groups, rng, 199))
    return holm(tests)


def test_false_alarms_of_a_family_are_as_rare_as_promised() -> None:
    """2,000 simulated audits at alpha = 0.05: 100 alarms are expected at most, and the standard
    error is 9.7. Holm is conservative for tests that depend on each other, hence the lower bound.
    """
    rng = np.random.default_rng(1)
    n_alarms = sum(min(test.p_holm for test in family(rng, 0.0, 200)) <= 0.05 for _ in range(2000))
    assert 30 <= n_alarms <= 100 + 3 * 9.7


def test_each_test_by_itself_has_its_rate() -> None:
    """4,000 samples at 0.05: 200 expected, the standard error is 13.8; KS is conservative."""
    rng = np.random.default_rng(2)
    n_shift = n_ks = n_energy = 0
    for _ in range(4000):
        plain, speculative = rng.random(300), rng.random(200)
        n_shift += uniform_shift("", plain, speculative, 0.05).p <= 0.05
        n_ks += kolmogorov_smirnov("", plain, speculative, 0.05).p <= 0.05
        labels, groups = np.arange(16) >= 8, np.zeros(16, np.int64)
        n_energy += energy("", rng.random((16, 2)), labels, groups, rng, 99).p <= 0.05
    assert abs(n_shift - 200) < 4 * 13.8
    assert 100 < n_ks < 200 + 4 * 13.8
    assert abs(n_energy - 200) < 4 * 13.8


def test_texts_that_end_early_keep_the_rate() -> None:
    """A text ends after its first place above 0.8: the last of each is always large.

    Wald: the sum over a text still has mean 0 and n/12 as its variance. 2,000 audits at 0.05.
    """
    rng = np.random.default_rng(3)

    def sample() -> np.ndarray:
        places = rng.random(2000)
        ends = np.flatnonzero(places > 0.8)
        return places[: ends[149] + 1]  # 150 texts

    alarms = [uniform_shift("", sample(), sample(), 0.05).p <= 0.05 for _ in range(2000)]
    assert abs(sum(alarms) - 100) < 4 * 9.7


def test_the_power_is_the_one_claimed() -> None:
    """At the smallest shift, one test of five finds it in 90 % of 2,000 samples (error 0.7 %)."""
    rng = np.random.default_rng(4)
    n, alpha, n_tests = 800, 0.01, 5
    shift = smallest_shift(n, n, alpha, n_tests)
    assert shift == pytest.approx((3.0902 + 1.2816) * math.sqrt(1 / (6 * n)), rel=1e-3)
    found = [
        uniform_shift("", rng.random(n), rng.random(n) + shift, alpha).p <= alpha / n_tests
        for _ in range(2000)
    ]
    assert np.mean(found) == pytest.approx(0.9, abs=4 * 0.007)


def test_a_family_finds_the_smallest_shift() -> None:
    rng = np.random.default_rng(5)
    shift = smallest_shift(400, 400, 0.05, 5)
    found = [min(test.p_holm for test in family(rng, shift, 400)) <= 0.05 for _ in range(300)]
    assert np.mean(found) > 0.87
