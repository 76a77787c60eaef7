"""What a pair has saved pays for drafts of later texts; what it has lost stops them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ggufspec import _native
from ggufspec.drafting import constants
from ggufspec.drafting.acceptance import Account
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.pair_profile import PairProfile

CURVE = [1.0, 1.5, 2.0, 2.5]
LIKELY = [0.7, 0.7, 0.7]


def rule_of(curve: Sequence[float]) -> _native.LengthRule:
    rule = _native.LengthRule()
    rule.update(curve, 0.2, [0.7])
    return rule


def affordable(account: Account, *, is_free: bool) -> int:
    return account.n_affordable(LIKELY, rule_of(CURVE), 1.0, step=0.2, is_free=is_free)


def measured() -> PairProfile:
    profile = PairProfile(CostModel(4))
    for n, seconds in enumerate(CURVE, 1):
        for _ in range(4):
            profile.costs.observe_target(n, seconds)
            profile.costs.observe_plain(1.0)
            profile.costs.observe_draft(1, 0.1, 0)
    return profile


def test_while_there_is_a_balance_the_expectation_decides() -> None:
    account = Account()
    assert affordable(account, is_free=False) == len(LIKELY)
    account.observe(1, -3.0, is_free=False)
    assert affordable(account, is_free=False) == 0, "such a draft loses much where it is rejected"
    assert affordable(account, is_free=True) == len(LIKELY), "n-grams have their own"
    account.observe(4, 3.0, is_free=False)
    assert affordable(account, is_free=False) == len(LIKELY)


def test_drafts_of_little_risk_need_no_balance() -> None:
    account = Account([-5.0, -5.0])
    cheap = rule_of([1.0, 1.01, 1.02, 1.03])
    assert account.n_affordable([0.99] * 3, cheap, 1.0, step=0.01, is_free=False) == 3


def test_a_block_is_paid_for_once_and_its_risk_as_well() -> None:
    """Costs of half a pass for each block of three tokens, or for each token."""
    account, likely = Account([-5.0, -5.0]), [0.8] * 6
    cheap = rule_of([1.0 + 0.01 * n for n in range(7)])

    def n_affordable(reading: float, n_per_step: int) -> int:
        return account.n_affordable(likely, cheap, 1.0, reading, 0.5, n_per_step, is_free=False)

    assert n_affordable(0.0, 3) == 6
    assert n_affordable(0.0, 1) == 2
    assert n_affordable(1.0, 3) == 0, "reading is paid for, too"


def test_old_luck_does_not_pay_for_new_losses() -> None:
    account = Account()
    for _ in range(100):
        account.observe(5, 3.0, is_free=False)
    n_lost = 0
    while affordable(account, is_free=False):
        account.observe(1, -2.0, is_free=False)
        n_lost += 1
    assert n_lost == pytest.approx(constants.MAX_BALANCE / 2, abs=1)


def test_a_losing_pair_invests_a_share_of_what_it_writes() -> None:
    account, n_drafts, n_tokens = Account([0.0, 0.0]), 0, 10_000
    for _ in range(n_tokens):
        drafts = bool(affordable(account, is_free=False))
        n_drafts += drafts
        account.observe(1, -1.0 if drafts else 0.0, is_free=False)
    assert n_drafts == pytest.approx(constants.INVESTED_SHARE / 2 * n_tokens, rel=0.05)


def test_texts_share_the_account_of_their_pair_except_those_with_a_seed() -> None:
    profile = measured()
    profile.account.observe(1, -5.0, is_free=False)
    assert profile.policy(0.0, repeats=False, in_blocks=False).account is profile.account
    for _ in range(2):
        seeded = profile.policy(0.0, repeats=True, in_blocks=False).account
        assert seeded.balances == Account().balances
        seeded.observe(1, -5.0, is_free=False)


def test_balances_are_kept_between_processes() -> None:
    profile = measured()
    profile.account.observe(1, -5.0, is_free=False)
    again = PairProfile.of_document(profile.to_document(), CostModel(4))
    assert again.account.balances == profile.account.balances != Account().balances
    old = {**profile.to_document()}
    del old["balances"]
    assert PairProfile.of_document(old, CostModel(4)).account.balances == Account().balances


@pytest.mark.parametrize("damaged", [[1.0], 3, ["1", "2"], [1.0, float("nan")]])
def test_damaged_balances_are_refused(damaged: object) -> None:
    document = {**measured().to_document(), "balances": damaged}
    with pytest.raises(ValueError, match="balances"):
        PairProfile.of_document(document, CostModel(4))
