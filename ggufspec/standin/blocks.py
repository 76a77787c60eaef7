"""Encodes weights in llama.cpp's types: exact ones of -1, 0 and 1, and random ones.

The layouts: ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.models.tensors import TYPES

Bytes = NDArray[Any]  # uint8
Signs = NDArray[np.int8]

_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of each
_WEIGHT = 0.02  # root mean square of a random weight, as in an untrained model


class BlockLayout(NamedTuple):
    """How a block is written.

    pack: signs (n_blocks, n_values) -> bytes (n_blocks, n_bytes) without the scales.
    scales: offsets of half-precision numbers, and which multiple of the scale each is.
    n_steps: about the root mean square of random quants, in multiples of the scale.
    """

    pack: Callable[[Signs], Bytes]
    scales: tuple[tuple[int, float], ...]
    n_steps: float


def encode(kind: str, signs: Signs, scale: float) -> Bytes:
    """Rows of `scale` times -1, 0 or 1, as bytes of a type. (n_rows, n) -> (n_rows, row_bytes)."""
    if kind in _FLOATS:
        return _as_floats(kind, signs * np.float32(scale))
    layout = LAYOUTS[kind]
    blocks = layout.pack(signs.reshape(-1, TYPES[kind].n_values))
    _set_scales(blocks, layout, scale)
    return blocks.reshape(len(signs), -1)


def random_pool(kind: str, n_bytes: int, seed: int, *, is_zero: bool) -> Bytes:
    """About `n_bytes` of random weights in whole blocks with finite scales.

    is_zero: scales are zero, so every weight is zero whatever its bits.
    """
    random = np.random.default_rng(seed)
    if kind in _FLOATS:
        values = random.standard_normal((1, n_bytes // _FLOATS[kind]), np.float32)
        return _as_floats(kind, values * np.float32(0 if is_zero else _WEIGHT)).reshape(-1)
    layout, n_block = LAYOUTS[kind], TYPES[kind].n_bytes
    blocks = random.integers(0, 256, (n_bytes // n_block, n_block), np.uint8)
    _set_scales(blocks, layout, 0.0 if is_zero else _WEIGHT / layout.n_steps)
    return blocks.reshape(-1)


def _as_floats(kind: str, values: NDArray[np.float32]) -> Bytes:
    data: Bytes = values.astype("<f2" if kind == "F16" else "<f4").view(np.uint8)
    if kind == "BF16":  # the upper half of each
        data = data.reshape(len(values), -1, 4)[:, :, 2:].reshape(len(values), -1)
    return data


def _set_scales(blocks: Bytes, layout: BlockLayout, scale: float) -> None:
    for at, factor in layout.scales:
        blocks[:, at : at + 2] = np.array([scale * factor], "<f2").view(np.uint8)


def _nibbles(quants: Bytes, half: int) -> Bytes:
    """Four bits each: of 2 * half values, the first half goes into the lower bits."""
    parts = quants.reshape(len(quants), -1, 2, half)
    packed: Bytes = parts[:, :, 0] | parts[:, :, 1] << 4
    return packed.reshape(len(quants), -1)


def _crumbs(quants: Bytes) -> Bytes:
    """Two bits each: of 128 values, each quarter goes two bits higher."""
    parts = quants.reshape(len(quants), 2, 4, 32)
    packed: Bytes = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return packed.reshape(len(quants), -1)


def _shifted(signs: Signs, zero: int) -> Bytes:
    """-1, 0 and 1 as the numbers around `zero`."""
    quants: Bytes = (signs + np.int8(zero)).view(np.uint8)
    return quants


def _joined(n_blocks: int, *parts: Bytes | bytes) -> Bytes:
    """The fields of a block side by side; those given as bytes are the same in each."""
    wide = [
        np.broadcast_to(np.frombuffer(part, np.uint8), (n_blocks, len(part)))
        if isinstance(part, bytes)
        else part
        for part in parts
    ]
    return np.concatenate(wide, axis=1)


_SCALE = bytes(2)  # set afterwards


def _q4_0(signs: Signs) -> Bytes:
    return _joined(len(signs), _SCALE, _nibbles(_shifted(signs, 8), 16))


def _q4_1(signs: Signs) -> Bytes:
    return _joined(len(signs), _SCALE, _SCALE, _nibbles(_shifted(signs, 1), 16))


def _q5_0(signs: Signs) -> Bytes:
    quants = _shifted(signs, 16)
    high = np.packbits(quants >> 4, axis=1, bitorder="little")
    return _joined(len(signs), _SCALE, high, _nibbles(quants & 15, 16))


def _q5_1(signs: Signs) -> Bytes:
    return _joined(len(signs), _SCALE, _SCALE, bytes(4), _nibbles(_shifted(signs, 1), 16))


def _q8_0(signs: Signs) -> Bytes:
    return _joined(len(signs), _SCALE, _shifted(signs, 0))


def _q2_k(signs: Signs) -> Bytes:
    return _joined(len(signs), b"\x11" * 16, _crumbs(_shifted(signs, 1)), _SCALE, _SCALE)


def _q3_k(signs: Signs) -> Bytes:
    is_high = (signs >= 0).reshape(len(signs), 8, 32)
    mask = np.packbits(is_high, axis=1, bitorder="little").reshape(len(signs), 32)
    low = _crumbs(_shifted(signs, 4) & 3)
    ones = b"\x11" * 8 + b"\xaa" * 4  # scales of 33, less 32
    return _joined(len(signs), mask, low, ones, _SCALE)


_ONES = b"\x01" * 8 + b"\x11" * 4  # of scales and minimums of six bits


def _q4_k(signs: Signs) -> Bytes:
    return _joined(len(signs), _SCALE, _SCALE, _ONES, _nibbles(_shifted(signs, 1), 32))


def _q5_k(signs: Signs) -> Bytes:
    low = _nibbles(_shifted(signs, 1), 32)
    return _joined(len(signs), _SCALE, _SCALE, _ONES, bytes(32), low)


def _q6_k(signs: Signs) -> Bytes:
    quants = _shifted(signs, 32)
    low = _nibbles(quants & 15, 64)
    return _joined(len(signs), low, _crumbs(quants >> 4), b"\x01" * 16, _SCALE)


LAYOUTS = {
    "Q4_0": BlockLayout(_q4_0, ((0, 1),), 4.6),
    "Q4_1": BlockLayout(_q4_1, ((0, 1), (2, -1)), 7.9),
    "Q5_0": BlockLayout(_q5_0, ((0, 1),), 9.2),
    "Q5_1": BlockLayout(_q5_1, ((0, 1), (2, -1)), 17.2),
    "Q8_0": BlockLayout(_q8_0, ((0, 1),), 74),
    "Q2_K": BlockLayout(_q2_k, ((80, 1), (82, 1)), 12),
    "Q3_K": BlockLayout(_q3_k, ((108, 1),), 42),
    "Q4_K": BlockLayout(_q4_k, ((0, 1), (2, 1)), 300),
    "Q5_K": BlockLayout(_q5_k, ((0, 1), (2, 1)), 620),
    "Q6_K": BlockLayout(_q6_k, ((208, 1),), 1360),
}


def repeated(kind: str, pool: Bytes, n_before: int, n_bytes: int) -> Iterator[memoryview]:
    """`n_bytes` of a pool, repeated cyclically, starting after its first `n_before` blocks."""
    view = memoryview(pool)  # type: ignore[arg-type]
    start = n_before * TYPES[kind].n_bytes % len(view)
    while n_bytes:
        piece = view[start : start + n_bytes]
        yield piece
        n_bytes -= len(piece)
        start = 0
