"""Names the weights that stay on the CPU, or go to another device, by llama.cpp's patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ggufspec.common import validate
from ggufspec.errors import OptionError
from ggufspec.models.tensors import DENSE, EXPERTS

CPU = "CPU"  # ggml's name of its buffer type
ALL = -1
_MOST = 2048  # layers; llama.cpp takes 4096 patterns (llama_max_tensor_buft_overrides)


class Override(NamedTuple):
    """Tensors whose names have a match of a regular expression, and the buffer type they get.

    Of several overrides that match a tensor, the first counts.
    """

    pattern: str
    buffer: str = CPU

    def __str__(self) -> str:
        return f"{self.pattern}={self.buffer}"


Overrides = tuple[Override, ...]


def on_cpu(pattern: str, n_layers: int) -> Overrides:
    """Tensors of the first layers, as --n-cpu-moe and --n-cpu-ffn name them; negative: of all."""
    if n_layers < 0:
        return (Override(pattern),)
    return tuple(Override(rf"blk\.{i}{pattern}") for i in range(n_layers))


def overrides_of(
    end: str, tensors: Sequence[str], n_experts: int | None, n_dense: int | None
) -> Overrides | None:
    """What the options for a model say; None: nothing, so that a plan may choose.

    end: of the options' names, for messages: "_draft" for those of the draft. tensors:
    "PATTERN=TYPE". n_experts, n_dense: of how many layers the experts, or the dense feed-forward
    matrices, stay on the CPU; negative: of all. Raises OptionError.
    """
    name = f"override_tensor{end}"
    made = [_parsed(name, each) for each in validate.texts(name, tensors)]
    counts = {f"n_cpu_moe{end}": (EXPERTS, n_experts), f"n_cpu_ffn{end}": (DENSE, n_dense)}
    for name, (pattern, n_layers) in counts.items():
        if n_layers is None:
            continue
        if not ALL <= validate.whole(name, n_layers) <= _MOST:
            raise OptionError(
                f"{name} is {n_layers}; it must be a number of layers, at most {_MOST}, or "
                "-1 for all"
            )
        made += on_cpu(pattern, n_layers)
    is_given = bool(made) or n_experts is not None or n_dense is not None
    return tuple(made) if is_given else None


def check(overrides: Overrides, name: str, tensors: Iterable[str], buffers: Iterable[str]) -> None:
    """Raise OptionError for a buffer type that there is not, or a pattern of no tensor.

    name: of the option. tensors: the names of those of the file.
    """
    buffers, tensors = [*buffers], [*tensors]
    for each in overrides:
        if each.buffer not in buffers:
            raise OptionError(
                f"{name} has {each}, but there is no buffer type {each.buffer!r}; this build of "
                f"llama.cpp has {', '.join(buffers)}"
            )
    # Layers beyond the last are no error, nor are they for llama.cpp.
    given = [each for each in overrides if not each.pattern.endswith((EXPERTS, DENSE))]
    for each in given:
        if not any(re.search(each.pattern, tensor) for tensor in tensors):
            layer = [at for at in tensors if at.startswith("blk.0.")] or tensors
            raise OptionError(
                f"{name} has {each}, but the model has no tensor whose name matches; its first "
                f"layer has {', '.join(layer)}"
            )


def stays(overrides: Overrides, tensor: str) -> bool:
    """Whether a tensor stays on the CPU, whatever layers are on GPUs."""
    found = next((each for each in overrides if re.search(each.pattern, tensor)), None)
    return found is not None and found.buffer == CPU


def _parsed(name: str, given: str) -> Override:
    pattern, is_one, buffer = given.rpartition("=")
    if not is_one or not pattern or not buffer:
        raise OptionError(f"{name} has {given!r}; it must be PATTERN=TYPE, such as ffn_.*_exps=CPU")
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"{name} has the pattern {pattern!r}: {error}") from error
    return Override(pattern, buffer)
