"""Chooses the draft temperature with the most accepted tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ggufspec import _native
from ggufspec.common import defaults, validate
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs
from ggufspec.drafting import constants
from ggufspec.errors import OptionError


class DraftTemperature:
    """The draft's temperature: fixed, or learned.

    A learned temperature starts at the target's and changes once another is significantly better.
    """

    def __init__(self, target: float, wanted: float | str = defaults.DRAFT_TEMPERATURE) -> None:
        """`target`: the target's temperature; `wanted`: the draft's, or "auto" to learn it."""
        first = target
        if wanted != "auto":
            if isinstance(wanted, str):
                raise OptionError(
                    f"draft_temperature is {wanted!r}; it must be a number, or 'auto'"
                )
            first = validate.number("draft_temperature", wanted)
        if not (math.isfinite(first) and first >= 0):
            raise OptionError(
                f"draft_temperature is {wanted}; it must be 0 (greedy) or more, and "
                "finite, or 'auto'"
            )
        # A greedy target accepts one token only: the draft's likeliest token is the best guess.
        self.is_learning = wanted == "auto" and target > 0
        factors = constants.TEMPERATURE_FACTORS if self.is_learning else (1.0,)
        self.choices = tuple(factor * first for factor in factors)
        self._best = 0
        self._n_rounds = self._n_learned = 0
        self._weight = self._weight_squared = 0.0
        # For each choice, weighted sums of its gain in accepted tokens over the first, and squares.
        self._gain = [0.0] * len(self.choices)
        self._gain_squared = [0.0] * len(self.choices)

    @property
    def temperature(self) -> float:
        """The temperature of the next draft."""
        # A greedy draft gives no data on other temperatures: draw at the first one periodically.
        if self._is_greedy and self._n_rounds % constants.TEMPERATURE_EVERY_GREEDY == 0:
            return self.choices[0]
        return self.choices[self._best]

    def observe(self, draft: Draft, target_probs: Probs) -> None:
        """Learn from a round, and choose the next temperature."""
        every = constants.TEMPERATURE_EVERY
        if self._is_greedy:
            every = constants.TEMPERATURE_EVERY_GREEDY
        elif self._n_rounds < constants.N_TEMPERATURE_EARLY:
            every = 1
        if self._n_rounds % every == 0:
            assert draft.probs is not None
            target, rows = as_rows(target_probs), as_rows(draft.probs)
            n_row = rows.n_values / len(draft.tokens)
            most = int(constants.N_TEMPERATURE_VALUES / len(self.choices) / max(n_row, 1))
            n = max(1, min(constants.TEMPERATURE_HORIZON, most, draft.n_chain))
            # Too low for temperatures far from the one that the tokens were drawn at.
            self._learn(_native.expected_lengths(target, rows, draft.tokens, n, self.choices))
        self._n_rounds += 1

    @property
    def _is_greedy(self) -> bool:
        return self.choices[self._best] == 0

    def _learn(self, lengths: Sequence[float]) -> None:
        keep = 1 - 1 / constants.TEMPERATURE_MEMORY
        self._n_learned += 1
        self._weight = keep * self._weight + 1
        self._weight_squared = keep**2 * self._weight_squared + 1
        gains = [length - lengths[0] for length in lengths]
        self._gain = [keep * old + new for old, new in zip(self._gain, gains, strict=True)]
        self._gain_squared = [
            keep * old + new * new for old, new in zip(self._gain_squared, gains, strict=True)
        ]
        if self._n_learned >= constants.N_TEMPERATURE_FIRST:
            gains = [self._least_gain(i) for i in range(len(self.choices))]
            self._best = max(range(len(gains)), key=gains.__getitem__)

    def _least_gain(self, i: int) -> float:
        """A lower confidence bound on the gain of choice i over the first."""
        mean = self._gain[i] / self._weight
        variance = max(self._gain_squared[i] / self._weight - mean**2, 0.0)
        n = self._weight**2 / self._weight_squared
        return mean - constants.TEMPERATURE_CERTAINTY * math.sqrt(variance / n)
