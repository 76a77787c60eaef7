"""Writes tiny LoRA adapters with random weights for the models of tiny.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiny

SHAPES = {"blk.0.attn_q.weight": (32, 32), "blk.1.ffn_down.weight": (64, 32)}  # of write_llama
_RANK = 4


def write_lora(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    *,
    seed: int = 0,
    rank: int = _RANK,
    gain: float = 2.0,
    architecture: str = "llama",
    header: dict[str, Any] | None = None,
    change: dict[str, Any] | None = None,
) -> Path:
    """An adapter of weights by name and shape: (values in, values out), experts last.

    header: keys that it has instead of the usual ones; None: without it. change: its tensors.
    """
    weights = tiny.Weights(seed)
    tensors: dict[str, Any] = {}
    for name, (n_in, n_out, *others) in shapes.items():
        # Of a token embedding, A has a row for each token.
        narrow = (rank, n_in) if "token_embd" not in name else (n_out, rank)
        wide = (n_out, rank) if "token_embd" not in name else (n_in, rank)
        a, b = f"{name}.lora_a", f"{name}.lora_b"
        tensors[a] = weights.normal(a, *others[::-1], *narrow, deviation=gain / np.sqrt(n_in))
        tensors[b] = weights.normal(b, *others[::-1], *wide, deviation=1.0 / np.sqrt(rank))
    usual = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 2.0 * rank}
    tensors = {name: each for name, each in (tensors | (change or {})).items() if each is not None}
    return tiny.write_gguf(path, architecture, usual | (header or {}), None, tensors)
