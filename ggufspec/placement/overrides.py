"""Tensor overrides: llama.cpp's patterns for weights that stay on the CPU or on a given device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ggufspec.errors import OptionError
from ggufspec.models.gguf_file import DENSE, EXPERTS

CPU = "CPU"  # ggml's name of its buffer type
ALL = -1
# Syntax that only one of Python and llama.cpp (ECMAScript, by std::regex) has. std::regex matches
# recursively: patterns of 100,000 characters end the process.
_NOT_OF_BOTH = re.compile(r"\(\?(?![:=!])|\\[AZ]|\[:\w+:]|[+*?}][+]|{,")
_MOST_CHARACTERS = 4096
# A repeated group with a repetition or a choice in it may take exponential time, in both.
_MAY_BE_SLOW = re.compile(r"[*+}|][^()]*\)[*+{]")


class Override(NamedTuple):
    """The buffer type for tensors whose names match a regular expression. The first one applies."""

    pattern: str
    buffer: str = CPU

    def __str__(self) -> str:
        return f"{self.pattern}={self.buffer}"


Overrides = tuple[Override, ...]


def on_cpu(pattern: str, n_layers: int) -> Overrides:
    """Keeps tensors of the first `n_layers` layers on the CPU (negative: of all layers)."""
    if n_layers < 0:
        return (Override(pattern),)
    return (Override(rf"blk\.({'|'.join(map(str, range(n_layers)))}){pattern}"),) * (n_layers > 0)


def overrides_of(
    end: str, tensors: Sequence[str], n_experts: int | None, n_dense: int | None
) -> Overrides | None:
    """The overrides that a model's options ask for; None: no option is given, a plan may choose.

    `end`: suffix of the options' names in messages, "_draft" for the draft. `tensors`:
    "PATTERN=TYPE" each. `n_experts`, `n_dense`: number of layers whose experts, or dense
    feed-forward matrices, stay on the CPU; negative: all layers. Raises OptionError.
    """
    made = [_parsed(f"override_tensor{end}", each) for each in tensors]
    for pattern, n_layers in ((EXPERTS, n_experts), (DENSE, n_dense)):
        made += () if n_layers is None else on_cpu(pattern, n_layers)
    is_given = bool(made) or n_experts is not None or n_dense is not None
    return tuple(made) if is_given else None


def check_buffers(overrides: Overrides, buffers: Collection[str]) -> None:
    """Raise OptionError for a buffer type that is not in `buffers`."""
    for each in overrides:
        if each.buffer not in buffers:
            raise OptionError(
                f"the tensor override {each} (-ot) names the buffer type {each.buffer!r}; this "
                f"build of llama.cpp and this machine have {', '.join(buffers)}"
            )


def check_patterns(overrides: Overrides, model: str, tensors: Collection[str]) -> None:
    """Raise OptionError for a pattern that matches none of the tensors of `model`."""
    for each in overrides:
        # Search all layers: the first ones may have no experts.
        ends = (pattern for pattern in (EXPERTS, DENSE) if each.pattern.endswith(pattern))
        pattern = next(ends, each.pattern)
        if not any(re.search(pattern, tensor) for tensor in tensors):
            first = sorted(at.split(".", 2)[2] for at in tensors if at.startswith("blk.0."))
            lacks = {
                EXPERTS: f"{model} has no experts (--cpu-moe, --n-cpu-moe)",
                DENSE: f"{model} has no dense feed-forward matrices (--n-cpu-ffn)",
            }
            found = f"no tensor of {model} matches the pattern {each.pattern!r} (-ot)"
            raise OptionError(
                f"{lacks.get(pattern, found)}; its first layer has {', '.join(first)}"
            )


def stays(overrides: Overrides, tensor: str) -> bool:
    """Whether a tensor stays on the CPU even if its layer is on a GPU."""
    found = next((each for each in overrides if re.search(each.pattern, tensor)), None)
    return found is not None and found.buffer == CPU


def _parsed(name: str, given: str) -> Override:
    pattern, is_one, buffer = given.rpartition("=")
    if not is_one or not pattern or not buffer:
        raise OptionError(f"{name} has {given!r}; it must be PATTERN=TYPE, such as ffn_.*_exps=CPU")
    if len(pattern) > _MOST_CHARACTERS:
        raise OptionError(
            f"{name} has a pattern of {len(pattern):,} characters; use at most {_MOST_CHARACTERS:,}"
        )
    if other := _NOT_OF_BOTH.search(pattern):
        raise OptionError(
            f"{name} has {other[0]!r} in the pattern {pattern!r}, which means different things in "
            "llama.cpp and in Python; write it another way"
        )
    if slow := _MAY_BE_SLOW.search(pattern):
        raise OptionError(
            f"{name} repeats a group with a repetition or a choice in it ({slow[0]!r} of "
            f"{pattern!r}), which may take forever; write the pattern without it"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a [ in a set is one, today
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise OptionError(f"{name} has the pattern {pattern!r}: {error}") from error
    return Override(pattern, buffer)
