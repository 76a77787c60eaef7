"""Learns how many more tokens are accepted where a draft is judged as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec import _native
from ggufspec.drafting import constants


class BlockBonus:
    """A linear regression, of the `block_bonus` of a rule; not if that is 0."""

    def __init__(self, rule: _native.LengthRule) -> None:
        self.is_learned = rule.block_bonus > 0
        self._rule = rule
        self._weight = constants.BLOCK_BONUS_WEIGHT
        self._sum = self._weight * rule.block_bonus

    def observe(self, n_accepted: int, acceptances: Sequence[float]) -> None:
        if not self.is_learned:
            return
        reached, token_wise, further = 1.0, 0.0, 0.0
        for n, acceptance in enumerate(acceptances):
            reached *= acceptance
            token_wise += reached
            further += n * reached
        self._weight += further**2
        self._sum += further * (n_accepted - token_wise)
        found = self._sum / self._weight
        self._rule.block_bonus = min(max(found, 0.0), constants.MAX_BLOCK_BONUS)
