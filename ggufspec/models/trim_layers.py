"""The metadata of a model with fewer layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ggufspec.common.toml import read_toml
from ggufspec.errors import ModelError
from ggufspec.models.gguf_file import Encoded
from ggufspec.models.header import Header

# How llama.cpp computes layers, by architecture.
_LAYERS = read_toml(Path(__file__).with_name("architectures.toml"))["layers"]
_PATTERN = "attention.sliding_window_pattern"
_NOT_BY_LAYER = "rope.dimension_sections"


def check(source: Header) -> None:
    """Raise ModelError if llama.cpp would compute kept layers differently without the others."""
    architecture = source.architecture
    known = {*_LAYERS["alike"], *_LAYERS["periods"]}
    if architecture not in known:
        raise ModelError(
            f"{source.name} has the architecture {architecture}: no layer of it can be left out, "
            "because llama.cpp may compute a layer by its number. Supported are "
            f"{', '.join(sorted(known))}"
        )
    if _LAYERS["recognized"].get(architecture) == source.n_layers:
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
    """The metadata of a model with only these layers: their number, and shortened lists."""
    prefix, n_layers = f"{source.architecture}.", source.n_layers
    pattern, count = prefix + _PATTERN, prefix + "block_count"
    made = dict(values)
    for key, value in values.items():
        of_layers = key.startswith(prefix) and key != prefix + _NOT_BY_LAYER
        if of_layers and isinstance(value, Encoded) and value.length == n_layers:
            made[key] = value.picked(kept)
    period = _LAYERS["periods"].get(source.architecture)
    if period is not None and not isinstance(source.values.get(pattern), list):
        period = source.number(_PATTERN, period)
        made[pattern] = [not period or i % period < period - 1 for i in kept]
    made[count] = made[count].with_number(len(kept))
    return made
