"""Pads the embedded target with zeros: it costs more but computes the same, see the guide."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggufspec.common.files import write_whole
from ggufspec.common.progress import Progress
from ggufspec.errors import CacheError, OptionError
from ggufspec.models.gguf_file import TYPES, Data, GgufFile, Tensor
from ggufspec.models.header import read_header
from ggufspec.models.quantization import FILE_TYPES, n_params_of, tensors_of
from ggufspec.models.registry import Dimensions
from ggufspec.standin.embedded import embedded_target

_RECIPE = 3  # raise it when the files that this module writes change
_HEAD_SIZE = 32
_MIN_PARAMS = 10_000_000
_MAX_PARAMS = 8_000_000_000
_TOLERANCE = 1.05  # models called "8B" have up to 8.2
_LAYER_STEP = 4
_WIDE_LAYERS = 12  # the width is the largest that still allows this many layers
_CHUNK = 4 << 20


def parse_size(text: str) -> int:
    """The number of parameters in a text such as "250M", "1B" or "1.5b".

    Raises OptionError for any other text and for sizes that `padded_target` cannot write.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MB])", text.strip(), re.IGNORECASE)
    if match is None:
        raise OptionError(
            f"{text!r} is not a size: write a number of millions or billions of parameters, "
            "such as 250M or 1.5B"
        )
    unit = {"M": 1_000_000, "B": 1_000_000_000}[match[2].upper()]
    n_params = float(match[1]) * unit
    _check_size(n_params)
    return round(n_params)


def plan_dimensions(n_params: int) -> Dimensions:
    """Dimensions with about `n_params` parameters, within 16 %.

    The width is doubled from the embedded target's as long as at least twelve layers remain; then
    the number of layers is the nearest multiple of four. Raises OptionError for other sizes.
    """
    _check_size(n_params)
    n_embd = 256
    while _layers_that_fit(2 * n_embd, n_params) >= _WIDE_LAYERS:
        n_embd *= 2
    n_layers = _LAYER_STEP * round(_layers_that_fit(n_embd, n_params) / _LAYER_STEP)
    return _dimensions(n_embd, n_layers)


