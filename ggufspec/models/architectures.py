"""Names and shapes of the tensors of a model, by its architecture and its dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ggufspec.models.registry import Dimensions

Named = tuple[str, tuple[int, ...]]  # the innermost dimension first, as in a GGUF file


@dataclass(frozen=True)
class Architecture:
    """How the tensors of an architecture differ from those of the Llama family.

    is_gated: the feed-forward network has three matrices; otherwise it has two, every matrix has a
    bias, and norms are LayerNorm.
    """

    is_gated: bool = True
    has_query_biases: bool = False
    has_query_norms: bool = False
    has_positions: bool = False  # learned position embeddings
    has_embedding_norm: bool = False
    has_post_norms: bool = False  # after attention and after the feed-forward network


# Stand-ins of each of them are loaded and run by the tests.
ARCHITECTURES = {
    "llama": Architecture(),
    "qwen2": Architecture(has_query_biases=True),
    "qwen3": Architecture(has_query_norms=True),
    "qwen3moe": Architecture(has_query_norms=True),
    "gemma2": Architecture(has_post_norms=True),
    "gemma3": Architecture(has_query_norms=True, has_post_norms=True),
    "gpt2": Architecture(is_gated=False, has_positions=True),
    "bloom": Architecture(is_gated=False, has_embedding_norm=True),
}


def shapes_of(of: Dimensions) -> Iterator[Named]:
    """All tensors in the order of the file; unknown architectures are taken for Llama's."""
    kind = ARCHITECTURES.get(of.architecture, Architecture())
    yield "token_embd.weight", (of.n_embd, of.n_vocab)
    if kind.has_positions:
        yield "position_embd.weight", (of.n_embd, of.n_ctx)
    if kind.has_embedding_norm:
        yield from _norm("token_embd_norm", of.n_embd, kind)
    for layer in range(of.n_layers):
        for name, shape in (*_attention(of, kind), *_feed_forward(of, kind)):
            yield f"blk.{layer}.{name}", shape
    yield from _norm("output_norm", of.n_embd, kind)
    if not of.tied:
        yield "output.weight", (of.n_embd, of.n_vocab)


def n_params_of(of: Dimensions) -> int:
    return sum(math.prod(shape) for _, shape in shapes_of(of))


def _norm(name: str, width: int, kind: Architecture) -> Iterator[Named]:
    yield f"{name}.weight", (width,)
    if not kind.is_gated:
        yield f"{name}.bias", (width,)


def _attention(of: Dimensions, kind: Architecture) -> Iterator[Named]:
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
    if not kind.is_gated:
        yield "attn_output.bias", (of.n_embd,)
    if kind.has_post_norms:
        yield "post_attention_norm.weight", (of.n_embd,)


def _feed_forward(of: Dimensions, kind: Architecture) -> Iterator[Named]:
    yield from _norm("ffn_norm", of.n_embd, kind)
    if of.n_experts:
        yield "ffn_gate_inp.weight", (of.n_embd, of.n_experts)
        yield "ffn_gate_exps.weight", (of.n_embd, of.n_ff, of.n_experts)
        yield "ffn_up_exps.weight", (of.n_embd, of.n_ff, of.n_experts)
        yield "ffn_down_exps.weight", (of.n_ff, of.n_embd, of.n_experts)
        return
    if kind.is_gated:
        yield "ffn_gate.weight", (of.n_embd, of.n_ff)
    for name, n_in, n_out in (("ffn_up", of.n_embd, of.n_ff), ("ffn_down", of.n_ff, of.n_embd)):
        yield f"{name}.weight", (n_in, n_out)
        if not kind.is_gated:
            yield f"{name}.bias", (n_out,)
    if kind.has_post_norms:
        yield "post_ffw_norm.weight", (of.n_embd,)
