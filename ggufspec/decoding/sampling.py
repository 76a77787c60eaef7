"""From logits to distributions to tokens; random numbers are arguments."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from typing_extensions import TypedDict

from ggufspec import _native
from ggufspec.common import defaults, validate
from ggufspec.decoding.tree import leaves, path_to
from ggufspec.decoding.types import Constraint, Draft, Logits, Masks, Probs, token_array
from ggufspec.errors import DecodeError, OptionError

Rows = _native.Rows  # distributions in the extension; numpy.asarray gives (n, n_vocab)

_REFUSED = {  # by how the names of the sampler and of its options begin
    "xtc": "it draws a random number of its own at each token",
    "mirostat": "it depends on the tokens that it drew before",
    "adaptive": "it depends on the tokens that it drew before",
    "infill": "it merges tokens by their texts",
}
_SAMPLER_NAMES = {  # of llama.cpp, without "-" and "_"
    **{name.replace("_", ""): name for name in defaults.SAMPLERS},
    **{"temp": "temperature", "nucleus": "top_p"},
    **dict.fromkeys(("typ", "typp", "typical"), "typical_p"),
}

_ABOVE_0, _FINITE, _INT32 = sys.float_info.min, sys.float_info.max, 2**31 - 1
_RANGES = {
    "temperature": (0, _FINITE, "0 (greedy) or more, and finite"),
    "top_k": (0, _INT32, f"0 (off) or up to {_INT32}"),
    "top_p": (_ABOVE_0, 1, "above 0 and at most 1 (off)"),
    "min_p": (0, 1, "from 0 (off) to 1"),
    "typical_p": (_ABOVE_0, 1, "above 0 and at most 1 (off)"),
    "top_n_sigma": (-_FINITE, _FINITE, "finite; 0 or less is off"),
    "repeat_last_n": (-1, _INT32, "-1 (all), 0 (off) or more"),
    "repeat_penalty": (_ABOVE_0, _FINITE, "above 0 (1 is off) and finite"),
    "frequency_penalty": (-_FINITE, _FINITE, "finite; 0 is off"),
    "presence_penalty": (-_FINITE, _FINITE, "finite; 0 is off"),
    "dry_multiplier": (0, _FINITE, "0 (off) or more, and finite"),
    "dry_base": (1, _FINITE, "1 or more, and finite"),
    "dry_allowed_length": (0, _INT32, "0 or more"),
    "dry_penalty_last_n": (-1, _INT32, "-1 (all), 0 (off) or more"),
}
_NATIVE = {"repeat_last_n": "penalty_last_n", "dry_penalty_last_n": "dry_last_n"}
_CHECKS: dict[str, Callable[[str, object], object]] = {  # by type or by name
    "float": validate.number32,
    "int": validate.whole,
    "logit_bias": validate.biases,
    "samplers": validate.texts,
}


class SamplingOptions(TypedDict, total=False):
    """Sampling options, by the names of llama.cpp's server; see Sampling."""

    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    typical_p: float  # 1: off
    top_n_sigma: float  # 0 or less: off
    repeat_last_n: int  # tokens that the penalties look back on; 0: off, -1: all
    repeat_penalty: float  # 1: off
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float  # 0: off
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int  # tokens that DRY looks back on; 0: off, -1: all
    logit_bias: Mapping[int, float]  # added to the logits of tokens; -inf bans one
    samplers: Sequence[str]  # which, and in what order


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution; defaults, order and meaning are llama.cpp's.

    The constraint comes first, then `logit_bias`, then `samplers` in their order. The penalties
    (repeat, frequency, presence) and DRY depend on the text before each position, including drafted
    tokens.
    Temperature 0 is a one-hot distribution at the largest logit; without the sampler `temperature`,
    the temperature is 1.

    Raises OptionError for values out of range, and for samplers that define no distribution.
    Source: llama.cpp's src/llama-sampler.cpp.
    """

    temperature: float = defaults.TEMPERATURE
    top_k: int = defaults.TOP_K
    top_p: float = defaults.TOP_P
    min_p: float = defaults.MIN_P
    typical_p: float = defaults.TYPICAL_P
    top_n_sigma: float = defaults.TOP_N_SIGMA
    repeat_last_n: int = defaults.REPEAT_LAST_N
    repeat_penalty: float = defaults.REPEAT_PENALTY
    frequency_penalty: float = defaults.FREQUENCY_PENALTY
    presence_penalty: float = defaults.PRESENCE_PENALTY
    dry_multiplier: float = defaults.DRY_MULTIPLIER
    dry_base: float = defaults.DRY_BASE
    dry_allowed_length: int = defaults.DRY_ALLOWED_LENGTH
    dry_penalty_last_n: int = defaults.DRY_PENALTY_LAST_N
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: Sequence[str] = defaults.SAMPLERS
    # Each sequence breaker of DRY: a token and those that must follow it; see llama.vocab.
    dry_breakers: Sequence[tuple[int, Sequence[int]]] = ()
    # Which tokens are allowed next; applied first.
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for field_ in fields(self):
            check = _CHECKS.get(str(field_.type), _CHECKS.get(field_.name))
            if check is not None:
                checked = check(field_.name, getattr(self, field_.name))
                object.__setattr__(self, field_.name, checked)
        for name, (least, most, wanted) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise OptionError(f"{name} is {value}; it must be {wanted}")
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise OptionError(
                    f"logit_bias of token {token} is {bias}; it must be a number, or -inf to ban it"
                )
        object.__setattr__(self, "samplers", tuple(map(sampler_name, self.samplers)))
        for name in self.samplers:
            if why := refusal(name, f"the sampler {name!r}"):
                raise OptionError(why)
            if name not in defaults.SAMPLERS:
                raise OptionError(
                    f"there is no sampler {name!r}; choose from {', '.join(defaults.SAMPLERS)}"
                )

    @property
    def effective_temperature(self) -> float:
        """The temperature at which tokens are drawn; 0: only one is left, so the text is greedy."""
        if "top_k" in self.samplers and self.top_k == 1:
            return 0.0
        return self.temperature if "temperature" in self.samplers else 1.0

    @cached_property
    def native(self) -> _native.Sampling:
        """The same for the extension."""
        return _native.Sampling(
            **{_NATIVE.get(name, name): getattr(self, name) for name in _RANGES},
            samplers=list(self.samplers),
            dry_breakers=[(head, list(tail)) for head, tail in self.dry_breakers],
            logit_bias=list(self.logit_bias.items()),
        )


def sampler_name(name: str) -> str:
    """The sampler that llama.cpp knows by this name, if it is supported; else the same name."""
    return _SAMPLER_NAMES.get(name.replace("-", "").replace("_", ""), name.replace("-", "_"))


def refusal(name: str, label: str) -> str | None:
    """Why a sampler of llama.cpp, or an option of one, is not supported; None: it is not refused.

    The text begins with `label`.
    """
    for start, reason in _REFUSED.items():
        if name.startswith(start):
            return (
                f"{label} is not supported: {reason}, so it defines no distribution to verify "
                "drafts with; leave it out"
            )
    return None


def to_probs(
    logits: Logits,
    sampling: Sampling,
    tokens: Sequence[int] = (),
    draft: Sequence[int] = (),
    parents: Sequence[int] = (),
    *,
    out: Rows | None = None,
) -> Rows:
    """The distributions (n_draft + 1, n_vocab) after `tokens`, then after each of `draft`.

    `parents`: the draft is a tree, see Draft. Written into `out` if given. They are evaluated when
    they are read, from the logits in place: valid as long as these are.
    Raises DecodeError for a row without any finite logit: damaged weights or a broken backend.
    """
    rows = Rows(len(logits), logits.shape[1]) if out is None else out
    try:
        masks = _masks(sampling, tokens, draft, parents)
        rows.fill(logits, sampling.native, token_array(tokens), draft, parents, masks)  # type: ignore[arg-type]
    except ValueError as error:
        raise unusable(str(error), sampling) from error
    return rows


def draw(
    rows: Rows,
    logits: Logits,
    sampling: Sampling,
    tokens: Sequence[int],
    length_rule: _native.LengthRule,
    uniform: float,
) -> int:
    """Add the distribution of logits (1, n_vocab) after `tokens`, and draw a token from it.

    Returns -1, and adds no row, if `length_rule` ends the draft. Raises as to_probs does.
    """
    try:
        masks = _masks(sampling, tokens)
        return rows.draw(logits, sampling.native, token_array(tokens), masks, length_rule, uniform)  # type: ignore[arg-type]
    except ValueError as error:
        raise unusable(str(error), sampling) from error


def as_rows(probs: Probs) -> Rows:
    """The same distributions for the extension; an array holds weights to normalise."""
    if isinstance(probs, Rows):
        return probs
    weights = np.ascontiguousarray(probs, np.float32)
    rows = Rows(len(weights), weights.shape[1])
    rows.append_weights(weights)
    return rows


def expected_lengths(
    draft: Draft, target_probs: Probs, horizon: int, temperatures: Sequence[float]
) -> list[float]:
    """How many of the first `horizon` tokens block verification would accept, on average, if the
    draft had been drawn at each of these temperatures.

    Estimated from the tokens that were drawn; too low for temperatures far from theirs. `draft`
    needs its probs.
    """
    if draft.probs is None:
        raise ValueError("expected_lengths: a draft without probs has no other temperatures")
    return _native.expected_lengths(
        as_rows(target_probs), as_rows(draft.probs), draft.tokens, horizon, temperatures
    )


def _masks(
    sampling: Sampling,
    tokens: Sequence[int],
    draft: Sequence[int] = (),
    parents: Sequence[int] = (),
) -> Masks | None:
    constraint = sampling.constraint
    if constraint is None or not parents:
        return None if constraint is None else constraint.masks(tokens, draft)
    found = np.zeros((len(draft) + 1, 0), np.uint32)
    for leaf in leaves(parents):
        path = path_to(parents, leaf)
        masks = constraint.masks(tokens, [draft[node] for node in path])
        if not found.size:
            found = np.zeros((len(draft) + 1, masks.shape[1]), np.uint32)
        found[[0, *(node + 1 for node in path)]] = masks
    return found


def unusable(complaint: str, sampling: Sampling) -> DecodeError:
    """The error for rows from which no token can be drawn."""
    if sampling.constraint is not None:
        return DecodeError(
            f"the text cannot continue ({complaint}): the grammar or schema is too complex, or "
            "requires what no token of this vocabulary has or what logit_bias bans; change it"
        )
    if sampling.logit_bias:
        return DecodeError(
            f"no token can be drawn ({complaint}): logit_bias or ignore_eos may ban every "
            "token that the model allows; otherwise the model file may be damaged"
        )
    return DecodeError(
        f"the model's output cannot be sampled ({complaint}); "
        "the file may be damaged, or its type unsupported on this device"
    )
