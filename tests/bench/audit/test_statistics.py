"""The tests have their known values, their false-alarm rate and the power that is claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ggufspec.bench.audit.statistics import (
    Test,
    energy,
    holm,
    kolmogorov_smirnov,
    smallest_shift,
    text_profiles,
    uniform_shift,
)


def energy_of(plain: list[list[int]], speculative: list[list[int]]) -> Test:
    return energy("", text_profiles([*plain, *speculative]), np.random.default_rng(0))


def test_ks_of_samples_that_do_not_overlap_and_of_the_same() -> None:
    """The band of 50 and 30 values at 0.01: sqrt(ln 400 / 100) + sqrt(ln 400 / 60) = 0.5607."""
    low, high = np.linspace(0, 0.4, 50), np.linspace(0.6, 1, 30)
    apart = kolmogorov_smirnov("", low, high, 0.01)
    assert (apart.effect, apart.high) == (1.0, 1.0)
    assert apart.low == pytest.approx(1 - 0.5607, abs=1e-4)
    assert apart.p < 1e-12
    same = kolmogorov_smirnov("", low, low, 0.01)
    assert (same.effect, same.p, same.low) == (0.0, 1.0, 0.0)


def test_a_shift_and_its_interval() -> None:
    """1,000 values each: the standard error is sqrt(1/6000) = 0.01291, 2.5758 of them 0.03325."""
    test = uniform_shift("", np.full(1000, 0.5), np.full(1000, 0.45), 0.01)
    assert test.effect == pytest.approx(-0.05)
    assert (test.low, test.high) == pytest.approx((-0.08325, -0.01675), abs=1e-5)
    assert test.p == pytest.approx(math.erfc(0.05 * math.sqrt(6000) / math.sqrt(2)))


def test_holms_adjustment_equals_the_reference() -> None:
    for given, adjusted in (
        ((0.01, 0.04, 0.03, 0.005), [0.03, 0.06, 0.06, 0.02]),
        ((0.7, 0.9), [1.0, 1.0]),
    ):
        tests = holm([Test("", 0.0, None, None, p, p) for p in given])
        assert [test.p_holm for test in tests] == pytest.approx(adjusted)


def test_energy_finds_other_texts_and_is_exact_for_few() -> None:
    found = energy_of([[1, 2, 3, 4]] * 12, [[4, 3, 2, 1]] * 12)
    assert found.p <= 0.005
    assert found.effect > 0.5
    # Two pairs have four permutations: of these, two are as far apart as they are.
    assert energy_of([[1], [1]], [[2], [2]]).p == 0.5
    assert energy_of([[1, 2]], [[3]]).p == 1.0, "a pair can only be swapped"


def test_energy_compares_texts_of_the_same_prompt() -> None:
    """Each prompt has its own first tokens, beside which other last tokens would not show."""
    texts = [[100 * prompt + i for i in range(30)] for prompt in range(12)]
    assert energy_of(texts, texts).p == 1.0
    plain, other = ([[*text, *end] for text in 2 * texts] for end in ((1, 2), (2, 1)))
    assert energy_of(plain, other).p <= 0.005


def test_false_alarms_and_power_are_as_claimed() -> None:
    """2,000 samples at 0.05: 100 alarms are expected, the standard error is 9.7; at the smallest
    shift, one test of five finds it in 90 % (error 0.7 %)."""
    rng = np.random.default_rng(1)
    n, alpha, n_tests, n_alarms, n_found = 800, 0.05, 5, 0, 0
    shift = smallest_shift(n, n, alpha, n_tests)
    assert shift == pytest.approx((2.5758 + 1.2816) * math.sqrt(1 / (6 * n)), rel=1e-3)
    for _ in range(2000):
        plain, same = rng.random((2, n))
        n_alarms += uniform_shift("", plain, same, alpha).p <= alpha
        n_found += uniform_shift("", plain, same + shift, alpha).p <= alpha / n_tests
    assert abs(n_alarms - 100) < 4 * 9.7
    assert n_found / 2000 == pytest.approx(0.9, abs=4 * 0.007)