def padded_file(n_params: int) -> GgufFile:
    """The file that `padded_target` writes. Raises OptionError as `plan_dimensions`."""
    dimensions, source = plan_dimensions(n_params), _read_source()
    tensors = tensors_of(dimensions, "F16")
    n_doublings = (dimensions.n_embd // source.n_embd).bit_length() - 1
    n_copies = 1 + n_doublings % 2
    filled = n_copies * source.n_embd / dimensions.n_embd  # share of columns not 0; a power of 4
    return GgufFile(
        source.values | _values(dimensions, source, filled),
        tensors,
        lambda: (_padded(tensor, source, n_copies, math.sqrt(filled)) for tensor in tensors),
    )


def cached_target(n_params: int, cache_dir: Path) -> Path | None:
    """The padded target if it is in the cache folder. Raises OptionError, never CacheError."""
    file = padded_file(n_params)
    path = cache_dir / _file_name(file)
    return path if file.is_at(path) else None


def padded_target(n_params: int, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Path of a target with about `n_params` parameters in the cache folder; written if missing.

    `progress`: called with the bytes written so far and in total. Memory stays small at any size. A
    file that is cut short or has another header is written again.

    Raises OptionError as `plan_dimensions`, CacheError if the file cannot be written.
    """
    file = padded_file(n_params)
    path = cache_dir / _file_name(file)
    if not file.is_at(path):
        try:
            write_whole(path, file.n_bytes, file.chunks(), progress)
        except CacheError:
            if not file.is_at(path):  # else another process has written it
                raise
    return path


def _file_name(file: GgufFile) -> str:
    size = _format_params(file.n_params)
    return f"classics-target-as-{size}-recipe{_RECIPE}-{_read_source().sha256[:8]}.gguf"


def _dimensions(n_embd: int, n_layers: int) -> Dimensions:
    n_heads = n_embd // _HEAD_SIZE
    return Dimensions(
        name="classics-target",
        architecture="llama",
        n_layers=n_layers,
        n_embd=n_embd,
        n_ff=3 * n_embd,
        n_heads=n_heads,
        n_heads_kv=n_heads,
        n_embd_head=_HEAD_SIZE,
        n_vocab=4096,
        n_ctx=1024,
    )


def _layers_that_fit(n_embd: int, n_params: int) -> float:
    outside = n_params_of(_dimensions(n_embd, 0))
    return (n_params - outside) / (n_params_of(_dimensions(n_embd, 1)) - outside)


def _check_size(n_params: float) -> None:
    if n_params < _MIN_PARAMS:
        reason = "not much larger than the embedded target, which has 7.2M"
    elif n_params > _MAX_PARAMS * _TOLERANCE:
        reason = "too large for a file that is written on demand"
    else:
        return
    raise OptionError(
        f"a stand-in of {_format_params(n_params)} parameters is {reason}: "
        f"ask for {_format_params(_MIN_PARAMS)} to {_format_params(_MAX_PARAMS)}, such as 250M"
    )


def _format_params(n_params: float) -> str:
    if n_params < 999.5e6:
        return f"{n_params / 1e6:.3g}M"
    return f"{n_params / 1e9:.3g}B"


@dataclass(frozen=True)
class _Source:
    """The embedded target. `data`: F16 matrices (n_rows, row_bytes), F32 vectors (row_bytes,)."""

    sha256: str
    values: dict[str, Any]
    data: Mapping[str, NDArray[np.uint8]]
    n_embd: int


@functools.cache
def _read_source() -> _Source:
    header, content = read_header(embedded_target()), embedded_target().read_bytes()
    data = np.frombuffer(content, np.uint8)
    starts = {name: start for name, (_, start) in header.starts.items()}
    return _Source(
        sha256=hashlib.sha256(content).hexdigest(),
        values=dict(header.values),
        data={each.name: _dequantized(each, data[starts[each.name] :]) for each in header.tensors},
        n_embd=header.number("embedding_length"),
    )


def _dequantized(tensor: Tensor, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A Q8_0 tensor converted to F16; an F32 tensor as it is."""
    data = data[: tensor.n_bytes]
    if tensor.type == "F32":
        return data
    blocks = data.reshape(tensor.n_rows, -1, TYPES[tensor.type].n_bytes)
    weights: NDArray[np.float16] = blocks[..., :2].view("<f2") * blocks[..., 2:].view("i1")
    return weights.reshape(tensor.n_rows, -1).view(np.uint8)


def _values(of: Dimensions, source: _Source, filled: float) -> dict[str, Any]:
    size = _format_params(n_params_of(of))
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    return {
        "general.name": f"classics-target as a stand-in of {size}",
        "general.description": (
            "A cost-padded stand-in made by ggufspec: the 7.2M-parameter classics-target embedded "
            f"in {size} parameters, nearly all of them zero. It computes the same function as the "
            "small model at the cost of a large one, and is no better than the small one. For "
            "measuring speed only."
        ),
        "general.file_type": FILE_TYPES["F16"][0],
        "llama.embedding_length": of.n_embd,
        "llama.block_count": of.n_layers,
        "llama.feed_forward_length": of.n_ff,
        "llama.attention.head_count": of.n_heads,
        "llama.attention.head_count_kv": of.n_heads_kv,
        epsilon: source.values[epsilon] * filled,
        "ggufspec.standin.recipe": _RECIPE,
        "ggufspec.standin.source_sha256": source.sha256,
    }


def _padded(tensor: Tensor, source: _Source, n_copies: int, norm_scale: float) -> Iterator[Data]:
    """The data of a tensor: the source's tensor in the top-left corner, zeros elsewhere.

    What writes the residual stream is repeated: embeddings by column, other matrices by row.
    """
    data = source.data.get(tensor.name)
    n_done = 0
    if data is not None and len(tensor.shape) == 1:
        corner = (data.view("<f4").astype("f8") * norm_scale).astype("<f4").tobytes()
        n_done = len(corner)
        yield corner
    elif data is not None:
        if tensor.name.startswith("token_embd"):
            data = np.tile(data, (1, n_copies))
        elif tensor.name.endswith(("attn_output.weight", "ffn_down.weight")):
            data = np.tile(data, (n_copies, 1))
        n_done = len(data) * tensor.row_bytes
        n_step = max(1, _CHUNK // tensor.row_bytes)
        rows = np.zeros((n_step, tensor.row_bytes), np.uint8)
        for start in range(0, len(data), n_step):
            piece = data[start : start + n_step]
            rows[: len(piece), : data.shape[1]] = piece
            yield rows[: len(piece)].data.cast("B")
    zeros = memoryview(bytes(min(tensor.n_bytes - n_done, _CHUNK)))
    for start in range(n_done, tensor.n_bytes, _CHUNK):
        yield zeros[: tensor.n_bytes - start]
