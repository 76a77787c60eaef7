"""Of a block of distributions, as many tokens are drawn as bring the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fake_blocks import FakeBlocks
from fakes import drafter_of, known_costs

from ggufspec import _native
from ggufspec.decoding.types import Round
from ggufspec.drafting import profile_store
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import Action, LengthPolicy
from ggufspec.drafting.pair_profile import StoredProfile

SURE, LIKELY, UNLIKELY = 6.0, 1.5, 0.0  # gaps that INTERCEPT and SLOPE make 0.99, 0.78, 0.32
INTERCEPT, SLOPE = -0.75, 1.35
STAIRS = [3.6, 5.8, 8.3, 5.5, 8.0, 10.4, 10.2, 10.0, 11.2]  # three cost more than four


def policy_at(
    curve: Sequence[float] = STAIRS, rate: float = 0.5, bonus: float = 0.0, n_max: int = 30
) -> LengthPolicy:
    """In a round of which the next token is not expected to be accepted, at that rate."""
    costs = known_costs(curve, 1e-9, len(curve) - 1, plain=1 / rate)
    policy = LengthPolicy(costs, (INTERCEPT, SLOPE), block_bonus=bonus)
    policy.observe_gaps([-20.0] * 16)
    policy.start_round(n_max, 1)
    return policy


def n_drawn(policy: LengthPolicy, gaps: Sequence[float]) -> int:
    """It looks ahead before each token, as ModelDrafter does once there is a block."""
    while policy.n_drawn < len(gaps):
        policy.foresee(gaps[policy.n_drawn :])
        if not (policy.should_evaluate() and policy.should_draw(gaps[policy.n_drawn])):
            break
    return policy.n_drawn


def chances(gaps: Sequence[float]) -> list[float]:
    model = _native.AcceptanceModel(INTERCEPT, SLOPE)
    return [model.probability(gap) for gap in gaps]


# What is foreseen


@pytest.mark.parametrize("seed", range(20))
def test_it_takes_the_prefix_that_gains_most(seed: int) -> None:
    """In expected tokens, less what the pass costs at the rate that is reached."""
    rng = np.random.default_rng(seed)
    n_most = int(rng.integers(1, 12))
    curve = np.cumsum([1.0, *rng.exponential(0.4, n_most)])
    curve[1:] *= rng.uniform(0.6, 1.0, n_most)
    bonus = float(rng.choice([0.0, 0.07]))
    rate = float(rng.uniform(1.0, 2.5))
    policy = policy_at(curve.tolist(), rate, bonus, n_max=int(rng.integers(1, n_most + 1)))
    gaps = rng.exponential(2.0, int(rng.integers(1, n_most + 1))).tolist()
    reached = np.cumprod(chances(gaps))[: policy.n_max]
    expected = np.cumsum(reached * (1 + bonus * np.arange(len(reached))))
    gains = [0.0, *(expected - policy.rate * (curve[1 : len(reached) + 1] - curve[0]))]
    assert n_drawn(policy, gaps) == int(np.argmax(gains))


def test_it_looks_over_an_expensive_size_to_a_cheap_one_behind_it() -> None:
    assert n_drawn(policy_at(), [SURE, SURE, SURE]) == 3
    assert n_drawn(policy_at(), [LIKELY, LIKELY, LIKELY]) == 3
    assert n_drawn(policy_at(), [SURE, LIKELY]) == 0, "the cheap one is out of reach"
    assert n_drawn(policy_at(), [SURE, UNLIKELY, SURE]) == 3
    assert n_drawn(policy_at(), [UNLIKELY, LIKELY, LIKELY]) == 0


def test_other_drawn_tokens_than_the_likeliest_change_what_is_foreseen() -> None:
    """Of DFlash2: the first look wants three tokens, the second, behind the first, no more."""
    policy = policy_at([1.0 + 0.4 * n for n in range(9)])
    policy.foresee([SURE, SURE, SURE])
    assert policy.should_draw(SURE)
    policy.foresee([UNLIKELY, UNLIKELY])
    assert policy.should_evaluate()
    assert not policy.should_draw(UNLIKELY)
    assert policy.n_drawn == 1


def test_it_draws_no_more_than_the_round_and_the_costs_allow() -> None:
    for n_max in (1, 2, 8, 30):
        policy = policy_at([1.0 + 0.01 * n for n in range(9)], n_max=n_max)
        assert n_drawn(policy, [SURE] * 30) == min(n_max, 8)
        assert not policy.should_evaluate()
        assert policy.why == "the maximum draft length is reached"


def test_no_token_is_drawn_that_is_worth_more_elsewhere() -> None:
    """`least`: beside the chain, in a tree."""
    for least, n in ((0.0, 4), (0.5, 2), (0.9, 1)):
        policy = policy_at([1.0 + 0.01 * n for n in range(9)])
        policy.least = least
        assert n_drawn(policy, [SURE, LIKELY, LIKELY, LIKELY]) == n + (least == 0.5)


def test_what_is_declined_was_evaluated_and_the_reason_is_that_it_is_uncertain() -> None:
    policy = policy_at()
    assert n_drawn(policy, [UNLIKELY] * 5) == 0
    assert policy.why == "the draft model is uncertain about the next token"
    assert (policy.n_evaluated, policy.gaps, policy.expected) == (1, [UNLIKELY], 0.0)


def test_the_next_round_starts_without_what_was_foreseen() -> None:
    """As a draft that is no block's: by thresholds."""
    policy = policy_at([1.0 + 0.01 * n for n in range(9)], rate=1.0)
    policy.foresee([UNLIKELY] * 8)
    policy.foresee([])
    assert not policy.should_draw(SURE)
    policy.observe_gaps([SURE] * 16)
    policy.observe_round(Round([1], 0, 0, 0.0, 0.0, 0.0))
    policy.start_round(8, 1)
    assert policy.should_draw(SURE)
    assert policy.n_drawn == 1


