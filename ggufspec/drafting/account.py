"""Keeps account of what a pair's drafts have saved and lost, to limit what they may still cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ggufspec import _native
from ggufspec.drafting import constants


class Account:
    """Two balances in plain passes: of free drafts (n-grams, forced text), and of model drafts.

    Savings are added and losses subtracted. A share of the generated tokens is also added, so that
    a losing pair can try again. An upper limit keeps old savings from paying for many new losses.
    """

    def __init__(self, balances: Sequence[float] = (constants.START_BALANCE,) * 2) -> None:
        self.balances = list(balances)

    @staticmethod
    def of_document(balances: object) -> Account:
        """The account with balances from JSON. Raises ValueError if they are not two numbers."""
        numbers = balances if isinstance(balances, list) and len(balances) == 2 else [math.nan]
        if all(isinstance(each, (int, float)) and math.isfinite(each) for each in numbers):
            return Account([min(float(each), constants.MAX_BALANCE) for each in numbers])
        raise ValueError(f"{str(balances)[:40]} is not a list of two balances")

    def observe(self, n_tokens: int, saved: float, *, is_free: bool) -> None:
        """A round added `n_tokens` and saved `saved` plain passes (negative: lost them)."""
        invested = constants.INVESTED_SHARE / 2 * n_tokens
        for i, balance in enumerate(self.balances):
            balance += invested + (saved if is_free == (i == 0) else 0.0)
            self.balances[i] = min(balance, constants.MAX_BALANCE)

    def n_affordable(
        self,
        probs: Sequence[float],
        rule: _native.LengthRule,
        plain: float,
        reading: float = 0.0,
        step: float = 0.0,
        n_per_step: int = 1,
        *,
        is_free: bool,
        is_own: bool = True,
    ) -> int:
        """How many tokens with acceptance probabilities `probs` may be drafted.

        All of them while the balance is positive. Otherwise, and always for drafts from other texts
        (not `is_own`), the largest number whose expected loss is small beside its expected gain.
        `rule` has the costs of target passes; `plain`: seconds per token without drafts. Of the
        draft model: seconds of `reading` before its first step, of a step, and tokens per step.
        """
        if is_own and self.balances[0 if is_free else 1] > 0:
            return len(probs)
        return rule.n_of_small_risk(probs, plain, constants.SMALL_RISK, reading, step, n_per_step)
