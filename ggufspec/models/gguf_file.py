"""Lays out a GGUF file (ggml's docs/gguf.md): metadata, types of weights, tensors, their data."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ggufspec.common.files import USER_FOLDER, write_whole
from ggufspec.common.progress import Progress
from ggufspec.common.reading import read_toml
from ggufspec.errors import OptionError


class WeightType(NamedTuple):
    """How weights are stored: a block of `n_values` numbers takes `n_bytes`."""

    number: int  # its code in a file
    name: str
    n_values: int
    n_bytes: int


_STORED = read_toml(Path(__file__).with_name("weight_types.toml"))
TYPES = {name: WeightType(of[0], name, *of[1:]) for name, of in _STORED.items()}
TYPES_BY_NUMBER = {each.number: each for each in TYPES.values()}
# llama-quantize's names, indexed by llama_ftype (llama.h); "": the number is not in use.
QUANTIZATIONS = (
    *("F32", "F16", "Q4_0", "Q4_1", "", "", "", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M"),
    *("Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S"),
    *("IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS"),
    *("IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0"),
)
# llama.cpp's name patterns (common.h) for experts of a mixture, and dense feed-forward networks.
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
DENSE = r"\.ffn_(up|down|gate)\."

_LAYER = re.compile(r"blk\.(\d{1,9})\.")


def layer_of(tensor_name: str) -> int | None:
    """The layer of a tensor; None: it belongs to no layer."""
    matched = _LAYER.match(tensor_name)
    return int(matched[1]) if matched else None


class Tensor(NamedTuple):
    """An array of weights. type: a key of TYPES. shape: the innermost dimension first."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def layer(self) -> int | None:
        return layer_of(self.name)

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        """Number of rows of shape[0] weights, over all experts."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        of = TYPES[self.type]
        return self.shape[0] // of.n_values * of.n_bytes

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


_ALIGNMENT = 32
# gguf_metadata_value_type; SCALARS: `struct` codes of the fixed-size types
_UINT32, STRING, ARRAY = 4, 8, 9
_KINDS = {int: 5, float: 6, bool: 7}  # element types of arrays: INT32, FLOAT32, BOOL
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}

Data = bytes | memoryview


class Encoded(bytes):
    """A value of the metadata as stored in a file: its type, then its content."""

    @property
    def length(self) -> int | None:
        """The number of elements of an array; None: a single value."""
        kind = int.from_bytes(self[:4], "little")
        return int.from_bytes(self[8:16], "little") if kind == ARRAY else None

    @property
    def is_numbers(self) -> bool:
        return self.length is not None and self[4] != STRING

    @cached_property
    def numbers(self) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{self.length}{self._code(4)}", self, 16)

    def with_numbers(self, numbers: Sequence[Any]) -> Encoded:
        """An array of `numbers`, of the same element type as this array."""
        n = len(numbers)
        return Encoded(self[:8] + struct.pack(f"<Q{n}{self._code(4)}", n, *numbers))

    def picked(self, kept: Sequence[int]) -> Encoded:
        """An array of the elements with the indices `kept`; elements are numbers or texts."""
        if self.is_numbers:
            numbers = self.numbers
            return self.with_numbers([numbers[i] for i in kept])
        starts, at = [], 16
        for _ in range(self.length or 0):
            starts.append(at)
            at += 8 + int.from_bytes(self[at : at + 8], "little")
        starts.append(at)
        texts = b"".join(self[starts[i] : starts[i + 1]] for i in kept)
        return Encoded(self[:8] + struct.pack("<Q", len(kept)) + texts)

    def with_number(self, number: int) -> Encoded:
        """A single number of the same type as this one."""
        return Encoded(self[:4] + struct.pack(f"<{self._code(0)}", number))

    def _code(self, at: int) -> str:
        return SCALARS[int.from_bytes(self[at : at + 4], "little")]


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is planned but not written; its data is computed during the write.

    values: the metadata: bool, int, float, str, a list of bytes (texts), booleans, floats or
    integers, or an Encoded value of another file.
    data: yields the data of each tensor in order, in chunks of a few megabytes; a chunk may be
    overwritten when the next one is made. sources: the files that the data is read from.
    """

    values: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    data: Callable[[], Iterable[Iterable[Data]]]
    sources: tuple[Path, ...] = ()

    @cached_property
    def header(self) -> bytes:
        """Everything before the first tensor's data."""
        n_values = len(self.values)
        parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), n_values)]
        parts += [_text(key.encode()) + _value(value) for key, value in self.values.items()]
        offset = 0
        for tensor in self.tensors:
            n, kind = len(tensor.shape), TYPES[tensor.type].number
            parts.append(_text(tensor.name.encode()))
            parts.append(struct.pack(f"<I{n}QIQ", n, *tensor.shape, kind, offset))
            offset += _aligned(tensor.n_bytes)
        data = b"".join(parts)
        return data.ljust(_aligned(len(data)), b"\0")

    @property
    def n_params(self) -> int:
        return sum(tensor.n_values for tensor in self.tensors)

    @property
    def n_tensor_bytes(self) -> int:
        """Size of the data of all tensors, with the gaps between them."""
        return sum(_aligned(tensor.n_bytes) for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        return len(self.header) + self.n_tensor_bytes

    def chunks(self) -> Iterator[Data]:
        yield self.header
        for tensor, data in zip(self.tensors, self.data(), strict=True):
            yield from data
            if gap := _aligned(tensor.n_bytes) - tensor.n_bytes:
                yield bytes(gap)

    def is_at(self, path: Path) -> bool:
        """Whether `path` has the size and the header of this file."""
        try:
            with path.open("rb") as file:
                has_size = path.stat().st_size == self.n_bytes
                return has_size and file.read(len(self.header)) == self.header
        except OSError:
            return False


def write(
    file: GgufFile, path: Path, *, force: bool = False, progress: Progress | None = None
) -> None:
    """Write the file atomically: an error leaves `path` unchanged. Needs little memory at any size.

    progress: called with bytes done and bytes in all. force: replace an existing file.
    Raises OptionError as `check_path`, CacheError if the file cannot be written.
    """
    check_path(path, force=force, sources=file.sources)
    write_whole(path, file.n_bytes, file.chunks(), progress, USER_FOLDER)


def check_path(path: Path, *, force: bool, sources: Sequence[Path] = ()) -> None:
    """Raise OptionError for a path that cannot or must not be written.

    These are folders, devices, paths in a folder that does not exist, the files that the data is
    read from (`sources`) and, without `force`, existing files.
    """
    if path.is_dir():
        raise OptionError(f"{path} is a folder: name the file to write, such as {path}/model.gguf")
    if not path.parent.is_dir():
        raise OptionError(f"the folder {path.parent} does not exist: create it first")
    if not path.exists():
        return
    if any(source.samefile(path) for source in sources):
        raise OptionError(f"{path} is the source model itself: name another file")
    if not path.is_file():
        raise OptionError(f"{path} is not a regular file and cannot be replaced: name another one")
    if not force:
        raise OptionError(f"{path} exists: name another file, or replace it with --force")


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _value(value: Any) -> bytes:
    if isinstance(value, Encoded):
        return value
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value.encode())
    if type(value) is int:
        return struct.pack("<II", _UINT32, value & 0xFFFFFFFF)
    if not isinstance(value, (bool, float)):
        n = len(value)
        if not value or isinstance(value[0], bytes):
            return struct.pack("<IIQ", ARRAY, STRING, n) + b"".join(map(_text, value))
        kind = _KINDS[type(value[0])]
        return struct.pack(f"<IIQ{n}{SCALARS[kind]}", ARRAY, kind, n, *value)
    kind = _KINDS[type(value)]
    return struct.pack(f"<I{SCALARS[kind]}", kind, value)


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
