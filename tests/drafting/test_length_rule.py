"""The rule of the draft length, and the model of acceptance that it reads: without a text."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from fakes import known_costs

from ggufspec import _native
from ggufspec.drafting.draft_length import LengthPolicy

COEFFICIENTS = (0.4, 2.0)


@pytest.mark.parametrize("seed", range(12))
def test_the_rule_equals_its_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_most = int(rng.integers(1, 17))
    curve = np.cumsum([1.0, *rng.exponential(0.3, n_most)]) * rng.choice([1e-3, 1.0])
    curve[1:] *= rng.uniform(0.6, 1.0, n_most)
    step = float(rng.exponential(0.1) * curve[0])
    chances = rng.beta(2, 1, 8).tolist()
    min_rate = float(rng.choice([0.0, 1.5]) / curve[0])
    bonus = float(rng.choice([0.0, 0.05]))
    found = _native.best_rule(curve.tolist(), step, chances, min_rate, bonus)
    expected = reference.best_rule(curve.tolist(), step, chances, min_rate, bonus)
    np.testing.assert_allclose(found[0], expected.evaluate_from, rtol=1e-6)
    np.testing.assert_allclose(found[1], expected.draw_from, rtol=1e-6)
    np.testing.assert_allclose(found[2:], [expected.tokens, expected.seconds], rtol=1e-9)


def test_the_acceptance_model_follows_observations() -> None:
    rng = np.random.default_rng(2)
    model = _native.AcceptanceModel(*COEFFICIENTS, 12.0)
    for _ in range(600):
        gap = float(rng.exponential(1.5))
        truth = 1 / (1 + np.exp(-(-0.5 + 0.8 * gap)))
        model.observe(gap, float(rng.random() < truth))
    for gap in (0.2, 1.0, 3.0):
        assert model.probability(gap) == pytest.approx(1 / (1 + np.exp(0.5 - 0.8 * gap)), abs=0.12)


def test_a_larger_gap_is_never_less_likely() -> None:
    model = _native.AcceptanceModel(*COEFFICIENTS, 12.0)
    for _ in range(300):
        model.observe(0.1, 1.0)
        model.observe(5.0, 0.0)
    assert model.probability(5.0) >= model.probability(0.1)


@pytest.mark.parametrize("gap", [0.0, 1e-300, 1e300, float("inf")])
def test_no_gap_is_too_large(gap: float) -> None:
    model = _native.AcceptanceModel(*COEFFICIENTS, 12.0)
    for came in (0.0, 1.0) * 50:
        model.observe(gap, came)
    assert 0 < model.probability(gap) < 1


def test_what_is_there_already_is_taken_as_far_as_it_pays() -> None:
    """A draft of n-grams, or forced text."""
    fixed = LengthPolicy()
    fixed.start_round(2, 1)
    assert fixed.take([0.9, 0.1]) == fixed.prefix_length([0.9, 0.1]).n_draft == 2  # all
    assert not fixed.take([])
    policy = LengthPolicy(known_costs([1.0, 1.2, 1.4, 3.0, 3.1], 1.0), (0.0, 0.0))
    for probabilities, n in (([0.9] * 3, 2), ([0.9, 0.1, 0.9], 1), ([0.1], 0), ([], 0)):
        assert policy.prefix_length(probabilities).n_draft == n
        policy.start_round(4, 1)
        assert policy.take(probabilities) == n == policy.n_taken == policy.n_drawn
        assert policy.expected == pytest.approx(sum(np.cumprod(probabilities[:n])))
        assert not policy.n_evaluated


def test_forced_tokens_are_no_part_of_the_limit_but_of_what_costs_are_known_for() -> None:
    costs = known_costs([1.0 + 0.01 * n for n in range(9)], 0.001)
    policy = LengthPolicy(costs, (20.0, 0.0))
    cases = ((0, 2, 2), (0, 32, 8), (3, 2, 5), (6, 4, 8), (20, 4, 8), (8, 4, 8))
    for n_forced, n_most, n_drawn in cases:
        policy.start_round(n_most, 1)
        assert policy.take([0.99] * n_forced) == min(n_forced, 8)
        while policy.should_evaluate():
            assert policy.should_draw(5.0)
        assert policy.n_drawn == n_drawn
        assert policy.take([0.99] * 5) == min(5, 8 - n_drawn)  # behind drawn tokens, too
    assert policy.n_evaluated == 0
    assert policy.prefix_length([0.99] * 32).n_draft == 8


def test_unlikely_forced_text_makes_further_drafting_not_worth_it() -> None:
    """What follows it counts only if it is accepted."""
    drawn = []
    for probability in (0.99, 0.3):
        costs = known_costs([1.0, 1.01, *(1.3 + 0.25 * n for n in range(6))], 0.05)
        policy = LengthPolicy(costs, (0.5, 0.0))
        policy.start_round(6, 1)
        assert policy.take([probability]) == 1
        while policy.should_evaluate() and policy.should_draw(1.0):
            pass
        drawn.append(policy.n_drawn)
    assert drawn[0] > drawn[1] == 1
    assert policy.why == "the draft is unlikely to be accepted so far"
