"""Limits the time that rejected drafts may cost in a text."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.drafting import constants


class LossLimit:
    """What drafts have cost in a text beyond plain decoding, and what they may still cost.

    Half of the limit is for free drafts (n-grams, forced text), half for the draft model, whatever
    the other has lost. All is counted in plain passes; a negative loss is time that was saved.
    """

    def __init__(self) -> None:
        self._n_tokens = 0  # of the text
        self._lost_free = self._lost_model = 0.0

    def observe(self, n_tokens: int, lost: float, *, is_free: bool) -> None:
        """A round wrote `n_tokens`; it took so many plain passes more than plain decoding does."""
        self._n_tokens += n_tokens
        if is_free:
            self._lost_free += lost
        else:
            self._lost_model += lost

    def n_affordable(
        self,
        probs: Sequence[float],
        curve: Sequence[float],
        plain: float,
        *,
        fixed: float = 0.0,
        step: float = 0.0,
        is_free: bool,
    ) -> int:
        """How many tokens of these acceptance probabilities risk no more than may still be lost.

        `curve`: seconds of target passes over 1, 2 ... tokens; `plain`: of a token without drafts;
        `fixed`, `step`: of the draft model, once and for each token.
        """
        limit = constants.MAX_LOSS * max(self._n_tokens, constants.N_LOSS_TOKENS)
        lost = self._lost_free if is_free else self._lost_model
        room = max(limit - self._lost_free - self._lost_model, limit / 2 - lost) * plain
        n_most = min(len(probs), len(curve) - 1)
        for n in range(n_most, 0, -1):
            paid = curve[n] - curve[0] + fixed + n * step
            if paid <= room and n == n_most:
                return n
            risk, won, reached = 0.0, 0.0, 1.0
            for k, p in enumerate(probs[:n]):
                risk += reached * (1 - p) * max(paid - k * plain, 0.0)
                reached *= p
                won += reached * plain
            is_small = fixed <= room and risk <= constants.SMALL_RISK * (won - paid)
            if (paid <= room or is_small) and (n == n_most or paid < won):
                return n
        return 0
