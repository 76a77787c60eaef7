"""Logits -> distribution -> token. Knows the sampling options; no RNG (coins come in), no model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ggufspec import _native, defaults
from ggufspec.core import Logits, Probs
from ggufspec.errors import DecodeError, OptionError


@dataclass(frozen=True)
class Sampling:
    """What turns logits into a distribution; defaults and order are llama.cpp's.

    Order: logit_bias, top_k, top_p, min_p, temperature. Temperature 0 is a one-hot distribution at
    the largest logit. `logit_bias` pairs (token, bias) are added to the logits; -inf bans a token.

    Raises OptionError for values outside their range.
    """

    temperature: float = defaults.TEMPERATURE
    top_k: int = defaults.TOP_K  # 0: off
    top_p: float = defaults.TOP_P  # 1: off
    min_p: float = defaults.MIN_P  # 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise OptionError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or more, and finite"
            )
        if not 0 <= self.top_k < 2**31:
            raise OptionError(f"top_k is {self.top_k}; it must be 0 (off) or up to {2**31 - 1}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p is {self.min_p}; it must be from 0 (off) to 1")

    @cached_property
    def native(self) -> _native.Sampling:
        """The same, as the extension has it."""
        return _native.Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            logit_bias=list(self.logit_bias),
        )


def to_probs(logits: Logits, sampling: Sampling, out: Probs | None = None) -> Probs:
    """The distributions (n, n_vocab) of rows of logits, written into `out` where it is given.

    Raises DecodeError for a row without any finite logit: damaged weights or a broken backend.
    """
    probs = np.empty_like(logits) if out is None else out
    try:
        _native.to_probs(logits, probs, sampling.native)
    except ValueError as error:
        raise DecodeError(
            f"the model's output cannot be sampled ({error}); "
            "the file may be damaged, or its type unsupported on this device"
        ) from error
    return probs


def pick(probs: Probs, coin: float) -> int:
    """The token of one distribution (1, n_vocab) that a uniform coin in [0, 1) lands on."""
    return _native.pick(probs, coin)
