"""Predicts how a text continues from its own repetitions; the index itself is native/ngrams.h's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ggufspec import _native
from ggufspec.decoding.types import token_array
from ggufspec.drafting import constants


class Prediction(NamedTuple):
    """Tokens that may follow a text; for each, its acceptance probability if those before it are
    accepted."""

    tokens: Sequence[int] = ()
    probs: Sequence[float] = ()


class NgramIndex:
    """Predicts what follows a text, and learns how often its predictions are accepted."""

    def __init__(self) -> None:
        self._ngrams = _native.Ngrams(
            constants.NGRAM_PRIORS,
            constants.NGRAM_PRIOR_WEIGHT,
            constants.NGRAM_KEEP,
            constants.NGRAM_LEARNING_RATE,
        )

    def predict(self, tokens: Sequence[int], n_max: int) -> Prediction:
        """Up to `n_max` tokens to follow `tokens`; none if nothing like its end came before.

        Fastest if `tokens` is an array of int32 that continues the previous one.
        """
        self._ngrams.update(token_array(tokens))  # type: ignore[arg-type]
        return Prediction(*self._ngrams.predict(n_max)[:2])

    def observe(self, n_accepted: int, n_tried: int) -> None:
        """The first `n_tried` tokens of the last prediction were verified, `n_accepted` accepted.

        Each prediction can be observed once. Raises ValueError if the last one is shorter.
        """
        self._ngrams.observe(n_accepted, n_tried)
