"""The bytes that a GGUF file opens with. Knows the format, and nothing of what is in a file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "ALIGNMENT",
    "Entry",
    "TensorInfo",
    "boolean",
    "float32",
    "floats",
    "header",
    "int32s",
    "padding",
    "string",
    "strings",
    "uint32",
]

ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # gguf_type

Entry = tuple[str, bytes]  # a key, and its whole entry: key, type and value


class TensorInfo(NamedTuple):
    """What a header says of a tensor: `shape` from the innermost dimension on, `kind` a ggml_type.

    Tensors lie in a file in this order, each aligned.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    n_bytes: int


def header(entries: Mapping[str, bytes], tensors: Sequence[TensorInfo]) -> bytes:
    """Everything before the first tensor, aligned."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries)), *entries.values()]
    offset = 0
    for tensor in tensors:
        n = len(tensor.shape)
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{n}QIQ", n, *tensor.shape, tensor.kind, offset))
        offset += tensor.n_bytes + padding(tensor.n_bytes)
    data = b"".join(parts)
    return data + bytes(padding(len(data)))


def padding(n_bytes: int) -> int:
    """How many bytes follow that many, until the next tensor may begin."""
    return -n_bytes % ALIGNMENT


def string(key: str, value: str) -> Entry:
    """An entry that is a text."""
    return key, _key(key, _STRING) + _text(value)


def uint32(key: str, value: int) -> Entry:
    """An entry that is a count."""
    return key, _key(key, _UINT32) + struct.pack("<I", value)


def float32(key: str, value: float) -> Entry:
    """An entry that is a number."""
    return key, _key(key, _FLOAT32) + struct.pack("<f", value)


def boolean(key: str, value: bool) -> Entry:
    """An entry that is a switch."""
    return key, _key(key, _BOOL) + struct.pack("<?", value)


def strings(key: str, values: Iterable[bytes]) -> Entry:
    """An entry that is a list of texts."""
    parts = [struct.pack("<Q", len(value)) + value for value in values]
    return key, _array(key, _STRING, len(parts)) + b"".join(parts)


def int32s(key: str, values: Sequence[int]) -> Entry:
    """An entry that is a list of whole numbers."""
    return key, _array(key, _INT32, len(values)) + struct.pack(f"<{len(values)}i", *values)


def floats(key: str, values: Sequence[float]) -> Entry:
    """An entry that is a list of numbers."""
    return key, _array(key, _FLOAT32, len(values)) + struct.pack(f"<{len(values)}f", *values)


def _array(key: str, kind: int, n: int) -> bytes:
    return _key(key, _ARRAY) + struct.pack("<IQ", kind, n)


def _key(key: str, kind: int) -> bytes:
    return _text(key) + struct.pack("<I", kind)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
