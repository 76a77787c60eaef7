"""A target of any size that computes what the embedded one does: its zero-padded stand-in.

Knows the recipe and the GGUF bytes that it gives; refuses to know prompts, speed and llama.cpp.

Every matrix is copied into the top-left corner of a larger one, all else is zero, added layers are
all zero. The weights are written in F16, like those of a model that nobody has quantized yet: each
pass reads two bytes a weight, so it costs what memory costs, as with the models that a stand-in
stands for. Heads keep their size of 32, so the first of them see the rotary angles that they were
trained with.

The one thing that padding changes is the mean square in an RMS norm over D instead of d columns.
Norm weights times sqrt(d / D) and epsilon times d / D undo it, without a rounding where d / D is a
power of 4. Where D is 2d, 8d ..., all that writes to the residual stream writes it
twice, side by side, and the norms read the first copy: 2d / D takes the place of d / D.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ggufspec.common import gguf_bytes
from ggufspec.common.files import Progress, write_whole
from ggufspec.errors import CacheError, OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "PaddedShape",
    "cached_target",
    "embedded_draft",
    "embedded_target",
    "padded_size",
    "padded_target",
    "parse_size",
    "plan_shape",
]

_RECIPE = 2  # raise it when the files that this module writes change
_N_VOCAB = 4096
_HEAD_SIZE = 32
_MIN_PARAMS = 10_000_000
_MAX_PARAMS = 8_000_000_000
_TOLERANCE = 1.05  # models called "8B" have up to 8.2
_LAYER_STEP = 4
_WIDE_LAYERS = 12  # a shape is as wide as leaves it this many layers

_F16_BYTES = 2
_F32, _F16 = 0, 1  # ggml_type
_FILE_TYPE_F16 = 1  # llama_ftype
_CHUNK = 4 << 20


def embedded_target() -> Path:
    """The target of the pair that ggufspec carries: 7.2 M parameters, Q8_0."""
    return Path(__file__).with_name("classics-target.gguf")


def embedded_draft() -> Path:
    """The draft of the pair that ggufspec carries: 1.5 M parameters, Q8_0."""
    return Path(__file__).with_name("classics-draft.gguf")


def parse_size(text: str) -> int:
    """The number of parameters that "250M", "1B" or "1.5b" means.

    Raises OptionError for any other text and for what no stand-in can have.
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


@dataclass(frozen=True)
class PaddedShape:
    """The size of a llama model with the embedded tokenizer and heads of 32."""

    n_embd: int
    n_layer: int
    n_head: int
    n_ff: int

    @property
    def n_params(self) -> int:
        """How many weights it has."""
        return sum(tensor.n_weights for tensor in _tensors(self))

    @property
    def n_bytes(self) -> int:
        """What its tensors take in F16 with F32 norms; a header of about 130 kB comes on top."""
        return sum(tensor.n_bytes for tensor in _tensors(self))


def plan_shape(n_params: int) -> PaddedShape:
    """The shape nearest to a number of parameters, within 16 %.

    The widest that leaves twelve layers, in doublings of the embedded width; then as many layers as
    come nearest, in steps of four. Raises OptionError for what no stand-in can have.
    """
    _check_size(n_params)
    n_embd = 256
    while _layers_that_fit(2 * n_embd, n_params) >= _WIDE_LAYERS:
        n_embd *= 2
    return _shape(n_embd, _LAYER_STEP * round(_layers_that_fit(n_embd, n_params) / _LAYER_STEP))


def padded_size(n_params: int) -> int:
    """Bytes of the file that `padded_target` would write; raises OptionError as `plan_shape`."""
    return _Plan.of(n_params).n_bytes


def cached_target(n_params: int, cache_dir: Path) -> Path | None:
    """The stand-in that `padded_target` would return without writing it, or None.

    Raises OptionError as `plan_shape`, never CacheError.
    """
    plan = _Plan.of(n_params)
    path = cache_dir / plan.file_name
    return path if plan.is_written(path) else None


