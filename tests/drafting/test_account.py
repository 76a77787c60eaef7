"""What a pair has saved pays for drafts of later texts; what it has lost stops them."""

from __future__ import annotations

import math

import pytest
from fakes import known_costs

from ggufspec.decoding.types import Round
from ggufspec.drafting import constants
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import Action, LengthPolicy
from ggufspec.drafting.pair_profile import PairProfile

CURVE = [1.0, 1.3, 1.6, 1.9]


def policy_of(balance: float, chance: float, costs: CostModel) -> LengthPolicy:
    """A policy that expects each token to be accepted with probability `chance`."""
    prior = (math.log(chance / (1 - chance)), 0.0)
    costs.balance = balance
    return LengthPolicy(costs, prior)


def uncertain(balance: float) -> LengthPolicy:
    """Its drafts gain on average, and lose much where they are rejected."""
    return policy_of(balance, 0.7, known_costs(CURVE, 0.2))


def written(policy: LengthPolicy, n_tokens: int) -> None:
    """A round of n-grams with three tokens, without those that were rejected."""
    policy.observe_round(Round([1] * n_tokens, 3, n_tokens - 1, 0.0, 1.9, 0.0))


def measured() -> PairProfile:
    profile = PairProfile(CostModel(4))
    profile.costs.restore(dict(enumerate(CURVE, 1)), 1.0, 0.1, 0.0)
    return profile


def test_while_there_is_a_balance_the_expectation_decides() -> None:
    policy = uncertain(1.0)
    assert policy.start_round(3, 1) is Action.DRAFT
    assert policy.prefix_length([0.6] * 3).n_draft == 2
    assert policy.prefix_length([0.6] * 3, is_own=False).n_draft == 1, "others have no balance"
    written(policy, 1)
    written(policy, 1)
    assert policy.start_round(3, 1) is Action.SKIP
    assert policy.why == "the drafts of this pair have cost more than they saved"
    assert policy.prefix_length([0.6] * 3).n_draft == 1
    written(policy, 4)
    assert policy.start_round(3, 1) is Action.DRAFT


def test_drafts_of_little_risk_need_no_balance() -> None:
    policy = policy_of(-5.0, 0.99, known_costs([1.0, 1.01, 1.02, 1.03], 0.01))
    assert policy.start_round(3, 1) is Action.DRAFT
    assert policy.n_max == 3


def test_a_block_is_paid_for_once_and_its_risk_as_well() -> None:
    """Costs of half a pass for each block of three tokens, or for each token."""

    def n_affordable(n_unread: int, n_per_step: int) -> int:
        curve = [1.0 + 0.01 * n for n in range(7)]
        policy = policy_of(-5.0, 0.8, known_costs(curve, 0.5, n_per_step, read=0.1))
        policy.start_round(6, n_unread)
        return policy.n_max

    assert n_affordable(1, 3) == 6
    assert n_affordable(1, 1) == 2
    assert n_affordable(11, 3) == 0, "reading is paid for, too"


def test_old_luck_does_not_pay_for_new_losses() -> None:
    policy = uncertain(0.0)
    for _ in range(100):
        written(policy, 4)
    n_lost = 0
    while policy.start_round(3, 1) is Action.DRAFT:
        written(policy, 1)
        n_lost += 1
    assert n_lost == pytest.approx(constants.MAX_BALANCE / 0.88, abs=1)


def test_a_losing_pair_invests_a_share_of_what_it_writes() -> None:
    policy, n_drafts, n_tokens = uncertain(0.0), 0, 10_000
    for _ in range(n_tokens):
        if policy.start_round(3, 1) is Action.DRAFT:
            n_drafts += 1
            written(policy, 1)
        else:
            policy.observe_round(Round([1], 0, 0, 0.0, 1.0, 0.0))
    assert n_drafts * 0.9 == pytest.approx(constants.INVESTED_SHARE * n_tokens, rel=0.05)


def test_texts_share_the_balance_of_their_pair_except_those_with_a_seed() -> None:
    profile = measured()
    profile.costs.balance = -5.0
    assert profile.policy(0.0, repeats=False, in_blocks=False).costs.balance == -5.0
    for _ in range(2):
        seeded = profile.policy(0.0, repeats=True, in_blocks=False).costs
        assert seeded.balance == constants.START_BALANCE
        seeded.balance = -5.0


def test_the_balance_is_kept_between_processes() -> None:
    profile = measured()
    profile.costs.balance = -5.0
    again = PairProfile.of_document(profile.to_document(), CostModel(4))
    assert again.costs.balance == -5.0
    old = profile.to_document()
    del old["balance"]
    assert PairProfile.of_document(old, CostModel(4)).costs.balance == constants.START_BALANCE


@pytest.mark.parametrize("damaged", [[1.0], "1", float("nan")])
def test_a_damaged_balance_is_refused(damaged: object) -> None:
    document = {**measured().to_document(), "balance": damaged}
    with pytest.raises(ValueError, match="balance"):
        PairProfile.of_document(document, CostModel(4))