def test_forced_tokens_in_front_count_as_drawn() -> None:
    policy = policy_at()
    assert policy.take([0.97] * 3) == 3, "up to the cheap size"
    assert n_drawn(policy, [0.0] * 3 + [LIKELY]) == 3
    policy.start_round(8, 1)
    policy.take([0.97] * 3)
    assert n_drawn(policy, [0.0] * 3 + [SURE] * 5) > 3


# The price of a block


FLAT = [1.0 + 0.02 * n for n in range(9)]


def priced(curve: Sequence[float], step: float, n_per_step: int, intercept: float) -> LengthPolicy:
    return LengthPolicy(known_costs(curve, step, n_per_step), (intercept, 0.0))


def test_a_block_is_drafted_that_tokens_at_that_price_each_would_not_be() -> None:
    tokens, blocks = (priced(FLAT, 0.9, n_per_step, 1.4) for n_per_step in (1, 8))
    assert blocks.n_reachable == 0  # no round yet
    assert tokens.start_round(8, 1) is Action.SKIP
    assert blocks.start_round(8, 1) is Action.DRAFT
    assert blocks.rate > tokens.rate
    assert blocks.n_reachable == 8
    for n_per_step in (2, 4):
        assert priced(FLAT, 0.9, n_per_step, 1.4).start_round(8, 1) is Action.DRAFT


def test_no_tokens_are_expected_behind_the_block() -> None:
    """A head has no states of drafted tokens, so that it cannot go on behind them."""
    curve = [1.0 + 0.02 * n for n in range(17)]
    whole, limited = (priced(seconds, 0.1, 7, 3.5) for seconds in (curve, curve[:8]))
    for policy in (whole, limited):
        assert policy.start_round(16, 1) is Action.DRAFT
    assert whole.rate == limited.rate
    assert whole.n_reachable == 7
    assert whole.prefix_length([0.99] * 16).n_draft == 16, "n-grams may draft more"


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="numbers above 0"):
        CostModel(9, n_per_step=0)


# Costs


def costs_of(*, step: float = 0.5, n_per_step: int = 1) -> CostModel:
    costs = known_costs([1.0 + 0.02 * n for n in range(9)], step, n_per_step)
    costs.is_frozen = False
    return costs