def padded_target(n_params: int, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The stand-in with about `n_params` parameters: from the cache folder, or written there.

    `progress` hears of bytes done and bytes in all while it is written, and nothing if it is there
    already. Memory stays small at any size. A file of another recipe, cut short or of another
    content in its header is written anew.

    Raises OptionError as `plan_shape`, CacheError if the folder or the disk does not take the file.
    """
    plan = _Plan.of(n_params)
    path = cache_dir / plan.file_name
    if plan.is_written(path):
        return path
    try:
        write_whole(path, plan.n_bytes, plan.chunks(), progress)
    except CacheError:
        if not plan.is_written(path):  # it may be: another process came first
            raise
    return path


class _Tensor(NamedTuple):
    name: str
    n_columns: int
    n_rows: int = 0  # 0: a vector, kept in F32

    @property
    def n_weights(self) -> int:
        return self.n_columns * (self.n_rows or 1)

    @property
    def n_bytes(self) -> int:
        return self.row_bytes * (self.n_rows or 1)

    @property
    def row_bytes(self) -> int:
        if not self.n_rows:
            return 4 * self.n_columns
        return self.n_columns * _F16_BYTES


def _tensors(shape: PaddedShape) -> Iterator[_Tensor]:
    """In the order of the file. Widths are multiples of 256, so none needs padding to align."""
    width, wide = shape.n_embd, shape.n_ff
    yield _Tensor("token_embd.weight", width, _N_VOCAB)
    yield _Tensor("output.weight", width, _N_VOCAB)
    yield _Tensor("output_norm.weight", width)
    for layer in range(shape.n_layer):
        yield _Tensor(f"blk.{layer}.attn_norm.weight", width)
        yield _Tensor(f"blk.{layer}.ffn_norm.weight", width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield _Tensor(f"blk.{layer}.{name}.weight", width, width)
        yield _Tensor(f"blk.{layer}.ffn_gate.weight", width, wide)
        yield _Tensor(f"blk.{layer}.ffn_up.weight", width, wide)
        yield _Tensor(f"blk.{layer}.ffn_down.weight", wide, width)


def _shape(n_embd: int, n_layer: int) -> PaddedShape:
    return PaddedShape(n_embd, n_layer, n_head=n_embd // _HEAD_SIZE, n_ff=3 * n_embd)


def _layers_that_fit(n_embd: int, n_params: int) -> float:
    outside = _shape(n_embd, 0).n_params
    return (n_params - outside) / (_shape(n_embd, 1).n_params - outside)


def _check_size(n_params: float) -> None:
    if n_params < _MIN_PARAMS:
        reason = "hardly larger than the embedded target, which has 7.2M"
    elif n_params > _MAX_PARAMS * _TOLERANCE:
        reason = "too large for a file that is made on the spot"
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


class _Source(NamedTuple):
    """The embedded target, as bytes."""

    fingerprint: str
    metadata: dict[str, bytes]  # key -> the whole entry, key and type included
    tensors: dict[str, NDArray[np.uint8]]  # F16 (n_rows, row_bytes), vectors F32 (row_bytes,)
    n_embd: int
    rms_epsilon: float


@functools.cache
def _read_source() -> _Source:
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(embedded_target())
    entries = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return _Source(
        fingerprint=hashlib.sha256(reader.data).hexdigest(),
        metadata={
            key: b"".join(part.tobytes() for part in field.parts) for key, field in entries.items()
        },
        tensors={
            tensor.name: tensor.data.view(np.uint8)
            if tensor.data.dtype == np.float32
            else gguf.dequantize(tensor.data, tensor.tensor_type).astype("<f2").view(np.uint8)
            for tensor in reader.tensors
        },
        n_embd=int(entries["llama.embedding_length"].contents()),
        rms_epsilon=float(entries["llama.attention.layer_norm_rms_epsilon"].contents()),
    )


class _Plan(NamedTuple):
    """A stand-in that is decided but not written."""

    shape: PaddedShape
    source: _Source
    header: bytes

    @classmethod
    def of(cls, n_params: int) -> _Plan:
        shape = plan_shape(n_params)
        source = _read_source()
        return cls(shape, source, _header(shape, _metadata(shape, source)))

    @property
    def file_name(self) -> str:
        size, print_ = _format_params(self.shape.n_params), self.source.fingerprint[:8]
        return f"classics-target-as-{size}-recipe{_RECIPE}-{print_}.gguf"

    @property
    def n_bytes(self) -> int:
        return len(self.header) + self.shape.n_bytes

    def is_written(self, path: Path) -> bool:
        """Whether a file is this one, by its size and its header; names alone are not trusted."""
        try:
            with path.open("rb") as file:
                return path.stat().st_size == self.n_bytes and (
                    file.read(len(self.header)) == self.header
                )
        except OSError:
            return False

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file in pieces of a few megabytes; each may be overwritten by the next."""
        yield self.header
        n_copies = _copies(self.shape, self.source)
        norm_scale = math.sqrt(_filled(self.shape, self.source))
        for tensor in _tensors(self.shape):
            data = self.source.tensors.get(tensor.name)
            n_done = 0
            if data is not None and not tensor.n_rows:
                corner = _scaled(data, norm_scale)
                n_done = len(corner)
                yield corner
            elif data is not None:
                data = _repeated(tensor.name, data, n_copies)
                n_done = len(data) * tensor.row_bytes
                yield from _widened(data, tensor.row_bytes)
            yield from _zeros(tensor.n_bytes - n_done)


def _copies(shape: PaddedShape, source: _Source) -> int:
    """How often the residual stream holds the source's: once if d / D is a power of 4, or twice."""
    n_doublings = (shape.n_embd // source.n_embd).bit_length() - 1
    return 1 + n_doublings % 2


def _filled(shape: PaddedShape, source: _Source) -> float:
    """The part of the residual stream that is not zero, a power of 4."""
    return _copies(shape, source) * source.n_embd / shape.n_embd


def _metadata(shape: PaddedShape, source: _Source) -> dict[str, bytes]:
    """The source's own, the tokenizer bit by bit, with the new sizes."""
    size = _format_params(shape.n_params)
    changed = [
        gguf_bytes.string("general.name", f"classics-target as a stand-in of {size}"),
        gguf_bytes.string(
            "general.description",
            f"A cost-padded stand-in made by ggufspec: the 7.2M-parameter classics-target embedded "
            f"in {size} parameters, nearly all of them zero. It computes the same function as the "
            "small model at the cost of a large one, and is no better than the small one. For "
            "measuring speed only.",
        ),
        gguf_bytes.uint32("general.file_type", _FILE_TYPE_F16),
        gguf_bytes.uint32("llama.embedding_length", shape.n_embd),
        gguf_bytes.uint32("llama.block_count", shape.n_layer),
        gguf_bytes.uint32("llama.feed_forward_length", shape.n_ff),
        gguf_bytes.uint32("llama.attention.head_count", shape.n_head),
        gguf_bytes.uint32("llama.attention.head_count_kv", shape.n_head),
        gguf_bytes.float32(
            "llama.attention.layer_norm_rms_epsilon",
            source.rms_epsilon * _filled(shape, source),
        ),
        gguf_bytes.uint32("ggufspec.standin.recipe", _RECIPE),
        gguf_bytes.string("ggufspec.standin.source_sha256", source.fingerprint),
    ]
    return source.metadata | dict(changed)


def _header(shape: PaddedShape, metadata: dict[str, bytes]) -> bytes:
    """Everything before the first tensor."""
    return gguf_bytes.header(
        metadata,
        [
            gguf_bytes.TensorInfo(
                tensor.name,
                (tensor.n_columns, tensor.n_rows) if tensor.n_rows else (tensor.n_columns,),
                _F16 if tensor.n_rows else _F32,
                tensor.n_bytes,
            )
            for tensor in _tensors(shape)
        ],
    )


def _repeated(name: str, data: NDArray[np.uint8], n_copies: int) -> NDArray[np.uint8]:
    """What writes to the residual stream, n times over: embeddings by column, matrices by row."""
    import numpy as np

    if name.startswith("token_embd"):
        return np.tile(data, (1, n_copies))
    if name.endswith(("attn_output.weight", "ffn_down.weight")):
        return np.tile(data, (n_copies, 1))
    return data


def _scaled(data: NDArray[np.uint8], scale: float) -> bytes:
    import numpy as np

    return (data.view("<f4").astype(np.float64) * scale).astype("<f4").tobytes()


def _widened(data: NDArray[np.uint8], row_bytes: int) -> Iterator[memoryview]:
    import numpy as np

    n_step = max(1, _CHUNK // row_bytes)
    rows = np.zeros((n_step, row_bytes), np.uint8)
    for start in range(0, len(data), n_step):
        piece = data[start : start + n_step]
        rows[: len(piece), : data.shape[1]] = piece
        yield rows[: len(piece)].data.cast("B")


def _zeros(n_bytes: int) -> Iterator[memoryview]:
    zeros = memoryview(bytes(min(n_bytes, _CHUNK)))
    for start in range(0, n_bytes, _CHUNK):
        yield zeros[: n_bytes - start]
