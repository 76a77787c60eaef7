"""Products of quantized weights with a few rows, by each instruction set of this processor."""

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ggufspec import _native

SCALES = {  # the bytes of float16 numbers in a block; all others may be anything
    "q4_0": 0, "q4_1": 0, "q5_0": 0, "q5_1": 0, "q8_0": 0, "iq4_nl": 0, "iq4_xs": 0,
    "q2_K": 80, "q3_K": 108, "q4_K": 0, "q5_K": 0, "q6_K": 208,
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")
WITH_MINIMA = ("q4_1", "q5_1", "q2_K", "q4_K", "q5_K")
KERNELS = [
    (instructions, name)
    for instructions in _native.kernel_instructions()
    for name in _native.kernel_types(instructions)
]
pytestmark = pytest.mark.skipif(not KERNELS, reason="there are no kernels for this processor")


def quantization(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(_native.kernel_types(KERNELS[0][0])[name])


def random_weights(name: str, n_rows: int, n_columns: int, seed: int) -> NDArray[np.uint8]:
    """Rows in ggml's layout: any bits, with scales from 0.01 to 0.1 of either sign."""
    draw = np.random.default_rng(seed)
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[quantization(name)]
    n_blocks = n_rows * n_columns // n_values
    if name in FLOATS:
        values = draw.normal(0, 1, n_rows * n_columns).astype(np.float32)
        rows = gguf.quants.quantize(values.reshape(n_rows, n_columns), quantization(name))
        return np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    blocks = draw.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
    if name == "mxfp4":
        blocks[:, 0] = draw.integers(115, 130, n_blocks)
    else:
        n = 2 if name in WITH_MINIMA else 1
        scales = draw.uniform(0.01, 0.1, (n_blocks, n)) * draw.choice([-1, 1], (n_blocks, n))
        at = SCALES[name]
        blocks[:, at : at + 2 * n] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(-1)


def dequantized(name: str, weights: NDArray[np.uint8], n_rows: int) -> NDArray[np.float64]:
    values = gguf.quants.dequantize(weights, quantization(name))
    return values.reshape(n_rows, -1).astype(np.float64)


def rounded(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Activations as the kernels see them: 8 bits, with a scale for each 32 values."""
    blocks = rows.reshape(len(rows), -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    rate = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    return (np.rint(blocks * rate) * (largest / np.float32(127)).astype(np.float64)).reshape(
        rows.shape
    )


def activations(n: int, n_columns: int, seed: int) -> NDArray[np.float32]:
    """Of very different sizes, as after a text's first token; some blocks are zero."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(0, 1, (n, n_columns)) * np.exp(
        draw.normal(0, 2, (n, n_columns // 32))
    ).repeat(32, axis=1)
    rows[0, :32] = 0
    return rows.astype(np.float32)


@pytest.mark.parametrize(("instructions", "name"), KERNELS)
def test_products_are_those_of_the_weights(instructions: str, name: str) -> None:
    """Of 1 to 17 rows with odd numbers of rows of weights, against double precision."""
    type_ = _native.kernel_types(instructions)[name]
    n_values = max(gguf.GGML_QUANT_SIZES[quantization(name)][0], 32)
    for n, n_rows, n_blocks in [(i, 1 + 5 * i % 37, 1 + i % 3) for i in range(1, 18)]:
        n_columns = n_blocks * n_values
        weights, rows = random_weights(name, n_rows, n_columns, n), activations(n, n_columns, n)
        seen = rows.astype(np.float64) if name in FLOATS else rounded(rows)
        matrix = dequantized(name, weights, n_rows)
        size = np.abs(seen) @ np.abs(matrix.T)
        found = _native.kernel_product(instructions, type_, weights, rows)
        assert found.shape == (n, n_rows)
        assert np.all(np.abs(found - seen @ matrix.T) <= 2e-6 * size)


@pytest.mark.parametrize(("instructions", "name"), KERNELS)
def test_a_row_does_not_depend_on_the_rows_beside_it(instructions: str, name: str) -> None:
    """Bit for bit, in a pass over 17 rows and in passes over 1 to 16."""
    type_ = _native.kernel_types(instructions)[name]
    weights, rows = random_weights(name, 40, 512, seed=1), activations(17, 512, seed=2)
    whole = _native.kernel_product(instructions, type_, weights, rows)
    for n in range(1, 17):
        for begin in (0, 17 - n):
            part = _native.kernel_product(instructions, type_, weights, rows[begin : begin + n])
            assert np.array_equal(part, whole[begin : begin + n])


def test_what_is_no_product_is_refused() -> None:
    instructions = KERNELS[0][0]
    rows, weights = np.ones((1, 32), np.float32), np.zeros(18, np.uint8)
    with pytest.raises(ValueError, match="no kernels for sse9"):
        _native.kernel_product("sse9", 2, weights, rows)
    with pytest.raises(ValueError, match="no kernel for this type"):
        _native.kernel_product(instructions, 99, weights, rows)
    with pytest.raises(ValueError, match="no whole rows"):
        _native.kernel_product(instructions, 2, weights[:17], rows)
