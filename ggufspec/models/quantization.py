"""Computes the header of a model from its dimensions, with llama-quantize's choice of types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggufspec.common.reading import read_toml
from ggufspec.errors import ModelError
from ggufspec.models.gguf_file import QUANTIZATIONS, TYPES, Tensor, layer_of
from ggufspec.models.header import Header
from ggufspec.models.registry import Dimensions

_Shaped = tuple[str, tuple[int, ...]]  # the innermost dimension first, as in a GGUF file


@dataclass(frozen=True)
class Architecture:
    """How the tensors of an architecture differ from those of the Llama family."""

    is_gated: bool = True  # three feed-forward matrices; else two, biases of all, and LayerNorm
    has_query_biases: bool = False
    has_query_norms: bool = False
    has_positions: bool = False  # learned position embeddings
    has_embedding_norm: bool = False
    has_post_norms: bool = False  # after attention and after the feed-forward network
    has_sinks: bool = False  # attention sinks: a logit per head
    has_all_biases: bool = False  # also of attention output, router, experts
    has_choice_biases: bool = False  # added to router probabilities, to choose experts
    ffn_norm: str = "ffn_norm"  # the norm before the feed-forward network


ARCHITECTURES = {
    name: Architecture(**how)
    for name, how in read_toml(Path(__file__).with_name("architectures.toml"))["tensors"].items()
}


def shapes_of(of: Dimensions) -> Iterator[_Shaped]:
    """Yields all tensors in the order of the file; unknown architectures are treated as Llama."""
    kind = ARCHITECTURES.get(of.architecture, Architecture())
    yield "token_embd.weight", (of.n_embd, of.n_vocab)
    if kind.has_positions:
        yield "position_embd.weight", (of.n_embd, of.n_ctx)
    if kind.has_embedding_norm:
        yield from _norm("token_embd_norm", of.n_embd, kind)
    for layer in range(of.n_layers):
        for name, shape in (*_attention(of, kind), *_feed_forward(of, kind, layer)):
            yield f"blk.{layer}.{name}", shape
    yield from _norm("output_norm", of.n_embd, kind)
    if not of.tied:
        yield "output.weight", (of.n_embd, of.n_vocab)


def n_params_of(of: Dimensions) -> int:
    return sum(math.prod(shape) for _, shape in shapes_of(of))


def _norm(name: str, width: int, kind: Architecture) -> Iterator[_Shaped]:
    yield f"{name}.weight", (width,)
    if not kind.is_gated:
        yield f"{name}.bias", (width,)


def _attention(of: Dimensions, kind: Architecture) -> Iterator[_Shaped]:
    n_queries, n_keys = (n * of.n_embd_head for n in (of.n_heads, of.n_heads_kv))
    yield from _norm("attn_norm", of.n_embd, kind)
    if kind.is_gated:
        for name, width in (("attn_q", n_queries), ("attn_k", n_keys), ("attn_v", n_keys)):
            yield f"{name}.weight", (of.n_embd, width)
            if kind.has_query_biases:
                yield f"{name}.bias", (width,)
        if kind.has_query_norms:
            yield "attn_q_norm.weight", (of.n_embd_head,)
            yield "attn_k_norm.weight", (of.n_embd_head,)
    else:
        yield "attn_qkv.weight", (of.n_embd, n_queries + 2 * n_keys)
        yield "attn_qkv.bias", (n_queries + 2 * n_keys,)
    yield "attn_output.weight", (n_queries, of.n_embd)
    if kind.has_all_biases or not kind.is_gated:
        yield "attn_output.bias", (of.n_embd,)
    if kind.has_sinks:
        yield "attn_sinks.weight", (of.n_heads,)
    if kind.has_post_norms:
        yield "post_attention_norm.weight", (of.n_embd,)


def _feed_forward(of: Dimensions, kind: Architecture, layer: int) -> Iterator[_Shaped]:
    yield from _norm(kind.ffn_norm, of.n_embd, kind)
    if of.n_experts and layer >= (of.n_dense_layers or 0):
        yield from _experts(of, of.n_experts, kind)
        return
    n_ff = of.n_ff_dense or of.n_ff
    if kind.is_gated:
        yield "ffn_gate.weight", (of.n_embd, n_ff)
    for name, n_in, n_out in (("ffn_up", of.n_embd, n_ff), ("ffn_down", n_ff, of.n_embd)):
        yield f"{name}.weight", (n_in, n_out)
        if not kind.is_gated:
            yield f"{name}.bias", (n_out,)
    if kind.has_post_norms:
        yield "post_ffw_norm.weight", (of.n_embd,)


def _experts(of: Dimensions, n_experts: int, kind: Architecture) -> Iterator[_Shaped]:
    sides = {"gate": (of.n_embd, of.n_ff), "up": (of.n_embd, of.n_ff), "down": (of.n_ff, of.n_embd)}
    yield "ffn_gate_inp.weight", (of.n_embd, n_experts)
    if kind.has_all_biases:
        yield "ffn_gate_inp.bias", (n_experts,)
    if kind.has_choice_biases:
        yield "exp_probs_b.bias", (n_experts,)
    for name, (n_in, n_out) in sides.items():
        yield f"ffn_{name}_exps.weight", (n_in, n_out, n_experts)
        if kind.has_all_biases:
            yield f"ffn_{name}_exps.bias", (n_out, n_experts)
    if n_shared := of.n_experts_shared:
        width = n_shared * of.n_ff
        yield "ffn_gate_shexp.weight", (of.n_embd, width)
        yield "ffn_up_shexp.weight", (of.n_embd, width)
        yield "ffn_down_shexp.weight", (width, of.n_embd)


# Names of quantizations: (llama_ftype, the type of most tensors).
FILE_TYPES = {
    name: (QUANTIZATIONS.index(name), re.sub("_([SML]|MOE)$", "", name))
    for name in (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S"),
        *("Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
        "MXFP4_MOE",
    )
}
_OTHER_NAMES = {"FP16": "F16", "FP32": "F32", "MXFP4": "MXFP4_MOE"}
_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")  # never quantized
_FEW_EXPERTS = 8  # Mixtral's, for which llama-quantize has special rules
_LAYERS_OF_70B = 80
_EPSILON = 1e-5
_GEMMA_4B_WIDTH = 2560  # smaller models of Gemma 3 have a smaller window
_GPT_OSS_WINDOW = 128
_SIGMOID = 2  # llama_expert_gating_func_type


def header_of(name: str, of: Dimensions, quantization: str) -> Header:
    """The header of a model of these dimensions, with the types that llama-quantize would choose.

    `quantization`: as file names spell it. Raises ModelError for one that is not supported.
    """
    mix = _OTHER_NAMES.get(quantization.upper(), quantization.upper())
    if mix not in FILE_TYPES:
        raise ModelError(
            f"{name} is quantized as {quantization or 'nothing'}, whose types of tensors are not "
            f"known; supported are {', '.join(FILE_TYPES)}"
        )
    values: dict[str, Any] = {
        "context_length": of.n_ctx,
        "embedding_length": of.n_embd,
        "block_count": of.n_layers,
        "feed_forward_length": of.n_ff_dense or of.n_ff,
        "attention.head_count": of.n_heads,
        "attention.head_count_kv": of.n_heads_kv,
        "expert_count": of.n_experts,
        "expert_shared_count": of.n_experts_shared,
        "leading_dense_block_count": of.n_dense_layers,
    }
    if ARCHITECTURES.get(of.architecture, Architecture()).is_gated:
        values["attention.key_length"] = values["attention.value_length"] = of.n_embd_head
        values["rope.dimension_count"] = of.n_embd_head
        values["attention.layer_norm_rms_epsilon"] = _EPSILON
    else:
        values["attention.layer_norm_epsilon"] = _EPSILON
    if of.architecture == "gemma3":
        values["attention.sliding_window"] = 512 if of.n_embd < _GEMMA_4B_WIDTH else 1024
    elif of.architecture == "gpt-oss":
        values["attention.sliding_window"] = _GPT_OSS_WINDOW
    elif of.architecture == "glm4moe":
        values["rope.dimension_count"] = of.n_embd_head // 2
        values["expert_gating_func"] = _SIGMOID
        values["expert_weights_norm"] = True
    if of.n_experts:
        values["expert_used_count"] = of.n_experts_used or 1
        values["expert_feed_forward_length"] = of.n_ff
    named = {f"{of.architecture}.{key}": value for key, value in values.items() if value}
    named |= {"general.architecture": of.architecture, "general.name": name}
    named["general.file_type"] = FILE_TYPES[mix][0]
    return Header((), 0, named, tensors_of(of, mix))


def tensors_of(of: Dimensions, quantization: str) -> tuple[Tensor, ...]:
    """All tensors of a model; `quantization` is a key of FILE_TYPES."""
    return tuple(
        Tensor(name, shape, _type(name, shape, quantization, of)) for name, shape in shapes_of(of)
    )


def _type(name: str, shape: tuple[int, ...], mix: str, of: Dimensions) -> str:
    base = FILE_TYPES[mix][1]
    if len(shape) < 2 or not name.endswith("weight") or name.endswith(_KEPT) or base == "F32":
        return "F32"
    if base in ("F16", "BF16"):
        return base
    kind = _chosen(name, shape[0], mix, base, of)
    if shape[0] % TYPES[kind].n_values:
        kind = _FALLBACKS.get(kind, "F16")
    return "F16" if shape[0] % TYPES[kind].n_values else kind


def _chosen(name: str, n_columns: int, mix: str, base: str, of: Dimensions) -> str:
    if base == "MXFP4":
        return base if "_exps." in name else "Q8_0"
    if name == "output.weight" or (name == "token_embd.weight" and of.tied):
        return "Q8_0" if base == "Q8_0" or n_columns % TYPES[base].n_values else "Q6_K"
    if (layer := layer_of(name)) is None:
        return base
    if "attn_v." in name or "attn_qkv." in name:
        return _of_values(layer, mix, base, of)
    if "ffn_down" in name:
        return _of_down(layer, mix, base, of)
    if "attn_output." in name:
        if of.n_experts == _FEW_EXPERTS:
            is_raised = mix in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
            return "Q5_K" if is_raised else base
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, base)
    if "attn_k." in name and of.n_experts == _FEW_EXPERTS:
        return "Q8_0"
    return base


def _of_values(layer: int, mix: str, base: str, of: Dimensions) -> str:
    q2_k = "Q4_K" if of.n_heads // of.n_heads_kv >= 4 else "Q3_K"
    kind = {"Q2_K": q2_k, "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, base)
    if (mix == "Q3_K_M" and layer < 2) or (mix == "Q4_K_S" and layer < 4):
        kind = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, of.n_layers):
        kind = "Q6_K"
    is_shared = of.architecture == "qwen2" or of.n_heads != of.n_heads_kv
    if of.n_layers == _LAYERS_OF_70B and is_shared and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if of.n_experts == _FEW_EXPERTS else kind


def _of_down(layer: int, mix: str, base: str, of: Dimensions) -> str:
    n = of.n_layers
    if mix == "Q3_K_M":
        return "Q5_K" if layer < n // 16 else "Q4_K"
    if mix in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, n):
        return "Q6_K"
    if mix == "Q4_K_S" and layer < n // 8:
        return "Q5_K"
    return {"Q2_K": "Q3_K", "Q3_K_L": "Q5_K"}.get(mix, base)


def _more_bits(layer: int, n: int) -> bool:
    """Whether a layer is in the first or last eighth, or is every third one between them."""
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2
