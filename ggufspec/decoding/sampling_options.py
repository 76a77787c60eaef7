"""The sampling options: default and check of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ggufspec import _native
from ggufspec.common import defaults, validate
from ggufspec.common.option_fields import Option, option, options_of
from ggufspec.common.validate import POSITIVE, Number, Whole
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


_SHARE, _POSITIVE_SHARE, _NOT_NEGATIVE = Number(0, 1), Number(0, 1, above=True), Number(0)
_COUNT, _WINDOW = Whole(0, INT_MAX), Whole(-1, INT_MAX)


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

    Raises OptionError for values out of range. cli/options.toml says what each number does.
    Source: llama.cpp's src/llama-sampler.cpp.
    """

    temperature: float = option(0.8, _NOT_NEGATIVE)
    dynatemp_range: float = option(0.0, _NOT_NEGATIVE)
    dynatemp_exponent: float = option(1.0, _NOT_NEGATIVE)
    top_k: int = option(40, _COUNT)
    top_p: float = option(0.95, _POSITIVE_SHARE)
    min_p: float = option(0.05, _SHARE)
    typical_p: float = option(1.0, _POSITIVE_SHARE)
    top_n_sigma: float = option(0.0, Number())
    xtc_probability: float = option(0.0, _SHARE)
    xtc_threshold: float = option(0.1, _SHARE)
    repeat_last_n: int = option(64, _WINDOW)
    repeat_penalty: float = option(1.0, POSITIVE)
    presence_penalty: float = option(0.0, Number())
    frequency_penalty: float = option(0.0, Number())
    dry_multiplier: float = option(0.0, _NOT_NEGATIVE)
    dry_base: float = option(1.75, Number(1))
    dry_allowed_length: int = option(2, _COUNT)
    dry_penalty_last_n: int = option(64, _WINDOW)
    mirostat: int = option(0, Whole(0, 2))
    mirostat_tau: float = option(5.0, _NOT_NEGATIVE)
    mirostat_eta: float = option(0.1, _NOT_NEGATIVE)
    adaptive_target: float = option(-1.0, Number(None, 1))
    adaptive_decay: float = option(0.9, Number(0, 0.99))
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: Sequence[str] = defaults.SAMPLERS
    dry_breakers: _native.Breakers | None = None  # DRY's sequence breakers; see llama.breakers
    constraint: Constraint | None = None  # which tokens are allowed next
    state: _native.TextState | None = None  # of one text; `speculate` moves it on

    def __post_init__(self) -> None:
        for name, number in NUMBERS.items():
            object.__setattr__(self, name, number.check(name, getattr(self, name)))
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


NUMBERS: Mapping[str, Option] = options_of(Sampling)
SAMPLING = (*NUMBERS, "logit_bias", "samplers")


def sampler_name(name: str) -> str:
    """The name here of the sampler that llama.cpp calls `name`; `name` if it is not supported."""
    return _SAMPLER_NAMES.get(name.replace("-", "").replace("_", ""), name.replace("-", "_"))
