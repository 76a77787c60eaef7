"""Writes tiny random projectors for tiny models, and images for them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from tiny_file import Header, Tensors, Weights, write_gguf

_N_EMBD, _N_HEAD, _PATCH = 32, 2, 4  # of the vision tower
_N_TEXT = 32  # width of the model
_HALVED = {"vision.projector.scale_factor": 2}  # a cell for each 2 x 2 patches


def _layer(weights: Weights, prefix: str, *, fused: bool) -> Tensors:
    n = _N_EMBD
    shapes = {"attn_out": (n, n), "ffn_up": (2 * n, n), "ffn_down": (n, 2 * n)}
    shapes |= {"attn_qkv": (3 * n, n)} if fused else {f"attn_{of}": (n, n) for of in "qkv"}
    tensors: Tensors = _norm(f"{prefix}.ln1") | _norm(f"{prefix}.ln2")
    for name, (n_out, n_in) in shapes.items():
        full = f"{prefix}.{name}"
        tensors[f"{full}.weight"] = weights.matrix(full, n_out, n_in)
        tensors[f"{full}.bias"] = weights.normal(f"{full}.bias", n_out, deviation=0.1)
    return tensors


def _written(
    path: Path,
    kind: str,
    tensors: Tensors,
    weights: Weights,
    facts: Header | None = None,
    *,
    fused: bool = False,
    patch: int = _PATCH,
) -> Path:
    shape = (_N_EMBD, 3, patch, patch)
    tensors.setdefault("v.patch_embd.weight", weights.normal("patch", *shape, deviation=0.3))
    for i in range(2):
        tensors |= _layer(weights, f"v.blk.{i}", fused=fused)
    vision = {
        "image_size": 4 * patch,
        "patch_size": patch,
        "embedding_length": _N_EMBD,
        "feed_forward_length": 2 * _N_EMBD,
        "block_count": 2,
        "projection_dim": _N_TEXT,
        "attention.head_count": _N_HEAD,
        "attention.layer_norm_epsilon": 1e-5,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    header: Header = {
        "has_vision_encoder": True,
        "projector_type": kind,
        "use_gelu": True,
        **{f"vision.{name}": fact for name, fact in vision.items()},
        **(facts or {}),
    }
    return write_gguf(path, "clip", header, None, tensors)


def write_llava(
    path: Path,
    seed: int = 0,
    n_text: int = _N_TEXT,
    patch: int = _PATCH,
    facts: Header | None = None,
) -> Path:
    """LLaVA's: a cell for each patch of 16 x 16 pixels. `n_text`: width of the model."""
    weights = Weights(seed)
    tensors = {
        "v.class_embd": weights.normal("class", _N_EMBD, deviation=1.0),
        **_positions(weights, (16 // patch) ** 2 + 1),
        **_norm("v.pre_ln"),
        **_mlp(weights, _N_EMBD, n_text),
    }
    facts = {"vision.image_size": 16, **(facts or {})}
    return _written(path, "mlp", tensors, weights, facts, patch=patch)


def write_llava_next(path: Path) -> Path:
    """LLaVA-NeXT's: 16 cells for each of several parts of an image, without tokens between them."""
    return write_llava(path, facts={"vision.image_grid_pinpoints": [32, 16, 16, 32, 32, 32]})


def write_gemma3(path: Path, seed: int = 0) -> Path:
    """Gemma 3's: 16 cells, which all see each other."""
    weights = Weights(seed)
    tensors = {
        "v.patch_embd.bias": np.zeros(_N_EMBD, np.float32),
        **_positions(weights, 64),
        **_norm("v.post_ln"),
        "mm.input_projection.weight": weights.matrix("mm", _N_EMBD, _N_TEXT),
        "mm.soft_emb_norm.weight": np.ones(_N_EMBD, np.float32),
    }
    return _written(path, "gemma3", tensors, weights, _HALVED | {"vision.image_size": 32})


def write_gemma4(path: Path, n_text: int = _N_TEXT) -> Path:
    """Gemma 4's: at least 70 cells, which see each other, but for models of a width of 1,536."""
    weights = Weights()
    tensors = {
        "v.position_embd.weight": weights.normal("position", 2, 64, _N_EMBD, deviation=0.5),
        "mm.input_projection.weight": weights.matrix("mm", n_text, _N_EMBD),
    }
    return _written(path, "gemma4v", tensors, weights, _HALVED)


def write_gemma4_unified(path: Path) -> Path:
    """That of Gemma 4's models without a vision tower of their own."""
    weights, n_patch = Weights(), 3 * (2 * _PATCH) ** 2
    tensors = {
        "v.patch_embd.weight": weights.matrix("patch", _N_EMBD, n_patch),
        "v.patch_embd.bias": np.zeros(_N_EMBD, np.float32),
        "v.position_embd.weight": weights.normal("position", 2, 64, _N_EMBD, deviation=0.5),
        **_norm("v.patch_norm.1", n_patch),
        **_norm("v.patch_norm.2"),
        **_norm("v.patch_norm.3"),
        "mm.input_projection.weight": weights.matrix("mm", _N_TEXT, _N_EMBD),
    }
    return _written(path, "gemma4uv", tensors, weights, _HALVED)


def write_qwen2vl(
    path: Path,
    seed: int = 0,
    *,
    kind: str = "qwen2vl_merger",
    facts: Header | None = None,
    patch: int = _PATCH,
) -> Path:
    """Qwen2-VL's: a cell for each 2 x 2 patches, with positions by row and column."""
    weights = Weights(seed)
    shape = (_N_EMBD, 3, patch, patch)
    tensors = {
        "v.patch_embd.weight.1": weights.normal("patch 1", *shape, deviation=0.3),
        **_norm("v.post_ln"),
        **_mlp(weights, 4 * _N_EMBD, _N_TEXT),
    }
    return _written(path, kind, tensors, weights, facts, patch=patch)


def write_qwen25vl(path: Path) -> Path:
    """Qwen2.5-VL's: every second layer sees windows of 2 x 2 cells."""
    facts = {"vision.n_wa_pattern": 2}
    return write_qwen2vl(path, kind="qwen2.5vl_merger", facts=facts, patch=28)


def write_qwen3vl(path: Path, seed: int = 0, deepstack: Iterable[int] = ()) -> Path:
    """Qwen3-VL's; without deepstack, as for Qwen 3.5.

    `deepstack`: layers whose states widen the embeddings, for the model's first layers.
    """
    weights, n = Weights(seed), 4 * _N_EMBD
    shape = (_N_EMBD, 3, _PATCH, _PATCH)
    tensors = {
        "v.patch_embd.weight.1": weights.normal("patch 1", *shape, deviation=0.3),
        "v.patch_embd.bias": np.zeros(_N_EMBD, np.float32),
        **_positions(weights, 16),
        **_norm("v.post_ln"),
        **_mlp(weights, n, _N_TEXT),
    }
    for i in deepstack:
        tensors |= _norm(f"v.deepstack.{i}.norm", n)
        tensors |= _linear(weights, f"v.deepstack.{i}.fc1", n, n)
        tensors |= _linear(weights, f"v.deepstack.{i}.fc2", _N_TEXT, n, gain=2.0)
    return _written(path, "qwen3vl_merger", tensors, weights, fused=True)


def write_pixtral(path: Path) -> Path:
    """Mistral Small's: a cell for each 8 x 8 pixels, and one more between rows."""
    weights, n = Weights(), _N_EMBD
    tensors = {
        "v.pre_ln.weight": np.ones(n, np.float32),
        "v.token_embd.img_break": weights.normal("break", _N_TEXT, deviation=1.0),
        "mm.input_norm.weight": np.ones(n, np.float32),
        "mm.patch_merger.weight": weights.matrix("merger", n, 4 * n),
        **_linear(weights, "mm.1", n, n),
        **_linear(weights, "mm.2", _N_TEXT, n, gain=2.0),
    }
    return _written(path, "pixtral", tensors, weights, {"vision.spatial_merge_size": 2})


def write_idefics3(path: Path) -> Path:
    """SmolVLM's: four cells for each tile of 16 x 16 pixels, and for the whole image."""
    weights = Weights()
    tensors = {
        **_positions(weights, 16),
        "mm.model.fc.weight": weights.matrix("fc", _N_TEXT, 4 * _N_EMBD, gain=2.0),
    }
    facts = _HALVED | {"vision.preproc_image_size": 32}
    return _written(path, "idefics3", tensors, weights, facts)


def write_internvl(path: Path) -> Path:
    """InternVL's: four cells for each tile, and for the whole image."""
    weights = Weights()
    tensors = {
        "v.class_embd": weights.normal("class", _N_EMBD, deviation=1.0),
        **_positions(weights, 17),
        **_norm("mm.model.mlp.0", 4 * _N_EMBD),
        **_linear(weights, "mm.model.mlp.1", _N_EMBD, 4 * _N_EMBD),
        **_linear(weights, "mm.model.mlp.3", _N_TEXT, _N_EMBD, gain=2.0),
    }
    return _written(path, "internvl", tensors, weights, _HALVED)


def write_llama4(path: Path) -> Path:
    """Llama 4's: four cells for each of at most 9 tiles, and for the whole image."""
    weights, n = Weights(), _N_EMBD
    tensors = {
        "v.patch_embd.weight": weights.matrix("patch", n, 3 * _PATCH**2),
        "v.class_embd": weights.normal("class", n, deviation=1.0),
        **_positions(weights, 17),
        "mm.model.mlp.1.weight": weights.matrix("mlp.1", n, 4 * n, gain=2.0),
        "mm.model.mlp.2.weight": weights.matrix("mlp.2", n, n, gain=2.0),
        "mm.model.fc.weight": weights.matrix("fc", _N_TEXT, n, gain=2.0),
    }
    return _written(path, "llama4", tensors, weights, _HALVED)


def write_minicpmv(path: Path, n_text: int = 128) -> Path:
    """MiniCPM-V 2.6's: eight cells for each part of an image; heads of 128 numbers."""
    weights, n = Weights(), n_text
    tensors = _positions(weights, 70 * 70) | {
        "resampler.pos_embed_k": np.zeros((1, n), np.float32),
        "resampler.query": weights.normal("query", 8, n, deviation=1.0),
        "resampler.proj.weight": weights.matrix("proj", n, n, gain=2.0),
        "resampler.kv.weight": weights.matrix("kv", n, _N_EMBD),
    }
    for name in ("q", "k", "v", "out"):
        tensors |= _linear(weights, f"resampler.attn.{name}", n, n)
    for name in ("q", "kv", "post"):
        tensors |= _norm(f"resampler.ln_{name}", n)
    facts = {"minicpmv_version": np.int32(3), "minicpmv_query_num": 8}
    return _written(path, "resampler", tensors, weights, facts)


def write_minicpmv46(path: Path) -> Path:
    """MiniCPM-V 4.6's: four cells for each part of an image."""
    weights, n = Weights(), 4 * _N_EMBD
    tensors = {
        **_positions(weights, 70 * 70),
        **_norm("v.post_ln"),
        **_norm("mm.input_norm", n),
        **_linear(weights, "mm.up", n, n),
        **_linear(weights, "mm.down", _N_TEXT, n, gain=2.0),
    }
    return _written(path, "minicpmv4_6", tensors, weights, _HALVED)


def write_lfm2(path: Path, patch: int = _PATCH) -> Path:
    """LFM2-VL's: at least 64 cells, and for large images 256 of each tile of 512 x 512 pixels."""
    weights = Weights()
    tensors = {
        **_positions(weights, 16),
        **_norm("mm.input_norm", 4 * _N_EMBD),
        **_linear(weights, "mm.1", _N_EMBD, 4 * _N_EMBD),
        **_linear(weights, "mm.2", _N_TEXT, _N_EMBD, gain=2.0),
    }
    return _written(path, "lfm2", tensors, weights, _HALVED, patch=patch)


def _norm(name: str, n: int = _N_EMBD) -> Tensors:
    return {f"{name}.weight": np.ones(n, np.float32), f"{name}.bias": np.zeros(n, np.float32)}


def _linear(weights: Weights, name: str, n_out: int, n_in: int, gain: float = 1.0) -> Tensors:
    weight = weights.matrix(name, n_out, n_in, gain=gain)
    return {f"{name}.weight": weight, f"{name}.bias": np.zeros(n_out, np.float32)}


def _positions(weights: Weights, n: int) -> Tensors:
    return {"v.position_embd.weight": weights.normal("position", n, _N_EMBD, deviation=0.5)}


def _mlp(weights: Weights, n_in: int, n_out: int) -> Tensors:
    return _linear(weights, "mm.0", n_in, n_in) | _linear(weights, "mm.2", n_out, n_in, gain=2.0)


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
