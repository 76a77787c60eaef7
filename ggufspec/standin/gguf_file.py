"""Lays out a GGUF file (ggml's docs/gguf.md): metadata, tensor infos, aligned tensor data."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ggufspec.models.tensors import TYPES, Tensor

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # gguf_type

Chunk = bytes | memoryview


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is planned but not written; its content is made while it is written.

    values: the metadata: bool, int, float, str, or a list of bytes (texts), floats or integers.
    data: yields the data of each tensor in order, in chunks of a few megabytes; a chunk may be
    overwritten when the next one is made.
    """

    values: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    data: Callable[[], Iterable[Iterable[Chunk]]]

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
        """How many weights it has."""
        return sum(tensor.n_values for tensor in self.tensors)

    @property
    def n_tensor_bytes(self) -> int:
        """Size of the data of all tensors, with the gaps between them."""
        return sum(_aligned(tensor.n_bytes) for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.n_tensor_bytes

    def chunks(self) -> Iterator[Chunk]:
        """The whole file."""
        yield self.header
        for tensor, data in zip(self.tensors, self.data(), strict=True):
            yield from data
            if gap := _aligned(tensor.n_bytes) - tensor.n_bytes:
                yield bytes(gap)

    def is_at(self, path: Path) -> bool:
        """Whether `path` has the size and the header of this file."""
        try:
            with path.open("rb") as file:
                return path.stat().st_size == self.n_bytes and (
                    file.read(len(self.header)) == self.header
                )
        except OSError:
            return False


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value & 0xFFFFFFFF)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value.encode())
    n = len(value)
    if not value or isinstance(value[0], bytes):
        return struct.pack("<IIQ", _ARRAY, _STRING, n) + b"".join(map(_text, value))
    if isinstance(value[0], float):
        return struct.pack(f"<IIQ{n}f", _ARRAY, _FLOAT32, n, *value)
    return struct.pack(f"<IIQ{n}i", _ARRAY, _INT32, n, *value)


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
