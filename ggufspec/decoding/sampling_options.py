"""The sampling options: default, range, help text and check of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ggufspec import _native
from ggufspec.common import defaults, validate
from ggufspec.errors import OptionError

if TYPE_CHECKING:  # --help reads this module and must not import numpy
    from ggufspec.decoding.types import Constraint

INT_MAX = 2**31 - 1
SAMPLERS = (*defaults.SAMPLERS, "adaptive_p")  # that may be named
_SAMPLER_NAMES = {  # llama.cpp's names without "-" and "_": name here
    **{name.replace("_", ""): name for name in SAMPLERS},
    **{"temp": "temperature", "nucleus": "top_p"},
    **dict.fromkeys(("typ", "typp", "typical"), "typical_p"),
}
SAMPLER_LETTERS = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical_p"},
    **{"p": "top_p", "m": "min_p", "x": "xtc", "t": "temperature", "a": "adaptive_p"},
    **{"i": "infill"},
}


class Range(NamedTuple):
    """Allowed values of a number: finite and from `least` to `most`; `above` excludes `least`."""

    least: float | None = None
    most: float | None = None
    above: bool = False

    def check(self, name: str, number: float) -> None:
        """Raises OptionError."""
        least, most, above = self
        if not (
            (most is None or number <= most)
            and (least is None or number > least or (number == least and not above))
            and math.isfinite(number)
        ):
            low = "" if least is None else f"{'above' if above else 'at least'} {least} and "
            high = "finite" if most is None else f"at most {most}"
            raise OptionError(f"{name} is {number}; it must be {low}{high}")


class NumberOption(NamedTuple):
    """A numeric sampling option; whole numbers only if the default is an int."""

    default: float
    range: Range
    help: str

    def checked(self, name: str, value: object) -> float:
        """The value as a number. Raises OptionError."""
        check = validate.whole if isinstance(self.default, int) else validate.number32
        self.range.check(name, number := check(name, value))
        return number


_ANY, _SHARE, _POSITIVE_SHARE = Range(), Range(0, 1), Range(0, 1, above=True)
_NOT_NEGATIVE, _POSITIVE, _COUNT = Range(0), Range(0, above=True), Range(0, INT_MAX)
_WINDOW = Range(-1, INT_MAX)


def _number(default: float, allowed: Range, meaning: str) -> Any:
    return field(default=default, metadata={"number": NumberOption(default, allowed, meaning)})


class _Biases(dict[int, float]):
    """Biases that were checked, and need no check in a copy of the options."""


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution; defaults, order and meaning are llama.cpp's.

    The constraint is applied first, then `logit_bias`, then `samplers` in order. The penalties
    (repeat, frequency, presence) and DRY depend on the text before each position, including drafted
    tokens. XTC removes tokens with a probability: the distribution is the mixture of both cases.
    With `mirostat`, only it and the temperature are applied; `adaptive_p` is the last sampler
    wherever it stands. Both depend on `state`. Temperature 0 is a one-hot distribution at the
    largest logit; without the sampler `temperature`, other temperatures are 1.

    Raises OptionError for values out of range.
    Source: llama.cpp's src/llama-sampler.cpp.
    """

    temperature: float = _number(
        0.8,
        _NOT_NEGATIVE,
        "Temperature; 0: greedy. Sampling options that are not given come from the target's file "
        "if it has them.",
    )
    dynatemp_range: float = _number(
        0.0,
        _NOT_NEGATIVE,
        "Dynamic temperature: from --temp minus X where the next token is certain to --temp plus X "
        "where it is not; 0: off.",
    )
    dynatemp_exponent: float = _number(
        1.0, _NOT_NEGATIVE, "Dynamic temperature: exponent of the normalized entropy."
    )
    top_k: int = _number(40, _COUNT, "Keep the k most likely tokens; 0: off.")
    top_p: float = _number(
        0.95, _POSITIVE_SHARE, "Keep the most likely tokens up to this total probability; 1: off."
    )
    min_p: float = _number(
        0.05, _SHARE, "Keep tokens with this probability relative to the most likely one; 0: off."
    )
    typical_p: float = _number(
        1.0, _POSITIVE_SHARE, "Keep the most typical tokens up to this total probability; 1: off."
    )
    top_n_sigma: float = _number(
        0.0, _ANY, "Keep tokens within this many standard deviations of the largest logit; 0: off."
    )
    xtc_probability: float = _number(
        0.0,
        _SHARE,
        "XTC: probability of removing all but the least likely token above the threshold; 0: off.",
    )
    xtc_threshold: float = _number(0.1, _SHARE, "XTC: the threshold; above 0.5: off.")
    repeat_last_n: int = _number(
        64, _WINDOW, "Penalize tokens that occur among the last n; 0: off, -1: all."
    )
    repeat_penalty: float = _number(1.0, _POSITIVE, "Penalty factor for repeated tokens; 1: off.")
    presence_penalty: float = _number(0.0, _ANY, "Subtracted once from logits of repeated tokens.")
    frequency_penalty: float = _number(
        0.0, _ANY, "Subtracted from logits of repeated tokens, per repetition."
    )
    dry_multiplier: float = _number(
        0.0, _NOT_NEGATIVE, "DRY: penalty for continuing a repetition; 0: off."
    )
    dry_base: float = _number(1.75, Range(1), "DRY: growth of the penalty per repeated token.")
    dry_allowed_length: int = _number(2, _COUNT, "DRY: longest repetition without a penalty.")
    dry_penalty_last_n: int = _number(
        64, _WINDOW, "DRY: number of last tokens to search; 0: off, -1: all."
    )
    mirostat: int = _number(
        0, Range(0, 2), "Mirostat 1 or 2 instead of other samplers than temperature; 0: off."
    )
    mirostat_tau: float = _number(5.0, _NOT_NEGATIVE, "Mirostat: surprise to aim at, in bits.")
    mirostat_eta: float = _number(0.1, _NOT_NEGATIVE, "Mirostat: learning rate.")
    adaptive_target: float = _number(
        -1.0,
        Range(None, 1),
        "adaptive_p, if it is among the samplers: probability to aim at; below 0: off.",
    )
    adaptive_decay: float = _number(
        0.9, Range(0, 0.99), "adaptive_p: decay of the weight of earlier tokens."
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: Sequence[str] = defaults.SAMPLERS
    dry_breakers: _native.Breakers | None = None  # DRY's sequence breakers; see llama.breakers
    constraint: Constraint | None = None  # which tokens are allowed next
    state: _native.TextState | None = None  # of one text; `speculate` moves it on

    def __post_init__(self) -> None:
        for name, number in NUMBERS.items():
            object.__setattr__(self, name, number.checked(name, getattr(self, name)))
        if not isinstance(self.logit_bias, _Biases):
            biases = _Biases(validate.biases("logit_bias", self.logit_bias))
            for token, bias in biases.items():
                if math.isnan(bias) or bias == math.inf:
                    raise OptionError(
                        f"logit_bias of token {token} is {bias}; it must be a number, or -inf to "
                        "ban it"
                    )
            object.__setattr__(self, "logit_bias", biases)
        names = tuple(map(sampler_name, validate.texts("samplers", self.samplers)))
        object.__setattr__(self, "samplers", names)
        for name in self.samplers:
            if name == "infill":
                raise OptionError(
                    "the sampler 'infill' is not supported: it merges tokens by their texts; leave "
                    "it out"
                )
            if name not in SAMPLERS:
                raise OptionError(
                    f"there is no sampler {name!r}; choose from {', '.join(SAMPLERS)}"
                )

    @property
    def effective_temperature(self) -> float:
        """The temperature at which tokens are drawn; 0: greedy, also if top_k is 1."""
        if "top_k" in self._order and self.top_k == 1:
            return 0.0
        return self.temperature if not self.temperature or "temperature" in self._order else 1.0

    @property
    def _order(self) -> Sequence[str]:
        if self.mirostat:
            return ("mirostat", "temperature")
        is_adaptive = "adaptive_p" in self.samplers and self.adaptive_target >= 0
        return (
            *(each for each in self.samplers if each != "adaptive_p"),
            *("adaptive_p",) * is_adaptive,
        )

    def begun(self, seed: int = 0) -> Sampling:
        """These options with a state of their own, at the start of a text.

        `seed`: for adaptive_p after XTC, whose state depends on which tokens XTC had removed.
        """
        made = copy(self)  # which checks nothing again
        made.__dict__.pop("native", None)
        object.__setattr__(made, "state", _native.TextState(seed % 2**64))
        return made

    @cached_property
    def native(self) -> _native.Sampling:
        """These options as an object of the extension."""
        return _native.Sampling(
            numbers={name: getattr(self, name) for name in NUMBERS},
            samplers=self._order,
            dry_breakers=self.dry_breakers,
            logit_bias=list(self.logit_bias.items()),
            state=self.state,
        )


NUMBERS: Mapping[str, NumberOption] = {
    each.name: each.metadata["number"] for each in fields(Sampling) if each.metadata
}
SAMPLING = (*NUMBERS, "logit_bias", "samplers")


def sampler_name(name: str) -> str:
    """The name here of the sampler that llama.cpp calls `name`; `name` if it is not supported."""
    return _SAMPLER_NAMES.get(name.replace("-", "").replace("_", ""), name.replace("-", "_"))
