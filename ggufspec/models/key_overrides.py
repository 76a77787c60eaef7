"""Values of a model's header that the user replaces, as with llama.cpp's --override-kv."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ggufspec.common import validate
from ggufspec.errors import OptionError
from ggufspec.models.header import Header

KINDS = {"int": int, "float": float, "bool": bool, "str": str}
ROPE_SCALINGS = ("none", "linear", "yarn")
_FORM = re.compile(r"([^=\0]+)=(\w+):([^\0]*)", re.DOTALL)
_MOST_BYTES = 127  # length of a key or a text in llama.cpp
# Keys that may be replaced. Most others describe the shapes of tensors: llama.cpp ends the process
# if they are wrong.
_ALLOWED = re.compile(
    r"tokenizer\.(chat_template|ggml\.(pre|(add|remove|escape)_\w+|\w+_token_id))"
    r"|general\.(name|sampling\.\w+)"
    r"|[\w-]+\.(context_length|expert_used_count|expert_weights_(scale|norm)"
    r"|\w*logit_(scale|softcapping)|(residual|embedding)_scale"
    r"|attention\.(scale|\w*epsilon)|rope\.(freq_base(_swa)?|scaling\.\w+))"
)
_ROPE_TYPES = ("none", "linear", "yarn", "longrope")


class KeyOverride(NamedTuple):
    """A key of the header with its new value; later overrides have priority over earlier ones."""

    key: str
    value: int | float | bool | str

    @property
    def kind(self) -> str:
        return type(self.value).__name__

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={self.kind}:{value}"


KeyOverrides = tuple[KeyOverride, ...]


class Rope(NamedTuple):
    """Scaling of positions for a context longer than in training; None: the file's value."""

    scaling: str | None = None
    scale: float | None = None  # the factor by which the context grows
    freq_base: float | None = None
    n_ctx_orig: int | None = None  # the context length before scaling

    def overrides(self, architecture: str) -> KeyOverrides:
        """These values as overrides of the keys that llama.cpp reads for each architecture."""
        keys = {
            "scaling.type": self.scaling,
            "scaling.factor": self.scale,
            "freq_base": self.freq_base,
            "scaling.original_context_length": self.n_ctx_orig,
        }
        given = {key: value for key, value in keys.items() if value is not None}
        return tuple(KeyOverride(f"{architecture}.rope.{key}", given[key]) for key in given)


def rope_of(
    scaling: str | None,
    scale: float | None,
    freq_base: float | None,
    freq_scale: float | None,
    n_ctx_orig: int | None,
) -> Rope:
    """The rope options, which have these names. Raises OptionError if two contradict."""
    if scale is not None and freq_scale is not None:
        raise OptionError(
            "rope_scale (--rope-scale) and rope_freq_scale (--rope-freq-scale) were given, which "
            "is 1 / rope_scale; give one of them"
        )
    return Rope(scaling, scale if freq_scale is None else 1 / freq_scale, freq_base, n_ctx_orig)


def key_overrides_of(name: str, given: object) -> KeyOverrides:
    """The overrides of an option: a list of "KEY=TYPE:VALUE". Raises OptionError."""
    return tuple(_override_of(name, text) for text in validate.texts(name, given))


def _override_of(name: str, text: str) -> KeyOverride:
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in KINDS:
        raise OptionError(
            f"{name} has {text!r}; it must be KEY=TYPE:VALUE with the type int, float, bool or str"
        )
    key, kind, value = match.groups()
    if max(len(key.encode()), len(value.encode())) > _MOST_BYTES:
        raise OptionError(f"{name} has {text!r}; a key or a value has at most {_MOST_BYTES} bytes")
    if not _ALLOWED.fullmatch(key):
        raise OptionError(
            f"{name} has {text!r}; this key cannot be replaced. Keys of the tokenizer, rope, "
            "epsilons and scales, expert_used_count and context_length can be"
        )
    try:
        found = {"true": True, "false": False}[value] if kind == "bool" else KINDS[kind](value)
        if isinstance(found, int) and not -(2**63) <= found < 2**63:
            raise ValueError
        if isinstance(found, float) and not math.isfinite(found):
            raise ValueError
    except (KeyError, ValueError) as error:
        raise OptionError(f"{name} has {text!r}; {value!r} is no {kind}") from error
    return KeyOverride(key, found)


def with_key_overrides(header: Header, overrides: Sequence[KeyOverride]) -> Header:
    """The header with these values, for the checks of what llama.cpp will load.

    Raises OptionError for a value whose type differs from the file's, which llama.cpp would ignore,
    or at which llama.cpp would end the process.
    """
    for each in overrides:
        _check_range(header, each)
        known = header.values.get(each.key)
        if known is not None and type(known) is not type(each.value):
            kinds = (kind for kind, python in KINDS.items() if python is type(known))
            raise OptionError(
                f"override_kv (--override-kv) has {each}, but in {header.paths[0]} this key is "
                f"{next(kinds, 'a list, which cannot be replaced')}"
            )
    return replace(header, values={**header.values, **{at.key: at.value for at in overrides}})


def _check_range(header: Header, override: KeyOverride) -> None:
    key, value = override.key.rpartition(".")[2], override.value
    least, most = 0, math.inf
    if key in ("context_length", "expert_used_count"):
        n_experts = header.number("expert_count", 0)
        least, most = 1, n_experts if key == "expert_used_count" else 2**31 - 1
    elif key.endswith("_token_id"):
        most = header.n_vocab - 1
    elif override.key.endswith("rope.scaling.type"):
        if value not in _ROPE_TYPES:
            raise OptionError(f"{override} is none of {', '.join(_ROPE_TYPES)}")
        return
    elif not key.endswith("epsilon"):
        return
    if isinstance(value, str) or not least <= value <= most:
        raise OptionError(f"{override} is out of range; it must be from {least} to {most}")
