"""Tiny random models of the kinds that read images, each with its projector."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import tiny_projectors as projectors
from tiny_file import N_HEAD, N_HEAD_KV, Tensors, Weights, norms
from tiny_vocab import Vocab

_N_EMBD = 32
_HEAD = _N_EMBD // N_HEAD


def _with_marks(vocab: Vocab) -> Vocab:
    """With the tokens that libmtmd looks up, and puts around images."""
    marks = ["\n\n", "<fake_token_around_image>", "<global-img>", "<image>", "</image>", "<slice>"]
    marks += ["</slice>", "<|img_thumbnail|>", "<|vision_start|>", "<|vision_end|>", "[IMG_END]"]
    for mark in marks:
        vocab = vocab.with_token(mark, gguf.TokenType.CONTROL)
    return vocab


VOCAB = _with_marks(tiny.SPM)


def _random(
    path: Path,
    architecture: str,
    layer: Callable[[Weights, int], Tensors],
    facts: dict[str, Any] | None = None,
    *,
    n_embd: int = _N_EMBD,
    n_layer: int = 2,
    ends: Callable[[Weights, Tensors], None] | None = None,
) -> Path:
    def add(weights: Weights, tensors: Tensors) -> None:
        for i in range(n_layer):
            tensors |= layer(weights, i)
        if ends is not None:
            ends(weights, tensors)

    how: Any = {"n_embd": n_embd, "n_layer": n_layer, "n_ctx_train": 2048, "vocab": VOCAB}
    return tiny.write_random(path, architecture, add, facts or {}, **how)


def write_llama(path: Path, n_embd: int = _N_EMBD) -> Path:
    return tiny.write_llama(path, n_embd=n_embd, vocab=VOCAB, n_ctx_train=2048)


def write_qwen35(path: Path) -> Path:
    return tiny.write_qwen35(path, vocab=VOCAB, n_ctx_train=2048)


def write_qwen2vl(path: Path) -> Path:
    return projectors.write_qwen2vl_model(path, vocab=VOCAB, n_ctx_train=2048)


def write_mistral3(path: Path) -> Path:
    return _random(path, "mistral3", _llama_layer)


def write_qwen3vl(path: Path) -> Path:
    """A Qwen3-VL of three layers; the first two add a part of an image's embeddings."""

    def layer(weights: Weights, i: int) -> Tensors:
        return _llama_layer(weights, i) | norms(f"blk.{i}", _HEAD, "attn_q_norm", "attn_k_norm")

    facts = {"rope.dimension_sections": [2, 1, 1, 0], "n_deepstack_layers": 2}
    return _random(path, "qwen3vl", layer, facts, n_layer=3)


def write_llama4(path: Path) -> Path:
    """A Llama 4 of four layers, the last of which has no positions."""
    n, n_ff = _N_EMBD, _N_EMBD // 2

    def layer(weights: Weights, i: int) -> Tensors:
        prefix = f"blk.{i}"
        tensors = norms(prefix, n, "attn_norm", "ffn_norm") | weights.attention(prefix, n)
        tensors |= weights.matrices(
            prefix,
            ffn_gate_inp=(2, n, 1.0),
            ffn_gate_shexp=(n_ff, n, 1.0),
            ffn_up_shexp=(n_ff, n, 1.0),
            ffn_down_shexp=(n, n_ff, 2.0),
        )
        for name, shape in (("gate", (2, n_ff, n)), ("up", (2, n_ff, n)), ("down", (2, n, n_ff))):
            full = f"{prefix}.ffn_{name}_exps.weight"
            tensors[full] = weights.normal(full, *shape, deviation=2 / np.sqrt(shape[-1]))
        return tensors

    facts = {
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": n_ff,
        "interleave_moe_layer_step": 1,
    }
    return _random(path, "llama4", layer, facts, n_layer=4)


def write_lfm2(path: Path) -> Path:
    """An LFM2 of three layers: short convolution, attention, short convolution."""
    n = _N_EMBD

    def layer(weights: Weights, i: int) -> Tensors:
        prefix = f"blk.{i}"
        tensors = norms(prefix, n, "attn_norm") | weights.feed_forward(prefix, n)
        if i == 1:
            tensors |= norms(prefix, _HEAD, "attn_q_norm", "attn_k_norm")
            return tensors | weights.attention(prefix, n)
        shapes = {"in_proj": (3 * n, n, 1.5), "out_proj": (n, n, 1.5), "conv": (n, 3, 1.5)}
        return tensors | weights.matrices(f"{prefix}.shortconv", **shapes)

    def ends(_: Weights, tensors: Tensors) -> None:
        tensors["token_embd_norm.weight"] = tensors.pop("output_norm.weight")

    facts = {"attention.head_count_kv": [0, N_HEAD_KV, 0], "shortconv.l_cache": 3}
    return _random(path, "lfm2", layer, facts, n_layer=3, ends=ends)


