"""Encodes weights in llama.cpp's types (ggml-quants.c): exactly -1, 0 and 1, or random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.models.gguf_file import TYPES

Bytes = NDArray[Any]  # uint8
Signs = NDArray[np.int8]

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per number
_WEIGHT = 0.02  # root mean square of a random weight, as in an untrained model
_NOTHING = -100  # exponent used for a scale of zero, which E8M0 lacks; avoids denormal numbers


def _half(scale: float) -> bytes:
    return np.array([scale], "<f2").tobytes()


def _exponent(scale: float) -> bytes:
    """The nearest power of two in E8M0; for zero 2**-100, too small to change a sum."""
    return bytes([127 + (round(math.log2(scale)) if scale else _NOTHING)])


class BlockLayout(NamedTuple):
    """The byte layout of a block.

    `pack`: signs (n_blocks, n_values) -> the fields of a block in order, each (n_blocks, n), or
    bytes that are the same in every block.
    """

    pack: Callable[[Signs], Sequence[NDArray[Any] | bytes]]
    scales: tuple[tuple[int, float], ...]  # (offset, factor) of each multiple of the scale
    n_steps: float  # approximate root mean square of random quants, in multiples of the scale
    number: Callable[[float], bytes] = _half  # encodes a scale


def encode(kind: str, signs: Signs, scale: float) -> Bytes:
    """Encode `scale` * `signs` in a type: (n_rows, n) of -1, 0 or 1 -> (n_rows, row_bytes)."""
    if kind in FLOATS:
        return floats(kind, signs * np.float32(scale))
    layout = LAYOUTS[kind]
    blocks = _joined(layout.pack(signs.reshape(-1, TYPES[kind].n_values)))
    _set_scales(blocks, layout, scale)
    return blocks.reshape(len(signs), -1)


def floats(kind: str, values: NDArray[np.float32]) -> Bytes:
    """Encode numbers in a type of FLOATS: (n_rows, n) -> (n_rows, row_bytes)."""
    data: Bytes = values.astype("<f2" if kind == "F16" else "<f4").view(np.uint8)
    if kind == "BF16":  # the upper half of an F32
        data = data.reshape(len(values), -1, 4)[:, :, 2:].reshape(len(values), -1)
    return data


def random_pool(kind: str, n_bytes: int, seed: int, *, is_zero: bool) -> Bytes:
    """About `n_bytes` of random weights, in whole blocks with finite scales.

    `is_zero`: scales are zero, so all weights are zero, whatever their bits (MXFP4: below 1e-28).
    """
    random = np.random.default_rng(seed)
    if kind in FLOATS:
        values = random.standard_normal((1, n_bytes // FLOATS[kind]), np.float32)
        return floats(kind, values * np.float32(0 if is_zero else _WEIGHT)).reshape(-1)
    layout, n_block = LAYOUTS[kind], TYPES[kind].n_bytes
    blocks = random.integers(0, 256, (n_bytes // n_block, n_block), np.uint8)
    _set_scales(blocks, layout, 0.0 if is_zero else _WEIGHT / layout.n_steps)
    return blocks.reshape(-1)


def _set_scales(blocks: Bytes, layout: BlockLayout, scale: float) -> None:
    for at, factor in layout.scales:
        number = np.frombuffer(layout.number(scale * factor), np.uint8)
        blocks[:, at : at + len(number)] = number


def _joined(fields: Sequence[NDArray[Any] | bytes]) -> Bytes:
    n_blocks = max(len(field) for field in fields if not isinstance(field, bytes))
    wide = [
        np.broadcast_to(np.frombuffer(field, np.uint8), (n_blocks, len(field)))
        if isinstance(field, bytes)
        else field.view(np.uint8)
        for field in fields
    ]
    return np.concatenate(wide, axis=1)


def _nibbles(quants: Signs, half: int) -> Bytes:
    """Pack values into four bits each: of 2 * half values, the first half is in the lower bits."""
    parts = quants.view(np.uint8).reshape(len(quants), -1, 2, half)
    packed: Bytes = parts[:, :, 0] | parts[:, :, 1] << 4
    return packed.reshape(len(quants), -1)


def _crumbs(quants: Signs) -> Bytes:
    """Pack values into two bits each: of 128 values, each quarter is two bits higher."""
    parts = quants.view(np.uint8).reshape(len(quants), 2, 4, 32)
    packed: Bytes = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return packed.reshape(len(quants), -1)


def _bits(are_set: NDArray[np.bool_]) -> Bytes:
    """Pack values into one bit each, eight along the second axis per byte."""
    return np.packbits(are_set, axis=1, bitorder="little").reshape(len(are_set), -1)


_SCALE = bytes(2)  # placeholder, set by _set_scales
_ONES = b"\x01" * 8 + b"\x11" * 4  # six-bit scales and minimums of 1
_ONES_OF_Q3_K = b"\x11" * 8 + b"\xaa" * 4  # scales of 1, stored as 33

# The numbers in a block are the signs plus the type's zero point; `s & 15` and `s & 3` are the
# lower bits if the zero point is 16, 32 or 4. MXFP4 has four-bit floats: 2 is 1, 10 is -1.
LAYOUTS = {
    "Q4_0": BlockLayout(lambda s: [_SCALE, _nibbles(s + 8, 16)], ((0, 1),), 4.6),
    "Q4_1": BlockLayout(lambda s: [_SCALE, _SCALE, _nibbles(s + 1, 16)], ((0, 1), (2, -1)), 7.9),
    "Q5_0": BlockLayout(lambda s: [_SCALE, _bits(s >= 0), _nibbles(s & 15, 16)], ((0, 1),), 9.2),
    "Q5_1": BlockLayout(
        lambda s: [_SCALE, _SCALE, bytes(4), _nibbles(s + 1, 16)], ((0, 1), (2, -1)), 17.2
    ),
    "Q8_0": BlockLayout(lambda s: [_SCALE, s], ((0, 1),), 74),
    "Q2_K": BlockLayout(
        lambda s: [b"\x11" * 16, _crumbs(s + 1), _SCALE, _SCALE], ((80, 1), (82, 1)), 12
    ),
    "Q3_K": BlockLayout(
        lambda s: [_bits(s.reshape(-1, 8, 32) >= 0), _crumbs(s & 3), _ONES_OF_Q3_K, _SCALE],
        ((108, 1),),
        42,
    ),
    "Q4_K": BlockLayout(
        lambda s: [_SCALE, _SCALE, _ONES, _nibbles(s + 1, 32)], ((0, 1), (2, 1)), 300
    ),
    "Q5_K": BlockLayout(
        lambda s: [_SCALE, _SCALE, _ONES, bytes(32), _nibbles(s + 1, 32)], ((0, 1), (2, 1)), 620
    ),
    "Q6_K": BlockLayout(
        lambda s: [_nibbles(s & 15, 64), _crumbs((s + 32) >> 4), b"\x01" * 16, _SCALE],
        ((208, 1),),
        1360,
    ),
    "MXFP4": BlockLayout(
        lambda s: [bytes(1), _nibbles((s & 1) << 1 | s & 8, 16)], ((0, 1),), 2.93, _exponent
    ),
}


def repeated(kind: str, pool: Bytes, n_before: int, n_bytes: int) -> Iterator[memoryview]:
    """`n_bytes` bytes of a pool that is repeated cyclically, after its first `n_before` blocks."""
    view = pool.data
    start = n_before * TYPES[kind].n_bytes % len(view)
    while n_bytes:
        piece = view[start : start + n_bytes]
        yield piece
        n_bytes -= len(piece)
        start = 0
