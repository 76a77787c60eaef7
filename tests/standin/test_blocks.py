"""Planted weights are exact in every layout, random ones are sane, and zero scales are zero."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ggufspec.standin.blocks import LAYOUTS, encode, random_pool, repeated

KINDS = ["F32", "F16", "BF16", *LAYOUTS]
POOL_BYTES = 1 << 18


def decoded(kind: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What bytes mean, as gguf has it."""
    raw = data.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    values: NDArray[np.float32] = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return values


def blocks(kind: str, pool: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pool.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])


@pytest.mark.parametrize("kind", KINDS)
def test_planted_weights_are_exact(kind: str) -> None:
    signs = np.random.default_rng(0).integers(-1, 2, (7, 512)).astype(np.int8)
    for scale in (1.0, 8.0, 0.25):
        assert np.array_equal(decoded(kind, encode(kind, signs, scale)), scale * signs)


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_small_and_finite(kind: str) -> None:
    values = decoded(kind, blocks(kind, random_pool(kind, POOL_BYTES, 1, is_zero=False)))
    assert np.isfinite(values).all()
    assert np.sqrt((values**2).mean()) == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_scale_of_zero_leaves_real_bytes_that_mean_nothing(kind: str) -> None:
    """MXFP4 has no such scale: what is left is neither noticed nor slow."""
    pool = random_pool(kind, POOL_BYTES, 1, is_zero=True)
    values = np.abs(decoded(kind, blocks(kind, pool)))
    assert values.max() < (1e-28 if kind == "MXFP4" else np.finfo(np.float32).tiny)
    assert kind != "MXFP4" or values[values > 0].min() > 1e-31
    assert np.bincount(pool, minlength=256).min() > 0.8 * POOL_BYTES / 256 * 0.8
    assert pool.size > 0.99 * POOL_BYTES


def test_a_pool_is_gone_around_in_whole_blocks() -> None:
    pool = np.arange(90, dtype=np.uint8)  # five blocks of Q4_0
    parts = list(repeated("Q4_0", pool, 3, 126))
    assert b"".join(parts) == bytes([*range(54, 90), *range(90)])
