"""Writes tiny random GGUF files that llama.cpp loads in milliseconds, so tests need no download.

The weights mean nothing, except in the two scripted models, which write a text that the test
chooses. Every tensor is drawn from a generator seeded by (seed, tensor name); so a model with fewer
layers is an early exit of its bigger sibling: a draft that agrees now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_file import (  # noqa: F401
    CHATML,
    F32,
    N_HEAD,
    N_HEAD_KV,
    SSM,
    Header,
    Template,
    Tensors,
    Weights,
    norms,
    transformer,
    write_gguf,
)
from tiny_vocab import (  # noqa: F401
    BPE,
    CODE,
    INFILL_NAMES,
    SILENT,
    SPM,
    WORDS,
    Vocab,
    bpe_vocab,
    spm_vocab,
    wordpiece_vocab,
)

_NOT_GROUPED = {"attention.head_count_kv": N_HEAD, "attention.layer_norm_epsilon": 1e-5}
_NO_ATTENTION = {
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.dimension_count": None,
}


# Models that decode


def write_random(
    path: Path,
    architecture: str,
    add: Callable[[Weights, Tensors], None],
    facts: Header,
    *,
    n_embd: int = 32,
    n_layer: int = 2,
    seed: int = 0,
    perturb: float = 0.0,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
    chat_template: Template = None,
    header: Header | None = None,
) -> Path:
    """A model of random weights; `add` adds its layers. The writers below take these options too.

    `header` overrides or, with None, removes header keys, named without the architecture.
    """
    weights = Weights(seed, perturb)
    tensors = weights.ends(vocab, n_embd, sharpness)
    add(weights, tensors)
    facts = {**transformer(n_embd, n_layer, n_ctx_train), **facts, **(header or {})}
    return write_gguf(path, architecture, facts, vocab, tensors, chat_template)


def write_llama(path: Path, *, n_embd: int = 32, n_layer: int = 2, **how: Any) -> Path:
    def add(weights: Weights, tensors: Tensors) -> None:
        tensors |= weights.llama_layers(n_embd, n_layer)

    facts = {"vocab_size": len(how.get("vocab", SPM))}
    return write_random(path, "llama", add, facts, n_embd=n_embd, n_layer=n_layer, **how)


def write_swa(path: Path, *, n_layer: int = 2, **how: Any) -> Path:
    """A Gemma 3: every second layer sees all tokens, the others the last 16."""
    n_embd = 32

    def add(weights: Weights, tensors: Tensors) -> None:
        tensors["token_embd.weight"] /= np.float32(np.sqrt(n_embd))  # Gemma multiplies by that
        for layer in range(n_layer):
            prefix = f"blk.{layer}"
            tensors |= norms(prefix, n_embd, "post_attention_norm", "post_ffw_norm")
            tensors |= norms(prefix, n_embd // N_HEAD, "attn_q_norm", "attn_k_norm", value=1.5)
            tensors |= weights.llama_layer(prefix, n_embd)

    facts = {"attention.sliding_window": 16, "attention.sliding_window_pattern": 2}
    return write_random(path, "gemma3", add, facts, n_layer=n_layer, **how)


def write_moe(
    path: Path,
    *,
    n_embd: int = 32,
    n_layer: int = 2,
    n_experts: int = 16,
    n_used: int = 2,
    **how: Any,
) -> Path:
    """A mixture of experts, a Qwen 3. Each token has experts of its own."""
    n_ff = n_embd // 2

    def add(weights: Weights, tensors: Tensors) -> None:
        for layer in range(n_layer):
            prefix = f"blk.{layer}"
            tensors |= norms(prefix, n_embd, "attn_norm", "ffn_norm")
            tensors |= norms(prefix, n_embd // N_HEAD, "attn_q_norm", "attn_k_norm")
            tensors |= weights.attention(prefix, n_embd)
            shapes = {
                "ffn_gate_inp": (n_experts, n_embd),
                "ffn_gate_exps": (n_experts, n_ff, n_embd),
                "ffn_up_exps": (n_experts, n_ff, n_embd),
                "ffn_down_exps": (n_experts, n_embd, n_ff),
            }
            for name, shape in shapes.items():
                name = f"{prefix}.{name}.weight"
                tensors[name] = weights.normal(name, *shape, deviation=2 / np.sqrt(shape[-1]))

    facts = {"expert_count": n_experts, "expert_used_count": n_used}
    facts["expert_feed_forward_length"] = n_ff
    return write_random(path, "qwen3moe", add, facts, n_embd=n_embd, n_layer=n_layer, **how)


def write_mamba(path: Path, *, n_layer: int = 2, **how: Any) -> Path:
    """A recurrent model: its memory is a state, from which no tail can be dropped."""
    n_embd = 32

    def add(weights: Weights, tensors: Tensors) -> None:
        for layer in range(n_layer):
            tensors |= norms(f"blk.{layer}", n_embd, "attn_norm")
            tensors |= weights.mamba(f"blk.{layer}", n_embd)

    facts = {**_NO_ATTENTION, "feed_forward_length": 0, "ssm.inner_size": 2 * n_embd, **SSM}
    return write_random(path, "mamba", add, facts, n_layer=n_layer, **how)


def write_rwkv(path: Path, **how: Any) -> Path:
    """An RWKV 7 of one layer: recurrent like Mamba, by another kind of state."""
    n_embd, n_rank = 64, 8  # one head: kernels want 64 wide ones

    def add(weights: Weights, tensors: Tensors) -> None:
        time, channel = "blk.0.time_mix", "blk.0.channel_mix"
        tensors["output_norm.bias"] = np.zeros(n_embd, np.float32)
        for norm in ("token_embd_norm", "blk.0.attn_norm", "blk.0.attn_norm_2"):
            tensors[f"{norm}.weight"] = np.ones(n_embd, np.float32)
            tensors[f"{norm}.bias"] = np.zeros(n_embd, np.float32)
        for gate in "wavg":  # of decay, learning rate, value, output
            into, out = (f"{time}_{gate}{rank}.weight" for rank in (1, 2))
            tensors[into] = weights.matrix(into, n_rank, n_embd)
            tensors[out] = weights.matrix(out, n_embd, n_rank)
            if gate != "g":
                tensors[f"{time}_{gate}0.weight"] = np.full(n_embd, -2.0, np.float32)
        for name in ("key", "value", "receptance", "output"):
            name = f"{time}_{name}.weight"
            tensors[name] = weights.matrix(name, n_embd, n_embd, gain=2.0)
        for name in ("k_k", "k_a", "r_k", "ln"):
            tensors[f"{time}_{name}.weight"] = np.full(n_embd, 0.5, np.float32)
        tensors[f"{time}_ln.bias"] = np.zeros(n_embd, np.float32)
        tensors[f"{time}_lerp_fused.weight"] = np.full((6, 1, 1, n_embd), 0.5, np.float32)
        tensors[f"{channel}_lerp_k.weight"] = np.full((1, 1, n_embd), 0.5, np.float32)
        for name in (f"{channel}_key.weight", f"{channel}_value.weight"):
            tensors[name] = weights.matrix(name, n_embd, n_embd)

    ranks = ("decay", "iclr", "value_residual_mix", "gate")
    facts = {
        **_NO_ATTENTION,
        "feed_forward_length": n_embd,
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": n_embd,
        "token_shift_count": 2,
        **{f"attention.{name}_lora_rank": n_rank for name in ranks},
    }
    return write_random(path, "rwkv7", add, facts, n_embd=n_embd, n_layer=1, **how)


def write_hybrid(path: Path, *, n_embd: int = 32, **how: Any) -> Path:
    """A Jamba of three layers: state, attention, state."""

    def add(weights: Weights, tensors: Tensors) -> None:
        for layer in range(3):
            prefix = f"blk.{layer}"
            tensors |= norms(prefix, n_embd, "attn_norm")
            tensors |= weights.feed_forward(prefix, n_embd)
            if layer == 1:
                tensors |= weights.attention(prefix, n_embd)
                continue
            tensors |= weights.mamba(prefix, n_embd)
            tensors |= norms(prefix, SSM["ssm.time_step_rank"], "ssm_dt_norm")
            tensors |= norms(prefix, SSM["ssm.state_size"], "ssm_b_norm", "ssm_c_norm")

    n_head_kv = [0, N_HEAD_KV, 0]  # none: a state instead of attention
    facts = {"attention.head_count_kv": n_head_kv, "ssm.inner_size": 2 * n_embd, **SSM}
    return write_random(path, "jamba", add, facts, n_layer=3, n_embd=n_embd, **how)


def write_qwen35(path: Path, *, n_embd: int = 32, **how: Any) -> Path:
    """A Qwen 3.5 of three layers: state, attention, state. llama.cpp can roll its states back."""
    n_state, n_keys, n_values = 16, 2, 4  # heads of keys and of values, each of n_state numbers
    n_inner = n_values * n_state
    n_conv = n_inner + 2 * n_keys * n_state

    def add(weights: Weights, tensors: Tensors) -> None:
        for layer in range(3):
            prefix = f"blk.{layer}"
            tensors |= norms(prefix, n_embd, "attn_norm", "post_attention_norm")
            tensors |= weights.feed_forward(prefix, n_embd)
            del tensors[f"{prefix}.ffn_norm.weight"]
            if layer == 1:
                tensors |= weights.attention(prefix, n_embd)
                tensors |= weights.matrices(prefix, attn_q=(2 * n_embd, n_embd, 1.5))  # and gates
                tensors |= norms(prefix, n_embd // N_HEAD, "attn_q_norm", "attn_k_norm")
                continue
            tensors |= weights.matrices(
                prefix,
                attn_qkv=(n_conv, n_embd, 1.5),
                attn_gate=(n_inner, n_embd, 1.5),
                ssm_conv1d=(n_conv, 4, 1.5),
                ssm_alpha=(n_values, n_embd, 1.5),
                ssm_beta=(n_values, n_embd, 1.5),
                ssm_out=(n_embd, n_inner, 1.5),
            )
            tensors |= norms(prefix, n_state, "ssm_norm")
            tensors[f"{prefix}.ssm_dt.bias"] = np.zeros(n_values, np.float32)
            tensors[f"{prefix}.ssm_a"] = -np.linspace(0.02, 0.3, n_values, dtype=np.float32)

    facts = {
        "rope.dimension_sections": [2, 1, 1, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": n_inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": n_values,
        "ssm.group_count": n_keys,
    }
    return write_random(path, "qwen35", add, facts, n_embd=n_embd, n_layer=3, **how)


# Models that write a known text


def write_scripted(
    path: Path,
    token_ids: Sequence[int],
    *,
    then: int | None = None,
    vocab: Vocab = SPM,
    gap: float = 20.0,
    n_ctx_train: int = 256,
    chat_template: str | None = None,
) -> Path:
    """A Llama whose next token depends on the last one only, and is `gap` logits ahead of all.

    After a token of the script comes the next of the script; after its last one comes `then`, or
    else the first; after any other token comes the first. So every prompt that ends outside of the
    script is answered by the script. Raises ValueError if a token would have two successors;
    `write_timed` has no such limit.
    """
    following: dict[int, int] = {}
    for token, after in zip(token_ids, [*token_ids[1:], then], strict=True):
        wanted = token_ids[0] if after is None else after
        if following.setdefault(token, wanted) != wanted:
            raise ValueError(f"token {token} has two successors in the script: use write_timed")
    nexts = [following.get(token, token_ids[0]) for token in range(len(vocab))]
    embeddings, output = _one_hot(nexts, len(vocab))
    n_embd = embeddings.shape[1]
    tensors = {
        "token_embd.weight": embeddings,
        "output_norm.weight": np.ones(n_embd, np.float32),
        "output.weight": output * np.float32(gap / np.sqrt(n_embd)),
        **Weights().llama_layers(n_embd, 1),
    }
    for silenced in ("blk.0.attn_output.weight", "blk.0.ffn_down.weight"):
        tensors[silenced] = np.zeros_like(tensors[silenced])
    facts = transformer(n_embd, 1, n_ctx_train)
    return write_gguf(path, "llama", facts, vocab, tensors, chat_template)


def write_timed(
    path: Path,
    token_ids: Sequence[int],
    *,
    n_prompt: int = 0,
    vocab: Vocab = SPM,
    gap: float = 20.0,
    n_ctx_train: int = 256,
    chat_template: str | None = None,
) -> Path:
    """A GPT-2 whose next token depends on the position only, and is `gap` logits ahead of all.

    Whatever stands before, the token at position `n_prompt + i` is `token_ids[i % len]`: after a
    prompt of `n_prompt` tokens it writes the script, over and over. Tokens may repeat, and another
    script with one id changed is a draft that is refused at exactly that place.
    """
    nexts = [token_ids[(pos + 1 - n_prompt) % len(token_ids)] for pos in range(n_ctx_train)]
    positions, output = _one_hot(nexts, len(vocab))
    n_embd = positions.shape[1]
    tensors = {
        "token_embd.weight": np.zeros((len(vocab), n_embd), np.float32),
        "position_embd.weight": positions,
        "output_norm.weight": np.ones(n_embd, np.float32),
        "output_norm.bias": np.zeros(n_embd, np.float32),
        "output.weight": output * np.float32(gap / np.sqrt(n_embd - 1)),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,),
        "attn_qkv": (3 * n_embd, n_embd),
        "attn_output": (n_embd, n_embd),
        "ffn_norm": (n_embd,),
        "ffn_up": (2 * n_embd, n_embd),
        "ffn_down": (n_embd, 2 * n_embd),
    }
    for name, shape in shapes.items():
        tensors[f"blk.0.{name}.weight"] = np.zeros(shape, np.float32)
        tensors[f"blk.0.{name}.bias"] = np.zeros(shape[0], np.float32)
    facts = transformer(n_embd, 1, n_ctx_train) | _NOT_GROUPED
    return write_gguf(path, "gpt2", facts, vocab, tensors, chat_template)


def _one_hot(nexts: Sequence[int], n_vocab: int) -> tuple[F32, F32]:
    """Rows that name the next token by one dimension, and the output matrix that reads it."""
    dimensions = {token: index for index, token in enumerate(dict.fromkeys(nexts))}
    n_embd = -(-max(32, len(dimensions)) // 32) * 32
    rows = np.zeros((len(nexts), n_embd), np.float32)
    rows[np.arange(len(nexts)), [dimensions[token] for token in nexts]] = 1.0
    output = np.zeros((n_vocab, n_embd), np.float32)
    output[list(dimensions), list(dimensions.values())] = 1.0
    return rows, output


# Files that are no language model


def write_bert(path: Path) -> Path:
    """An embedding model: looks both ways, keeps no memory, writes no logits."""
    weights, vocab, n_embd, n_ctx_train = Weights(), wordpiece_vocab(), 32, 64
    tensors = {
        "token_embd.weight": weights.normal("token", len(vocab), n_embd, deviation=1.0),
        "position_embd.weight": weights.normal("position", n_ctx_train, n_embd, deviation=1.0),
        "token_types.weight": weights.normal("types", 2, n_embd, deviation=1.0),
        "blk.0.ffn_up.weight": weights.matrix("up", 2 * n_embd, n_embd),
        "blk.0.ffn_down.weight": weights.matrix("down", n_embd, 2 * n_embd),
        **weights.attention("blk.0", n_embd, N_HEAD),
    }
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        tensors[f"{norm}.weight"] = np.ones(n_embd, np.float32)
        tensors[f"{norm}.bias"] = np.zeros(n_embd, np.float32)
    pooling = {"attention.causal": False, "pooling_type": int(gguf.PoolingType.MEAN)}
    facts = transformer(n_embd, 1, n_ctx_train) | _NOT_GROUPED | pooling
    return write_gguf(path, "bert", facts, vocab, tensors)


def write_t5_encoder_decoder(path: Path) -> Path:
    """A T5: an encoder must run before its decoder."""
    weights, n_embd, n_buckets = Weights(), 32, 32
    tensors = weights.ends(SPM, n_embd, 3.0)
    tensors["dec.output_norm.weight"] = tensors.pop("output_norm.weight")
    tensors["enc.output_norm.weight"] = np.ones(n_embd, np.float32)
    for side, attentions in (("enc", ["attn"]), ("dec", ["attn", "cross_attn"])):
        layer = f"{side}.blk.0"
        tensors |= norms(layer, n_embd, *(f"{attention}_norm" for attention in attentions))
        for attention in attentions:
            shape = (n_embd, n_embd, 1.0)
            tensors |= weights.matrices(layer, **{f"{attention}_{name}": shape for name in "qkvo"})
        bias = f"{layer}.attn_rel_b.weight"
        tensors[bias] = weights.normal(side, n_buckets, N_HEAD, deviation=1.0)
        tensors |= weights.feed_forward(layer, n_embd)
    own = {"attention.relative_buckets_count": n_buckets, "decoder_start_token_id": 1}
    return write_gguf(path, "t5", transformer(n_embd, 1, 256) | _NOT_GROUPED | own, SPM, tensors)


def write_vocab_only(path: Path) -> Path:
    """A Llama's whole header and tokenizer, and not one tensor."""
    return write_gguf(path, "llama", transformer(32, 2, 256), SPM, {})


def write_without_tokenizer(path: Path) -> Path:
    """A Llama with all its tensors and no word on its tokens."""
    weights = Weights()
    tensors = weights.ends(SPM, 32, 1.0) | weights.llama_layers(32, 2)
    return write_gguf(path, "llama", transformer(32, 2, 256), None, tensors)


def truncate(path: Path, fraction: float) -> Path:
    """Cuts the file in place, as a broken download would; keeps that fraction of its bytes."""
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * fraction))
    return path
