"""Writes tiny random projectors for tiny models, and images for them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
from tiny_file import Tensors, Weights

_N_EMBD, _N_HEAD, _PATCH = 32, 2, 4  # of the vision tower
_N_TEXT = 32  # width of the model


def _layer(weights: Weights, prefix: str, *, fused: bool) -> Tensors:
    n = _N_EMBD
    shapes = {"attn_out": (n, n), "ffn_up": (2 * n, n), "ffn_down": (n, 2 * n)}
    shapes |= {"attn_qkv": (3 * n, n)} if fused else {f"attn_{of}": (n, n) for of in "qkv"}
    tensors: Tensors = {}
    for name, (n_out, n_in) in shapes.items():
        full = f"{prefix}.{name}"
        tensors[f"{full}.weight"] = weights.matrix(full, n_out, n_in)
        tensors[f"{full}.bias"] = weights.normal(f"{full}.bias", n_out, deviation=0.1)
    for norm in ("ln1", "ln2"):
        tensors[f"{prefix}.{norm}.weight"] = np.ones(n, np.float32)
        tensors[f"{prefix}.{norm}.bias"] = np.zeros(n, np.float32)
    return tensors


def _written(
    path: Path, kind: str, tensors: Tensors, weights: Weights, *, fused: bool = False, **facts: Any
) -> Path:
    patch = facts.get("patch_size", _PATCH)
    shape = (_N_EMBD, 3, patch, patch)
    tensors["v.patch_embd.weight"] = weights.normal("patch", *shape, deviation=0.3)
    for i in range(2):
        tensors |= _layer(weights, f"v.blk.{i}", fused=fused)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": 16,
        "patch_size": _PATCH,
        "embedding_length": _N_EMBD,
        "feed_forward_length": 2 * _N_EMBD,
        "block_count": 2,
        "projection_dim": _N_TEXT,
        "attention.head_count": _N_HEAD,
        **facts,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llava(path: Path, seed: int = 0, n_text: int = _N_TEXT, patch: int = _PATCH) -> Path:
    """LLaVA's: a cell for each patch of 16 x 16 pixels. `n_text`: width of the model."""
    weights, n_patches = Weights(seed), (16 // patch) ** 2
    tensors = {
        "v.class_embd": weights.normal("class", _N_EMBD, deviation=1.0),
        "v.position_embd.weight": weights.normal("position", n_patches + 1, _N_EMBD, deviation=0.5),
        "v.pre_ln.weight": np.ones(_N_EMBD, np.float32),
        "v.pre_ln.bias": np.zeros(_N_EMBD, np.float32),
        **_mlp(weights, _N_EMBD, n_text),
    }
    return _written(path, "mlp", tensors, weights, patch_size=patch)


def write_gemma3(path: Path, seed: int = 0) -> Path:
    """Gemma 3's: 16 cells, which all see each other."""
    weights = Weights(seed)
    tensors = {
        "v.patch_embd.bias": np.zeros(_N_EMBD, np.float32),
        "v.position_embd.weight": weights.normal("position", 64, _N_EMBD, deviation=0.5),
        "v.post_ln.weight": np.ones(_N_EMBD, np.float32),
        "v.post_ln.bias": np.zeros(_N_EMBD, np.float32),
        "mm.input_projection.weight": weights.matrix("mm", _N_EMBD, _N_TEXT),
        "mm.soft_emb_norm.weight": np.ones(_N_EMBD, np.float32),
    }
    facts = {"image_size": 32, "projector.scale_factor": 2}
    return _written(path, "gemma3", tensors, weights, **facts)


def write_qwen2vl(path: Path, seed: int = 0) -> Path:
    """Qwen2-VL's: a cell for each 8 x 8 pixels, with positions by row and column."""
    weights = Weights(seed)
    shape = (_N_EMBD, 3, _PATCH, _PATCH)
    tensors = {
        "v.patch_embd.weight.1": weights.normal("patch 1", *shape, deviation=0.3),
        "v.post_ln.weight": np.ones(_N_EMBD, np.float32),
        "v.post_ln.bias": np.zeros(_N_EMBD, np.float32),
        **_mlp(weights, 4 * _N_EMBD, _N_TEXT),
    }
    return _written(path, "qwen2vl_merger", tensors, weights)


def write_qwen3vl(path: Path, seed: int = 0) -> Path:
    """Qwen3-VL's, without deepstack, as for Qwen 3.5."""
    weights = Weights(seed)
    shape = (_N_EMBD, 3, _PATCH, _PATCH)
    tensors = {
        "v.patch_embd.weight.1": weights.normal("patch 1", *shape, deviation=0.3),
        "v.patch_embd.bias": np.zeros(_N_EMBD, np.float32),
        "v.position_embd.weight": weights.normal("position", 16, _N_EMBD, deviation=0.5),
        "v.post_ln.weight": np.ones(_N_EMBD, np.float32),
        "v.post_ln.bias": np.zeros(_N_EMBD, np.float32),
        **_mlp(weights, 4 * _N_EMBD, _N_TEXT),
    }
    return _written(path, "qwen3vl_merger", tensors, weights, fused=True)


def _mlp(weights: Weights, n_in: int, n_out: int) -> Tensors:
    return {
        "mm.0.weight": weights.matrix("mm.0", n_in, n_in),
        "mm.0.bias": np.zeros(n_in, np.float32),
        "mm.2.weight": weights.matrix("mm.2", n_out, n_in, gain=2.0),
        "mm.2.bias": np.zeros(n_out, np.float32),
    }


def write_qwen2vl_model(path: Path, *, n_layer: int = 2, **how: Any) -> Path:
    """A Qwen2-VL: positions of three dimensions."""

    def add(weights: Weights, tensors: Tensors) -> None:
        tensors |= weights.llama_layers(_N_TEXT, n_layer)
        n_kv = _N_TEXT // tiny.N_HEAD * tiny.N_HEAD_KV
        for i in range(n_layer):
            for name, n in (("q", _N_TEXT), ("k", n_kv), ("v", n_kv)):
                tensors[f"blk.{i}.attn_{name}.bias"] = np.zeros(n, np.float32)

    facts = {"rope.dimension_sections": [2, 1, 1, 0]}
    return tiny.write_random(path, "qwen2vl", add, facts, n_layer=n_layer, **how)


# The projector, and the model that it is for, by the projector's type.
PAIRS: dict[str, tuple[Callable[..., Path], Callable[..., Path]]] = {
    "mlp": (write_llava, tiny.write_llama),
    "gemma3": (write_gemma3, tiny.write_swa),
    "qwen2vl_merger": (write_qwen2vl, write_qwen2vl_model),
    "qwen3vl_merger": (write_qwen3vl, tiny.write_qwen35),
}


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
