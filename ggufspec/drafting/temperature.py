"""At which temperature a draft should be drawn. Pure: distributions in, a temperature out.

Any proposal is lossless as long as the one tested is the one drawn from, so the draft's temperature
is free. Where the target has judged, both distributions are known, and with them how much of the
draft would have stood had it been drawn at another temperature: no model has to run for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ggufspec.common import defaults, validate
from ggufspec.decoding.sampling import as_rows, expected_lengths
from ggufspec.decoding.types import Draft, Probs
from ggufspec.errors import OptionError

# Temperatures to choose from, as multiples of the target's; 0 is the draft's likeliest token.
_FACTORS = (1.0, 0.0, 0.4, 0.6, 0.8, 1.25, 1.6)
_HORIZON = 4  # tokens of a draft looked at: the further, the rarer another temperature draws them
_N_VALUES = (
    2**18
)  # probabilities to read in a round, about; a large vocabulary shortens the horizon
_N_FIRST = 8  # rounds learned from before anything is concluded
_N_EAGER = 16  # rounds that are all learned from; later ones now and then
_EVERY = 4
_MEMORY = 64  # rounds learned from after which a round has lost most of its weight
_CERTAINTY = 2.0  # standard errors by which another temperature has to be better than the target's
_WARM_EVERY = 2 * _EVERY  # the likeliest tokens say nothing of other temperatures: look again


class DraftTemperature:
    """The draft's temperature: fixed, or learned, so that most of what is drafted stands.

    It starts with the target's own, and leaves it for what has proved better.
    """

    def __init__(self, target: float, wanted: float | str = defaults.DRAFT_TEMPERATURE) -> None:
        """`target`: its temperature. `wanted`: the draft's, or "auto". Raises OptionError."""
        if isinstance(wanted, str) and wanted != "auto":
            raise OptionError(f"draft_temperature is {wanted!r}; it must be a number, or 'auto'")
        fixed = 0.0 if isinstance(wanted, str) else validate.number("draft_temperature", wanted)
        if not (math.isfinite(fixed) and fixed >= 0):
            raise OptionError(
                f"draft_temperature is {wanted}; it must be 0 (the likeliest token) or more, and "
                "finite, or 'auto'"
            )
        # A greedy target has one token: the best guess is the draft's likeliest.
        self.is_learning = wanted == "auto" and target > 0
        first = target if isinstance(wanted, str) else fixed
        self.choices = (
            tuple(factor * target for factor in _FACTORS) if self.is_learning else (first,)
        )
        self._best = 0
        self._n_rounds = self._n_learned = 0
        self._weight = self._weight_squared = 0.0
        # Of each choice, against the first: sums of how much more would have stood, and of squares.
        self._gain = [0.0] * len(self.choices)
        self._gain_squared = [0.0] * len(self.choices)

    @property
    def temperature(self) -> float:
        """What the next round is to be drawn at."""
        if self._is_cold and self._n_rounds % _WARM_EVERY == 0:
            return self.choices[0]
        return self.choices[self._best]

    def observe(self, draft: Draft, target_probs: Probs) -> None:
        """Learn from a round, and choose again."""
        every = _WARM_EVERY if self._is_cold else 1 if self._n_rounds < _N_EAGER else _EVERY
        tells = self._n_rounds % every == 0
        self._n_rounds += 1
        if tells:
            horizon = self._horizon(draft)
            self._learn(expected_lengths(draft, target_probs, horizon, self.choices))

    @property
    def _is_cold(self) -> bool:
        return self.choices[self._best] == 0

    def _horizon(self, draft: Draft) -> int:
        assert draft.probs is not None
        n_row = as_rows(draft.probs).n_values / len(draft.tokens)
        return max(1, min(_HORIZON, int(_N_VALUES / len(self.choices) / n_row)))

    def _learn(self, lengths: Sequence[float]) -> None:
        keep = 1 - 1 / _MEMORY
        self._n_learned += 1
        self._weight = keep * self._weight + 1
        self._weight_squared = keep**2 * self._weight_squared + 1
        gains = [length - lengths[0] for length in lengths]
        self._gain = [keep * old + new for old, new in zip(self._gain, gains, strict=True)]
        self._gain_squared = [
            keep * old + new * new for old, new in zip(self._gain_squared, gains, strict=True)
        ]
        if self._n_learned >= _N_FIRST:
            sure = [self._sure_gain(i) for i in range(len(self.choices))]
            self._best = max(range(len(sure)), key=sure.__getitem__)

    def _sure_gain(self, i: int) -> float:
        """What a choice gains over the first at least, but for a chance of a few percent."""
        mean = self._gain[i] / self._weight
        variance = max(self._gain_squared[i] / self._weight - mean**2, 0.0)
        n = self._weight**2 / self._weight_squared
        return mean - _CERTAINTY * math.sqrt(variance / n)
