"""The metadata of a model with fewer layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ggufspec.errors import ModelError
from ggufspec.models.gguf_file import Encoded
from ggufspec.models.header import Header

# Architectures whose layers do not depend on their number in llama.cpp (its folder src/models).
# fmt: off
_ALIKE = {
    "arcee", "bitnet", "bloom", "codeshell", "exaone", "falcon", "falcon-h1", "gemma", "gpt2",
    "gptneox", "granite", "granitehybrid", "granitemoe", "internlm2", "jamba", "lfm2", "llama",
    "mamba", "mamba2", "mistral3", "mpt", "nemotron", "olmo", "olmoe", "phi2", "phi3", "qwen",
    "qwen2", "qwen2moe", "qwen3", "qwen3moe", "seed_oss", "stablelm", "starcoder", "starcoder2",
    "xverse",
}
# fmt: on
# Every n-th layer sees all tokens, the others a window. llama.cpp takes a list of layers instead.
_PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4}
_PATTERN = "attention.sliding_window_pattern"
# llama.cpp recognizes these 27B models by their number of layers, and scales their attention.
_RECOGNIZED = {("gemma2", 46), ("gemma3", 62)}
_NOT_BY_LAYER = "rope.dimension_sections"


def check(source: Header) -> None:
    """Raise ModelError if llama.cpp would compute a layer in another way without the others."""
    architecture = source.architecture
    if architecture not in _ALIKE and architecture not in _PERIODS:
        raise ModelError(
            f"{source.name} has the architecture {architecture}: no layer of it can be left out, "
            "because llama.cpp may compute a layer by its number. Supported are "
            f"{', '.join(sorted(_ALIKE | _PERIODS.keys()))}"
        )
    if (architecture, source.n_layers) in _RECOGNIZED:
        raise ModelError(
            f"{source.name}: no layer of it can be left out, because llama.cpp takes the scale of "
            f"its attention from the number of layers, {source.n_layers}"
        )
    if source.n_mtp_layers:
        raise ModelError(
            f"{source.name} has layers that predict further tokens (nextn_predict_layers): no "
            "layer of it can be left out. Use a file without them"
        )


def cut(source: Header, values: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The metadata of a model with only these layers: their number, and lists with a value each."""
    prefix, n_layers = f"{source.architecture}.", source.n_layers
    pattern, count = prefix + _PATTERN, prefix + "block_count"
    made = dict(values)
    for key, value in values.items():
        of_layers = key.startswith(prefix) and key != prefix + _NOT_BY_LAYER
        if of_layers and isinstance(value, Encoded) and value.length == n_layers:
            made[key] = value.picked(kept)
    period = _PERIODS.get(source.architecture)
    if period is not None and not isinstance(source.values.get(pattern), list):
        period = source.number(_PATTERN, period)
        made[pattern] = [not period or i % period < period - 1 for i in kept]
    made[count] = made[count].with_number(len(kept))
    return made