def write_gemma4(path: Path, n_embd: int = _N_EMBD) -> Path:
    """A Gemma 4 of two layers, the first with a window of 16; with embeddings for each layer."""
    n_heads, n_kv, n_ff, n_own = N_HEAD * _HEAD, N_HEAD_KV * _HEAD, 64, 8

    def layer(weights: Weights, i: int) -> Tensors:
        prefix = f"blk.{i}"
        names = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "post_norm")
        return {
            **norms(prefix, n_embd, *names),
            **norms(prefix, _HEAD, "attn_q_norm", "attn_k_norm"),
            **weights.matrices(
                prefix,
                attn_q=(n_heads, n_embd, 1.5),
                attn_k=(n_kv, n_embd, 1.5),
                attn_v=(n_kv, n_embd, 2.0),
                attn_output=(n_embd, n_heads, 2.0),
                ffn_gate=(n_ff, n_embd, 1.0),
                ffn_up=(n_ff, n_embd, 1.0),
                ffn_down=(n_embd, n_ff, 2.0),
                inp_gate=(n_own, n_embd, 1.0),
                proj=(n_embd, n_own, 1.0),
            ),
        }

    def ends(weights: Weights, tensors: Tensors) -> None:
        tensors["token_embd.weight"] /= np.float32(np.sqrt(n_embd))  # Gemma multiplies by that
        tensors["rope_freqs.weight"] = np.ones(_HEAD // 2, np.float32)
        tensors["per_layer_token_embd.weight"] = weights.matrix("own", len(VOCAB), 2 * n_own)
        tensors["per_layer_model_proj.weight"] = weights.matrix("own proj", 2 * n_own, n_embd)
        tensors["per_layer_proj_norm.weight"] = np.ones(n_own, np.float32)

    facts = {
        "feed_forward_length": n_ff,
        **{
            f"attention.{of}_length{kind}": _HEAD
            for of in ("key", "value")
            for kind in ("", "_swa")
        },
        "rope.dimension_count": _HEAD,
        "rope.dimension_count_swa": _HEAD,
        "embedding_length_per_layer_input": n_own,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True, False],
    }
    return _random(path, "gemma4", layer, facts, n_embd=n_embd, ends=ends)


def _llama_layer(weights: Weights, i: int) -> Tensors:
    return weights.llama_layer(f"blk.{i}", _N_EMBD)


# The projector, and the model that it is for, by the projector's type and what else it needs.
KINDS: dict[str, tuple[Callable[..., Path], Callable[..., Path]]] = projectors.PAIRS | {
    "llava-next": (projectors.write_llava_next, write_llama),
    "gemma4v": (projectors.write_gemma4, write_gemma4),
    "gemma4v causal": (
        partial(projectors.write_gemma4, n_text=1536),
        partial(write_gemma4, n_embd=1536),
    ),
    "gemma4uv": (projectors.write_gemma4_unified, write_gemma4),
    "qwen2.5vl_merger": (projectors.write_qwen25vl, write_qwen2vl),
    "qwen3vl_merger deepstack": (
        partial(projectors.write_qwen3vl, deepstack=(0, 1)),
        write_qwen3vl,
    ),
    "pixtral": (projectors.write_pixtral, write_mistral3),
    "internvl": (projectors.write_internvl, write_llama),
    "idefics3": (projectors.write_idefics3, write_llama),
    "llama4": (projectors.write_llama4, write_llama4),
    "resampler": (projectors.write_minicpmv, partial(write_llama, n_embd=128)),
    "minicpmv4_6": (projectors.write_minicpmv46, write_qwen35),
    "lfm2": (projectors.write_lfm2, write_lfm2),
    "lfm2 tiles": (partial(projectors.write_lfm2, patch=16), write_lfm2),
}
_SIZES = {"lfm2 tiles": (1088, 544)}


def image_for(kind: str) -> bytes:
    """An image that a projector reads in parts, if it does so at all."""
    return projectors.png(*_SIZES.get(kind, (40, 24)))
