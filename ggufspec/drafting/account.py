"""What the drafts of a pair have saved and lost, between texts, and what they may still cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ggufspec.drafting import constants


class Account:
    """Balances of free drafts (n-grams, forced text) and of those of the draft model.

    Both are counted in plain passes. What drafts save is added up to a limit, so that old luck does
    not pay for new losses; so is a share of what is written, which a losing pair may invest.
    """

    def __init__(self, balances: Sequence[float] = (constants.START_BALANCE,) * 2) -> None:
        self.balances = list(balances)

    @staticmethod
    def of_document(balances: object) -> Account:
        """Of balances in JSON. Raises ValueError if they are none."""
        numbers = balances if isinstance(balances, list) and len(balances) == 2 else [math.nan]
        if all(isinstance(each, (int, float)) and math.isfinite(each) for each in numbers):
            return Account([min(float(each), constants.MAX_BALANCE) for each in numbers])
        raise ValueError(f"{str(balances)[:40]} are no two balances")

    def observe(self, n_tokens: int, saved: float, *, is_free: bool) -> None:
        """A round wrote `n_tokens`; it took so many plain passes less than plain decoding does."""
        invested = constants.INVESTED_SHARE / 2 * n_tokens
        for i, balance in enumerate(self.balances):
            balance += invested + (saved if is_free == (i == 0) else 0.0)
            self.balances[i] = min(balance, constants.MAX_BALANCE)

    def n_affordable(
        self,
        probs: Sequence[float],
        curve: Sequence[float],
        plain: float,
        *,
        drafting: Callable[[int], float] = lambda _: 0.0,
        is_free: bool,
        is_own: bool = True,
    ) -> int:
        """How many tokens of these acceptance probabilities may be drafted.

        All while the balance is positive, or as many as risk little beside what they promise; that
        is asked of drafts from other texts (not `is_own`) in any case.
        `curve`: seconds of target passes over 1, 2 ... tokens; `plain`: of a token without drafts;
        `drafting`: of the draft model, for so many tokens.
        """
        n_most = min(len(probs), len(curve) - 1)
        if is_own and self.balances[0 if is_free else 1] > 0:
            return n_most
        for n in range(n_most, 0, -1):
            paid = curve[n] - curve[0] + drafting(n)
            risk, won, reached = 0.0, 0.0, 1.0
            for k, p in enumerate(probs[:n]):
                risk += reached * (1 - p) * max(paid - k * plain, 0.0)
                reached *= p
                won += reached * plain
            is_small = risk <= constants.SMALL_RISK * (won - paid)
            if is_small and (n == n_most or paid < won):
                return n
        return 0
