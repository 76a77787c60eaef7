"""Writes tiny GGUF files that compute a planted table, and heads that draft from the same one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tiny_file import Tensors, norms, transformer, write_gguf
from tiny_tables import (
    HEAD_DIM,
    N_CLASS_DIMS,
    N_ROT,
    PEAK,
    Head,
    Table,
    attention,
    class_of_state,
    class_of_token,
    ends_of,
    n_embd_of,
    output_matrix,
    scale_of,
)
from tiny_tables import SMALL as SMALL

Part = Literal["all", "trunk", "head"]  # of a file; the trunk lacks the head's layers

N_FF = 32
N_CTX_TRAIN = 256
WINDOW = 16  # of Gemma
N_OWN_DIMS = 32  # by which its assistant is wider than the target


def _adds_class(
    prefix: str, table: Table, *, is_silent: bool = False, n_rot: int = N_ROT, is_neox: bool = True
) -> Tensors:
    """Attention that adds the class of the token before; `is_silent`: that adds nothing."""
    total = float(np.sqrt(n_embd_of(table)))
    moves = [(1, class_of_token(table) / np.float32(total))]
    n_tokens = len(table.vocab)
    tensors = attention(
        prefix, moves, n_token_dims=n_tokens, total=total, n_rot=n_rot, is_neox=is_neox
    )
    tensors[f"{prefix}.attn_output.weight"] *= not is_silent
    return tensors


def _silent_feed_forward(prefix: str, n_embd: int) -> Tensors:
    shapes = {"gate": (N_FF, n_embd), "up": (N_FF, n_embd), "down": (n_embd, N_FF)}
    return {
        f"{prefix}.ffn_{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()
    }


def facts_of(table: Table, n_layer: int, n_head: int = 1) -> dict[str, Any]:
    return {
        **transformer(n_embd_of(table), n_layer, N_CTX_TRAIN),
        "feed_forward_length": N_FF,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": N_ROT,
    }


# MTP


def _mtp(prefix: str, head: Head, n_rot: int = N_ROT) -> Tensors:
    """What all architectures have in a MTP layer, beside the layer itself.

    The layer's state becomes what the target's last one is: the token read by the embedding, and
    the class of the token before, which the hidden state of that token names.
    """
    table, sees_hidden = head.table, head.sees == "hidden"
    n_embd = n_embd_of(table)
    projection = np.zeros((n_embd, 2 * n_embd), np.float32)
    projection[:, :n_embd] = np.eye(n_embd) / np.sqrt(n_embd)
    if sees_hidden:
        known = class_of_token(table) if table.n_markers is None else class_of_state(table)
        projection[:, n_embd:] = known / scale_of(table)
    tensors = {
        f"{prefix}.nextn.eh_proj.weight": projection,
        **norms(prefix, n_embd, "nextn.enorm", "nextn.hnorm"),
        **_adds_class(prefix, table, is_silent=sees_hidden, n_rot=n_rot),
    }
    if not head.is_exact:
        tensors[f"{prefix}.nextn.shared_head_head.weight"] = output_matrix(table, head.by_token)
    return tensors


def write_glm4moe(
    path: Path, table: Table, head: Head | None, *, part: Part = "all", n_layer: int = 1
) -> Path:
    """A GLM-4.5 that computes the table, of `n_layer` layers and a MTP layer: `head`, or none."""
    n_embd, n_experts, n_heads = n_embd_of(table), 2, int(head is not None)
    tensors = ends_of(table)
    for layer in range(n_layer if part != "head" else 0):
        prefix = f"blk.{layer}"
        tensors |= norms(prefix, n_embd, "attn_norm", "post_attention_norm")
        tensors |= _adds_class(prefix, table, is_silent=layer > 0)
        tensors |= _silent_feed_forward(prefix, n_embd)
    if head is not None and part != "trunk":
        prefix = f"blk.{n_layer}"
        tensors |= norms(prefix, n_embd, "attn_norm", "post_attention_norm")
        tensors |= _mtp(prefix, head)
        tensors[f"{prefix}.ffn_gate_inp.weight"] = np.zeros((n_experts, n_embd), np.float32)
        tensors[f"{prefix}.exp_probs_b.bias"] = np.zeros(n_experts, np.float32)
        for name, tensor in _silent_feed_forward(prefix, n_embd).items():
            stem = name.removesuffix(".weight")
            tensors[f"{stem}_exps.weight"] = np.stack([tensor] * n_experts)
            tensors[f"{stem}_shexp.weight"] = tensor
    facts = facts_of(table, n_layer + n_heads) | {
        "nextn_predict_layers": n_heads or None,
        "leading_dense_block_count": n_layer,
        "expert_count": n_experts,
        "expert_used_count": 1,
        "expert_shared_count": 1,
        "expert_feed_forward_length": N_FF,
    }
    return write_gguf(path, "glm4moe", facts, table.vocab, tensors)


def write_qwen35(path: Path, table: Table, head: Head | None, *, part: Part = "all") -> Path:
    """A Qwen 3.5 that computes the table: a recurrent layer, one of attention, and the MTP layer.

    The recurrent layer reads the token before from the state of its convolution. Without markers in
    the table each token writes its class to the recurrent state, with them only a marker does: then
    the state is a memory of any length, and a token that was taken back must not show in it.
    Unlike in the other models no class is added at the first token.
    """
    tensors, n_embd, n_heads = ends_of(table), n_embd_of(table), int(head is not None)
    prefixes = {"all": ["blk.0", "blk.1", "blk.2"], "trunk": ["blk.0", "blk.1"], "head": ["blk.2"]}
    for prefix in prefixes[part][: None if head is not None else 2]:
        tensors |= norms(prefix, n_embd, "attn_norm", "post_attention_norm")
        tensors |= _silent_feed_forward(prefix, n_embd)
        if prefix == "blk.0":
            tensors |= _delta_net(prefix, table)
        elif prefix == "blk.1":
            silent = _adds_class(prefix, table, is_silent=True, n_rot=HEAD_DIM)
            tensors |= _gated(silent, prefix)
        elif head is not None:
            tensors |= _gated(_mtp(prefix, head, n_rot=HEAD_DIM), prefix)
    facts = facts_of(table, 2 + n_heads) | {
        "nextn_predict_layers": n_heads or None,
        "rope.dimension_count": HEAD_DIM,
        "rope.dimension_sections": [6, 5, 5, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": HEAD_DIM,
        "ssm.state_size": HEAD_DIM,
        "ssm.time_step_rank": 1,
        "ssm.group_count": 1,
    }
    return write_gguf(path, "qwen35", facts, table.vocab, tensors)


def _delta_net(prefix: str, table: Table) -> Tensors:
    """A layer of one key, under which it keeps the class of the token before the last marker."""
    n_embd, large = n_embd_of(table), 20.0
    is_token = (np.arange(n_embd) < len(table.vocab)) / np.sqrt(n_embd)  # adds up to one
    qkv = np.zeros((3, HEAD_DIM, n_embd))
    qkv[:2, 0] = large * is_token
    qkv[2] = large * class_of_token(table)[-N_CLASS_DIMS:] / np.sqrt(n_embd)
    kernel = np.zeros((3, HEAD_DIM, 4))
    kernel[:2, :, 3], kernel[2, :, 2] = 1.0, 1.0
    writes = np.full(n_embd, 1.0 if table.n_markers is None else -1.0)
    if table.n_markers is not None:
        writes[table.markers] = 1.0
    out = np.eye(n_embd, HEAD_DIM, k=-(n_embd - N_CLASS_DIMS)) / (large * np.sqrt(HEAD_DIM))
    tensors = {
        "attn_qkv.weight": qkv.reshape(-1, n_embd),
        "attn_gate.weight": np.tile(large * is_token, (HEAD_DIM, 1)),
        "ssm_conv1d.weight": kernel.reshape(-1, 4),
        "ssm_a": np.full(1, -1.0),
        "ssm_dt.bias": np.full(1, -30.0),  # no decay
        "ssm_alpha.weight": np.zeros((1, n_embd)),
        "ssm_beta.weight": (large * writes * is_token)[None],
        "ssm_norm.weight": np.ones(HEAD_DIM),
        "ssm_out.weight": out,
    }
    return {f"{prefix}.{name}": tensor.astype(np.float32) for name, tensor in tensors.items()}


def _gated(tensors: Tensors, prefix: str) -> Tensors:
    """Attention whose queries and keys are normed, with a gate that is open."""
    query = tensors[f"{prefix}.attn_q.weight"]
    gate = 20.0 * np.sign(np.abs(query).max(axis=0)) / np.sqrt(query.shape[1])
    norm = 1 / np.sqrt(HEAD_DIM / 8)
    changed = {
        "attn_q": np.concatenate([query, np.tile(gate, (HEAD_DIM, 1))]),
        "attn_q_norm": np.full(HEAD_DIM, PEAK * np.sqrt(HEAD_DIM) * norm),
        "attn_k_norm": np.full(HEAD_DIM, norm),
    }
    return tensors | {f"{prefix}.{n}.weight": t.astype(np.float32) for n, t in changed.items()}


def write_step35(path: Path, table: Table, heads: Sequence[Head], *, part: Part = "all") -> Path:
    """A Step 3.5 that computes the table, with a MTP layer for each of `heads`.

    The i-th head is for the i-th token of a draft; each has cells of its own. The hidden state is
    not normed, unlike in the other models.
    """
    tensors = ends_of(table)
    n_layers = 2 + len(heads)  # the first of full attention, the second with a window
    written = {"all": range(n_layers), "trunk": range(2), "head": range(2, n_layers)}
    for layer in written[part]:
        prefix = f"blk.{layer}"
        tensors |= norms(prefix, n_embd_of(table), "attn_norm", "ffn_norm")
        tensors |= _silent_feed_forward(prefix, n_embd_of(table))
        tensors |= _adds_class(prefix, table, is_silent=layer > 0)
        if layer >= 2:
            tensors |= _mtp(prefix, heads[layer - 2])
    facts = facts_of(table, n_layers) | {
        "nextn_predict_layers": len(heads) or None,
        "rope.dimension_count": 2 * N_ROT,  # half of them in layers of full attention
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [layer == 1 for layer in range(n_layers)],
        "expert_feed_forward_length": N_FF,
    }
    return write_gguf(path, "step35", facts, table.vocab, tensors)


# EAGLE-3


def write_llama_table(path: Path, table: Table, *, n_layer: int = 4) -> Path:
    """A Llama that computes the table; its last layer but one adds the class to the state."""
    tensors, n_embd = ends_of(table), n_embd_of(table)
    for layer in range(n_layer):
        prefix = f"blk.{layer}"
        tensors |= norms(prefix, n_embd, "attn_norm", "ffn_norm")
        is_silent = layer != n_layer - 2
        tensors |= _adds_class(prefix, table, is_silent=is_silent, n_rot=HEAD_DIM, is_neox=False)
        tensors |= _silent_feed_forward(prefix, n_embd)
    # llama.cpp takes no other dimension of this architecture.
    facts = facts_of(table, n_layer) | {"rope.dimension_count": HEAD_DIM}
    return write_gguf(path, "llama", facts, table.vocab, tensors)


def write_eagle3(
    path: Path,
    head: Head,
    *,
    target_layers: Sequence[int] = (1, 2, 3),
    own_embeddings: bool = False,
    own_output: bool = False,
) -> Path:
    """An EAGLE-3 draft beside `write_llama_table`, whose inputs of those layers it reads.

    It takes the token from the first of the three and the class from the last: the latter must be
    the input of the target's last layer. An output that is not the target's is always written.
    The state of a cell becomes the target's last one for the cell's token: attention to the cell
    itself adds the token and its class, and takes away what the cell before left.
    """
    table = head.table
    n_embd, n_tokens, scale = n_embd_of(table), len(table.vocab), scale_of(table)
    token = np.diag((np.arange(n_embd) < n_tokens).astype(np.float32))
    class_ = np.eye(n_embd, dtype=np.float32) - token
    known = class_of_token(table)
    nothing = np.zeros_like(token)
    fresh = token / np.sqrt(n_embd)
    if head.sees == "hidden":
        moves = [(0, np.hstack([fresh, (known - token - class_) / scale]))]
    else:
        moves = [
            (0, np.hstack([fresh, -(token + class_) / scale])),
            (1, np.hstack([known / np.sqrt(n_embd), nothing])),
        ]
    total = float(np.sqrt(n_embd))
    tensors: dict[str, npt.NDArray[Any]] = {
        "fc.weight": np.hstack([token, nothing, class_]),
        "output_norm.weight": np.ones(n_embd, np.float32),
        **norms("blk.0", n_embd, "attn_norm", "attn_norm_2", "ffn_norm"),
        **_silent_feed_forward("blk.0", n_embd),
        **attention(
            "blk.0", moves, n_token_dims=n_tokens, total=total, head_dim=n_embd, is_neox=False
        ),
    }
    if own_embeddings:
        tensors["token_embd.weight"] = ends_of(table)["token_embd.weight"]
    if own_output or not head.is_exact:
        tensors["output.weight"] = output_matrix(table, head.by_token)[head.kept]
    if head.n_kept is not None:
        tensors["d2t"] = head.kept.astype(np.int64)
    facts = facts_of(table, 1, n_head=len(moves)) | {
        "attention.key_length": n_embd,
        "attention.value_length": n_embd,
        "target_layers": list(target_layers),
        "target_hidden_size": n_embd,
    }
    return write_gguf(path, "eagle3", facts, table.vocab, tensors)


# The assistant of Gemma 4


def write_gemma4(path: Path, table: Table) -> Path:
    """A Gemma 4 of two layers: the first, with a window, adds the class of the token before."""
    n_embd = n_embd_of(table)
    tensors = ends_of(table) | _gemma_layers(table, n_embd, adds_class=True)
    tensors["token_embd.weight"] /= np.float32(np.sqrt(n_embd))  # Gemma multiplies by that
    return write_gguf(path, "gemma4", _gemma_facts(n_embd), table.vocab, tensors)


def write_gemma4_assistant(path: Path, head: Head) -> Path:
    """A draft beside `write_gemma4`. Its own state, as the target's, names a token and a class.

    With "attention" it reads the class from the target's cell of the token before the last one of
    the text, for all drafted tokens.
    """
    table = head.table
    n_target, n_embd = n_embd_of(table), n_embd_of(table) + N_OWN_DIMS
    layers = _gemma_layers(table, n_embd, adds_class=head.sees == "attention")
    tensors = {n: each for n, each in layers.items() if "attn_k" not in n and "attn_v" not in n}
    projection = np.zeros((n_embd, 2 * n_target), np.float32)
    projection[:n_target, :n_target] = np.eye(n_target)
    if head.sees == "hidden":
        projection[:n_target, n_target:] = class_of_token(table) / np.float32(scale_of(table))
    ratio = np.float32(np.sqrt(n_target / 2) / np.sqrt(n_embd / 2))  # of normed states
    output = np.pad(output_matrix(table, head.by_token), ((0, 0), (0, N_OWN_DIMS)))
    tensors |= {
        "token_embd.weight": output * ratio,  # the output matrix too
        "output_norm.weight": np.ones(n_embd, np.float32),
        "nextn.pre_projection.weight": projection,
        "nextn.post_projection.weight": np.eye(n_target, n_embd, dtype=np.float32) * ratio,
    }
    own = {"embedding_length_out": n_target, "nextn_predict_layers": 2}
    return write_gguf(path, "gemma4-assistant", _gemma_facts(n_embd) | own, table.vocab, tensors)


def _gemma_facts(n_embd: int) -> dict[str, Any]:
    return {
        **transformer(n_embd, 2, N_CTX_TRAIN),
        "feed_forward_length": N_FF,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD_DIM,
        "attention.key_length_swa": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.value_length_swa": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
        "rope.dimension_count_swa": HEAD_DIM,
        "rope.freq_base_swa": 10000.0,
        "embedding_length_per_layer_input": 0,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": WINDOW,
        "final_logit_softcapping": 0.0,
        "attention.sliding_window_pattern": [True, False],
    }


def _gemma_layers(table: Table, n_embd: int, *, adds_class: bool) -> Tensors:
    """Both layers; a norm of zeros makes attention and feed-forward silent.

    Queries, keys and values are normed, and so is what attention adds.
    """
    tensors: Tensors = {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    n_more = n_embd - n_embd_of(table)
    moves = [(1, np.pad(class_of_token(table), ((0, n_more), (0, n_more))))]
    for layer in range(2):
        prefix = f"blk.{layer}"
        added = 1 / np.sqrt(n_embd) if adds_class and layer == 0 else 0.0
        tensors |= attention(
            prefix, moves, n_token_dims=len(table.vocab), total=1.0, n_rot=HEAD_DIM
        )
        tensors |= _silent_feed_forward(prefix, n_embd)
        tensors |= norms(prefix, n_embd, "attn_norm", "ffn_norm")
        tensors |= norms(prefix, n_embd, "post_ffw_norm", value=0.0)
        tensors |= norms(prefix, n_embd, "post_attention_norm", value=added)
        tensors |= norms(prefix, HEAD_DIM, "attn_q_norm", value=PEAK / 8)
        tensors |= norms(prefix, HEAD_DIM, "attn_k_norm")
        tensors |= norms(prefix, 1, "layer_output_scale")
    return tensors
