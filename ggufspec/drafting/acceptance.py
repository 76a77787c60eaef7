"""What is learned of the acceptance of draft tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ggufspec import _native
from ggufspec.drafting import constants

Coefficients = tuple[float, float]  # intercept and slope of AcceptanceModel


class Acceptance(NamedTuple):
    """How a draft's acceptance depends on logit gaps: learned in a text, the start of the next.

    (intercept, slope) of AcceptanceModel in native/draft_length.h, by the draft model's gap (its
    largest logit minus the second largest) and by the target's gap at the same position; `second`:
    of the draft model's next choice where its first was rejected, by the gap of what is left.
    """

    by_draft: Coefficients
    by_target: Coefficients
    second: Coefficients = (constants.SECOND_SAMPLED_INTERCEPT, constants.SECOND_SAMPLED_SLOPE)


class SecondChoice:
    """Acceptance probabilities of branches, each given that the tokens before it were rejected.

    They are learned at each node where the main chain ends, whether or not there was a branch.
    """

    def __init__(self, prior: Coefficients, memory: float) -> None:
        weight = constants.PRIOR_WEIGHT
        self._by_gap = _native.AcceptanceModel(*prior, weight, memory)
        self._by_ngrams = _native.AcceptanceModel(*constants.NGRAM_BESIDE, weight, memory)

    @property
    def coefficients(self) -> Coefficients:
        """Of the draft model's second choice, as learned so far."""
        return self._by_gap.coefficients

    def of_model(self, gap: float, n_rejected: int = 1) -> float:
        """The next choice of the draft model: `gap` is that of the tokens that are left."""
        return self._by_gap.probability(gap) * constants.FURTHER_CHOICE ** (n_rejected - 1)

    def of_ngrams(self, probability: float) -> float:
        """Another token that n-grams predict with that acceptance probability."""
        return self._by_ngrams.probability(_log_odds(probability))

    def observe_model(self, gap: float, acceptance: float) -> None:
        self._by_gap.observe(gap, acceptance)

    def observe_ngrams(self, probability: float, acceptance: float) -> None:
        self._by_ngrams.observe(_log_odds(probability), acceptance)


class BlockBonus:
    """How many more tokens are accepted where a draft is judged as a whole.

    A linear regression, of the `block_bonus` of a rule; not if that is 0.
    """

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


def _log_odds(probability: float) -> float:
    least = constants.MIN_PROBABILITY
    probability = min(max(probability, least), 1 - least)
    return math.log(probability / (1 - probability))