def test_drafting_takes_as_many_steps_as_there_are_blocks() -> None:
    costs = costs_of(n_per_step=4)
    assert [costs.drafting(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0.5, 0.5, 1.0, 1.0, 1.5]
    single = costs_of()
    assert [single.drafting(n) for n in (0, 1, 4)] == [0, 0.5, 2.0]


def test_whether_a_block_can_pay_depends_on_all_that_it_gives() -> None:
    for step, in_steps, in_blocks in ((0.5, False, False), (2.0, True, False), (8.0, True, True)):
        assert costs_of(step=step).draft_cannot_pay == in_steps
        assert costs_of(step=step, n_per_step=8).draft_cannot_pay == in_blocks


@pytest.mark.parametrize("repeats", [False, True])
def test_a_profile_keeps_the_size_of_blocks(repeats: bool) -> None:
    facts = {"pair": "of blocks", "repeats": repeats}
    stored = StoredProfile(facts, n_per_step=4)
    new = stored.profile(9)
    assert new.costs.n_per_step == 4
    new.settle(costs_of())  # as calibration finds them
    assert new.costs.drafting(4) == 0.5
    assert new.policy(0.7, repeats=repeats, in_blocks=True).costs.drafting(8) == 1.0
    for _ in range(9):
        new.costs.observe_target(1, 1.0)
    stored.remember(new)
    for n_per_step in (4, 8):  # another file with the same facts would be another record
        known = StoredProfile(facts, n_per_step=n_per_step).recall(9)
        assert known is not None
        again = known.policy(0.7, repeats=repeats, in_blocks=True).costs
        assert (again.n_per_step, again.drafting(8)) == (n_per_step, 0.5 * 8 / n_per_step)
    assert len(list(profile_store.records())) == 1


# The policy


def policy_of(costs: CostModel, intercept: float = INTERCEPT, slope: float = SLOPE) -> LengthPolicy:
    return LengthPolicy(costs, (intercept, slope))


def played(policy: LengthPolicy, gaps: Sequence[float], n_max: int = 8) -> tuple[Action, int]:
    """A round without a session."""
    action = policy.start_round(n_max, 1)
    return action, n_drawn(policy, gaps) if action is Action.DRAFT else 0


def test_the_first_draft_with_unknown_costs_is_a_block_not_a_token() -> None:
    costs = CostModel(9, n_per_step=4)
    for _ in range(2):
        costs.observe_target(1, 1.0)
    policy = policy_of(costs, 4.0, 0.0)
    assert not costs.knows_draft
    assert played(policy, [SURE] * 4) == (Action.DRAFT, 4)


def test_the_seconds_of_a_block_are_those_of_a_step() -> None:
    """Whatever is drawn of it; more than one block is measured for each of them."""
    costs = costs_of(step=0.1, n_per_step=4)
    policy = policy_of(costs, 4.0, 0.0)
    for gaps in ([SURE] * 4, [SURE, SURE], [SURE] * 3):
        for _ in range(60):
            _, n = played(policy, gaps)
            policy.observe_verdict(n, [1.0] * n)
            policy.observe_round(Round([1] * (n + 1), n, n, 0.3, 1.0 + 0.02 * n, 0.0))
        assert costs.step == pytest.approx(0.3, rel=0.02)
    for _ in range(60):
        _, n = played(policy, [SURE] * 8)
        assert policy.n_evaluated == n == 8
        policy.observe_verdict(n, [1.0] * n)
        policy.observe_round(Round([1] * (n + 1), n, n, 0.8, 1.0 + 0.02 * n, 0.0))
    assert costs.step == pytest.approx(0.4, rel=0.02)


def test_a_rejected_block_is_charged_once() -> None:
    costs = costs_of(step=0.5, n_per_step=8)
    costs.is_frozen = True
    policy = policy_of(costs, 4.0, 0.0)
    before = policy.costs.balance
    _, n = played(policy, [SURE] * 8)
    assert n == 8
    policy.observe_verdict(0, [0.0])
    policy.observe_round(Round([1], n, 0, 0.5, 1.16, 0.0))
    lost = before - policy.costs.balance
    assert lost == pytest.approx(0.5 + 0.16, abs=0.03)


def test_branches_in_a_block_cost_no_step() -> None:
    """Their rows are those of the chain's block."""
    costs = costs_of(n_per_step=8)
    policy = policy_of(costs, 4.0, 0.0)
    assert played(policy, [SURE] * 8) == (Action.DRAFT, 8)
    assert policy.step_price(3.0) == 0
    before = policy.costs.balance
    policy.observe_growth(0.5, 2, 3)
    policy.observe_verdict(0, [0.0])
    policy.observe_round(Round([1], 8, 0, 0.5, 1.16, 0.0))
    assert costs.step == 0.5
    assert before - policy.costs.balance == pytest.approx(0.66, abs=0.03)
    tokens = policy_of(costs_of(step=0.1), 4.0, 0.0)
    tokens.start_round(8, 1)
    assert tokens.step_price(3.0) > 0


@pytest.mark.parametrize(("sure", "n_wanted"), [((6, 6, 6, 0), 3), ((6, 0, 0, 0), 0)])
def test_the_drafter_looks_ahead_before_the_first_token(sure: Sequence[int], n_wanted: int) -> None:
    """The second text's first token alone is sure: it would lead to an expensive size."""
    costs = known_costs(STAIRS[:5], 0.1, n_per_step=4)
    tokens = [1, 2]
    head = FakeBlocks(tokens, lambda known, drafted: np.eye(1, 9, 3)[0] * sure[len(drafted)], 4)
    policy = policy_of(costs, -4.0, 3.0)
    policy.observe_gaps([SURE] * 16)
    drafter = drafter_of("model", head, policy=policy, n_draft=4, tree="off")
    assert len(drafter.draft(tokens, 4).tokens) == n_wanted


def test_advice_names_a_block_that_is_too_slow() -> None:
    policy = policy_of(costs_of(step=9.0, n_per_step=8))
    for _ in range(100):
        assert policy.start_round(8, 1) in (Action.SKIP, Action.PLAIN)
        policy.observe_round(Round([1], 0, 0, 0.0, 1.0, 0.0))
    assert "one block of draft tokens costs 8.69x a target pass" in (policy.advice() or "")
