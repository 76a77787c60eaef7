"""Writes tiny GGUF files that compute a planted table, and heads that draft from the same one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from tiny import BPE, F32, SPM, Header, Vocab, transformer, write_gguf

Sees = Literal["hidden", "attention"]
Part = Literal["all", "trunk", "head"]

N_CLASS_DIMS = 32
HEAD_DIM = 32
N_ROT = 8
N_FF = 32
PEAK = 100.0  # how far the attention score of the wanted token is above the others'
WINDOW = 16  # of Gemma
N_OWN_DIMS = 32  # by which its assistant is wider than the target
UNSPOKEN = -8.0  # the logit of control, byte and padding tokens


# 24 tokens of a sign or digit each, and the end: texts whose distribution can be enumerated
SMALL = dataclasses.replace(
    BPE.with_size(24).with_token("<|im_end|>", gguf.TokenType.CONTROL),
    merges=("! !",),  # llama.cpp wants one
    bos=None,
    eos=24,
)


# The table


@dataclass(frozen=True, kw_only=True)
class Table:
    """The logits after a text: they depend on its last token and on the class of the one before.

    With one class the table is a cycle through all spoken tokens. With more, a guess that takes a
    wrong class is right in one case of `n_classes`: it finds rows that are one place off.
    The likeliest token is `gap` logits ahead of most; its probability is about one half.
    """

    vocab: Vocab = SPM
    seed: int = 0
    n_classes: int = 1
    gap: float = 5.0
    bonus: float = 3.0  # logits that the class adds to the tokens that may follow it
    n_markers: int | None = None  # recurrent layers: see `class_before`

    @cached_property
    def spoken(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(np.array(self.vocab.types) == gguf.TokenType.NORMAL)

    @cached_property
    def classes(self) -> npt.NDArray[np.intp]:
        """The class of each token."""
        return self._random(1).integers(self.n_classes, size=len(self.vocab))

    @cached_property
    def by_token(self) -> F32:
        """Logits (token, next token) without the class's share."""
        random, n_vocab = self._random(2), len(self.vocab)
        logits = np.full((n_vocab, n_vocab), UNSPOKEN, np.float32)
        noise = random.standard_normal((n_vocab, len(self.spoken)))
        logits[:, self.spoken] = np.clip(noise, -2, 2)
        for class_, group in enumerate(self._groups):
            follower = random.permutation(group)
            wanted = random.choice(group, n_vocab)
            wanted[follower] = np.roll(follower, -1)  # one cycle through all, while the class stays
            logits[np.arange(n_vocab), wanted] = self.gap - 0.25 * class_  # no ties
        return logits

    @cached_property
    def by_class(self) -> F32:
        """Logits (class, next token) on top of those by token."""
        logits = np.zeros((self.n_classes, len(self.vocab)), np.float32)
        for class_, group in enumerate(self._groups):
            logits[class_, group] = self.bonus
        return logits

    @cached_property
    def _groups(self) -> list[npt.NDArray[np.intp]]:
        """The spoken tokens in as many groups as there are classes."""
        return np.array_split(self._random(3).permutation(self.spoken), self.n_classes)

    def _random(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])

    @cached_property
    def markers(self) -> npt.NDArray[np.intp]:
        """The tokens at which a recurrent layer writes to its state."""
        return self._random(4).permutation(self.spoken)[: self.n_markers]

    def logits(self, tokens: Sequence[int]) -> F32:
        """What the target computes after `tokens`."""
        return self.mixed(self.by_token[tokens[-1]], self.class_before(tokens))

    def class_before(self, tokens: Sequence[int]) -> int | None:
        """The class of the token before the last; of the first one itself where it is alone.

        With markers: the class of the token before the last marker. None if there is no such.
        """
        if self.n_markers is None:
            return int(self.classes[tokens[-2] if len(tokens) > 1 else tokens[-1]])
        at = np.flatnonzero(np.isin(tokens, self.markers))
        return int(self.classes[tokens[at[-1] - 1]]) if at.size and at[-1] else None

    def mixed(self, by_token: F32, class_: int | None) -> F32:
        """Logits of a state; the norm makes the token's share larger where no class is added."""
        if class_ is None:
            return by_token * np.float32(np.sqrt(2))
        return by_token + self.by_class[class_]

    def greedy(self, tokens: Sequence[int], n: int) -> list[int]:
        """The likeliest continuation."""
        text = list(tokens)
        for _ in range(n):
            text.append(int(np.argmax(self.logits(text))))
        return text[len(tokens) :]


@dataclass(frozen=True, kw_only=True)
class Head:
    """The drafts' table: right after a share of the tokens, after the others another token's row.

    `noise` is the deviation of what is added to its logits: the drafted distribution differs from
    the target's. `n_kept` makes a vocabulary of that many tokens for the drafts (EAGLE-3 only).
    With "attention" the head reads the class of the token before from its own cell before (and from
    its first cell takes what stands there), else from the target's hidden state.
    """

    table: Table
    right: float = 1.0
    noise: float = 0.0
    n_kept: int | None = None
    seed: int = 0
    sees: Sees = "hidden"

    @property
    def is_exact(self) -> bool:
        return self.right == 1.0 and not self.noise and self.n_kept is None

    @cached_property
    def kept(self) -> npt.NDArray[np.intp]:
        """The tokens that it can draft, in order."""
        if self.n_kept is None:
            return np.arange(len(self.table.vocab))
        spoken = np.random.default_rng([self.seed, 3]).permutation(self.table.spoken)
        return np.sort(spoken[: self.n_kept])

    @cached_property
    def wrong(self) -> npt.NDArray[np.intp]:
        """The tokens after which its likeliest token is not the target's."""
        spoken = self.table.spoken
        n_wrong = round((1 - self.right) * len(spoken))
        return np.random.default_rng([self.seed, 1]).permutation(spoken)[:n_wrong]

    @cached_property
    def by_token(self) -> F32:
        random, table = np.random.default_rng([self.seed, 2]), self.table
        logits = table.by_token.copy()
        n_top = table.n_classes
        top = [set(row) for row in np.argsort(-table.by_token, axis=1)[:, :n_top]]
        for token in self.wrong:
            other = next(t for t in random.permutation(table.spoken) if not top[t] & top[token])
            logits[token] = table.by_token[other]
        noise = random.standard_normal((len(logits), len(table.spoken))) * self.noise
        logits[:, table.spoken] += noise.astype(np.float32)
        return logits

    def logits(self, tokens: Sequence[int], n_drafted: int = 0) -> F32:
        """What the head computes after `tokens`, of which the last `n_drafted` are its own.

        In a table with markers the hidden state names the class; so the head does not see it change
        at the last token, nor at drafted ones.
        """
        if self.table.n_markers is None:
            class_ = self.table.class_before(tokens)
        else:
            before = tokens[: len(tokens) - n_drafted - 1]
            class_ = self.table.class_before(before) if before else None
        logits = np.full(len(self.table.vocab), -np.inf, np.float32)
        logits[self.kept] = self.table.mixed(self.by_token[tokens[-1]], class_)[self.kept]
        return logits

    def drafted(self, tokens: Sequence[int], n: int) -> list[int]:
        """Its likeliest continuation."""
        text = list(tokens)
        for n_drafted in range(n):
            text.append(int(np.argmax(self.logits(text, n_drafted))))
        return text[len(tokens) :]


# Planted weights
#
# A hidden state has a dimension for each token, then N_CLASS_DIMS for classes. In a residual stream
# the last token's dimension is 1, and so is the class's once the first layer has added it; so each
# normed state has the same scale.


def n_embd_of(table: Table) -> int:
    return -(-len(table.vocab) // 32) * 32 + N_CLASS_DIMS


def class_dims_of(table: Table) -> slice:
    start = n_embd_of(table) - N_CLASS_DIMS
    return slice(start, start + table.n_classes)


def _scale(table: Table) -> float:
    """What a norm makes of the ones of a state with a token and a class."""
    return float(np.sqrt(n_embd_of(table) / 2))


def _ends(table: Table) -> dict[str, F32]:
    n_embd = n_embd_of(table)
    return {
        "token_embd.weight": np.eye(len(table.vocab), n_embd, dtype=np.float32),
        "output_norm.weight": np.ones(n_embd, np.float32),
        "output.weight": output_matrix(table, table.by_token),
    }


def output_matrix(table: Table, by_token: F32) -> F32:
    """The output matrix that makes logits of a normed state."""
    output = np.zeros((len(table.vocab), n_embd_of(table)), np.float32)
    output[:, : len(table.vocab)] = by_token.T
    output[:, class_dims_of(table)] = table.by_class.T
    return output / np.float32(_scale(table))


def _class_of_token(table: Table) -> F32:
    """A matrix (state, state) from a token's dimension to that of its class."""
    matrix = np.zeros((n_embd_of(table), n_embd_of(table)), np.float32)
    matrix[class_dims_of(table).start + table.classes, np.arange(len(table.vocab))] = 1.0
    return matrix


def _class_of_state(table: Table) -> F32:
    matrix = np.zeros((n_embd_of(table), n_embd_of(table)), np.float32)
    dims = np.arange(n_embd_of(table))[class_dims_of(table)]
    matrix[dims, dims] = 1.0
    return matrix


def _attention(
    prefix: str,
    moves: Sequence[tuple[int, F32]],
    *,
    n_token_dims: int,
    total: float,
    head_dim: int = HEAD_DIM,
    n_rot: int = N_ROT,
    is_neox: bool = True,
) -> dict[str, F32]:
    """Attention whose head i adds `matrix @ x` of the cell `shift` places before; (shift, matrix).

    The first cell has none before it and takes itself. Queries and keys are constants: they read
    the sum of the first `n_token_dims` dimensions of each normed x, which must be `total`.
    """
    n_out, n_in = moves[0][1].shape
    frequencies = np.array([1.0, 0.1, 0.01, 0.001])  # those of some pairs, whatever n_rot is
    pairs = np.arange(n_rot).reshape(2, -1).T if is_neox else np.arange(n_rot).reshape(-1, 2)
    pairs = pairs[:: n_rot // 8]
    constant = np.where(np.arange(n_in) < n_token_dims, 1 / total, 0.0)
    parts: dict[str, list[npt.NDArray[np.floating]]] = {n: [] for n in ("q", "k", "v", "output")}
    for shift, matrix in moves:
        query, key = np.zeros(head_dim), np.zeros(head_dim)
        query[pairs[:, 0]], key[pairs[:, 0]] = np.cos(shift * frequencies), 1.0
        query[pairs[:, 1]] = -np.sin(shift * frequencies)
        used = np.flatnonzero(matrix.any(axis=1))
        value, output = np.zeros((head_dim, n_in)), np.zeros((head_dim, n_out))
        value[: len(used)], output[np.arange(len(used)), used] = matrix[used], 1.0
        parts["q"].append(np.outer(query * PEAK * np.sqrt(head_dim), constant))
        parts["k"].append(np.outer(key, constant))
        parts["v"].append(value)
        parts["output"].append(output)
    tensors = {name: np.concatenate(part).astype(np.float32) for name, part in parts.items()}
    tensors["output"] = np.ascontiguousarray(tensors["output"].T)
    return {f"{prefix}.attn_{name}.weight": tensor for name, tensor in tensors.items()}


def _token_before(
    prefix: str, table: Table, *, n_rot: int = N_ROT, is_neox: bool = True
) -> dict[str, F32]:
    """Attention of a first layer: adds the class of the token before."""
    total = float(np.sqrt(n_embd_of(table)))
    matrix = _class_of_token(table) / np.float32(total)
    return _attention(
        prefix,
        [(1, matrix)],
        n_token_dims=len(table.vocab),
        total=total,
        n_rot=n_rot,
        is_neox=is_neox,
    )


def _silent_attention(
    prefix: str, table: Table, *, n_rot: int = N_ROT, is_neox: bool = True
) -> dict[str, F32]:
    tensors = _token_before(prefix, table, n_rot=n_rot, is_neox=is_neox)
    output = f"{prefix}.attn_output.weight"
    return tensors | {output: np.zeros_like(tensors[output])}


def _silent_feed_forward(prefix: str, table: Table) -> dict[str, F32]:
    n_embd = n_embd_of(table)
    shapes = {"gate": (N_FF, n_embd), "up": (N_FF, n_embd), "down": (n_embd, N_FF)}
    return {
        f"{prefix}.ffn_{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()
    }


def _norms(prefix: str, table: Table, *names: str) -> dict[str, F32]:
    return {f"{prefix}.{name}.weight": np.ones(n_embd_of(table), np.float32) for name in names}


def facts_of(
    table: Table, n_layer: int, n_ctx_train: int, n_head: int = 1
) -> dict[str, int | float]:
    return {
        **transformer(n_embd_of(table), n_layer, n_ctx_train),
        "feed_forward_length": N_FF,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": N_ROT,
    }


# MTP


def _mtp(prefix: str, head: Head, n_rot: int = N_ROT) -> dict[str, F32]:
    """What all architectures have in a MTP layer, beside the layer itself.

    The layer's state becomes what the target's last one is: the token read by the embedding, and
    the class of the token before, which the hidden state of that token names.
    """
    table = head.table
    n_embd = n_embd_of(table)
    projection = np.zeros((n_embd, 2 * n_embd), np.float32)
    projection[:, :n_embd] = np.eye(n_embd) / np.sqrt(n_embd)
    if head.sees == "hidden":
        known = _class_of_token(table) if table.n_markers is None else _class_of_state(table)
        projection[:, n_embd:] = known / _scale(table)
    attention = _silent_attention if head.sees == "hidden" else _token_before
    tensors = {
        f"{prefix}.nextn.eh_proj.weight": projection,
        **_norms(prefix, table, "nextn.enorm", "nextn.hnorm"),
        **attention(prefix, table, n_rot=n_rot),
    }
    if not head.is_exact:
        tensors[f"{prefix}.nextn.shared_head_head.weight"] = output_matrix(table, head.by_token)
    return tensors


def write_glm4moe(
    path: Path,
    table: Table,
    head: Head | None,
    *,
    part: Part = "all",
    n_layer: int = 1,
    n_ctx_train: int = 256,
    chat_template: str | None = None,
    header: Header | None = None,
) -> Path:
    """A GLM-4.5 that computes the table, of `n_layer` layers and a MTP layer: `head`, unless None.

    `part` is "trunk" or "head" for files of which each lacks the other's layers.
    """
    n_embd, n_experts = n_embd_of(table), 2
    tensors = _ends(table)
    for layer in range(n_layer if part != "head" else 0):
        prefix = f"blk.{layer}"
        tensors |= _norms(prefix, table, "attn_norm", "post_attention_norm")
        tensors |= (_silent_attention if layer else _token_before)(prefix, table)
        tensors |= _silent_feed_forward(prefix, table)
    if head is not None and part != "trunk":
        prefix = f"blk.{n_layer}"
        tensors |= _norms(prefix, table, "attn_norm", "post_attention_norm")
        tensors |= _mtp(prefix, head)
        tensors[f"{prefix}.ffn_gate_inp.weight"] = np.zeros((n_experts, n_embd), np.float32)
        tensors[f"{prefix}.exp_probs_b.bias"] = np.zeros(n_experts, np.float32)
        for name, tensor in _silent_feed_forward(prefix, table).items():
            stem = name.removesuffix(".weight")
            tensors[f"{stem}_exps.weight"] = np.stack([tensor] * n_experts)
            tensors[f"{stem}_shexp.weight"] = tensor
    n_heads = 0 if head is None else 1
    facts: dict[str, int | float | None] = {
        **facts_of(table, n_layer + n_heads, n_ctx_train),
        "nextn_predict_layers": n_heads or None,
        "leading_dense_block_count": n_layer,
        "expert_count": n_experts,
        "expert_used_count": 1,
        "expert_shared_count": 1,
        "expert_feed_forward_length": N_FF,
    }
    return write_gguf(
        path, "glm4moe", {**facts, **(header or {})}, table.vocab, tensors, chat_template
    )


def write_qwen35(
    path: Path,
    table: Table,
    head: Head | None,
    *,
    part: Part = "all",
    n_ctx_train: int = 256,
    chat_template: str | None = None,
    header: Header | None = None,
) -> Path:
    """A Qwen 3.5 that computes the table: a recurrent layer, one of attention, and the MTP layer.

    The recurrent layer reads the token before from the state of its convolution. Without markers in
    the table each token writes its class to the recurrent state, with them only a marker does: then
    the state is a memory of any length, and a token that was taken back must not show in it.
    Unlike in the other models no class is added at the first token. `part` as in `write_glm4moe`.
    """
    tensors = _ends(table)
    if part != "head":
        for prefix in ("blk.0", "blk.1"):
            tensors |= _norms(prefix, table, "attn_norm", "post_attention_norm")
            tensors |= _silent_feed_forward(prefix, table)
        tensors |= _delta_net("blk.0", table)
        tensors |= _gated(_silent_attention("blk.1", table, n_rot=HEAD_DIM), "blk.1")
    if head is not None and part != "trunk":
        tensors |= _norms("blk.2", table, "attn_norm", "post_attention_norm")
        tensors |= _silent_feed_forward("blk.2", table)
        tensors |= _gated(_mtp("blk.2", head, n_rot=HEAD_DIM), "blk.2")
    n_heads = 0 if head is None else 1
    facts: dict[str, Any] = {
        **facts_of(table, 2 + n_heads, n_ctx_train),
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
    facts |= header or {}
    return write_gguf(path, "qwen35", facts, table.vocab, tensors, chat_template)


def _delta_net(prefix: str, table: Table) -> dict[str, F32]:
    """A layer of one key, under which it keeps the class of the token before the last marker."""
    n_embd, large = n_embd_of(table), 20.0
    is_token = (np.arange(n_embd) < len(table.vocab)) / np.sqrt(n_embd)  # adds up to one
    qkv = np.zeros((3, HEAD_DIM, n_embd))
    qkv[:2, 0] = large * is_token
    qkv[2] = large * _class_of_token(table)[-N_CLASS_DIMS:] / np.sqrt(n_embd)
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


def _gated(tensors: dict[str, F32], prefix: str) -> dict[str, F32]:
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


def write_step35(
    path: Path,
    table: Table,
    heads: Sequence[Head],
    *,
    part: Part = "all",
    n_ctx_train: int = 256,
    chat_template: str | None = None,
    header: Header | None = None,
) -> Path:
    """A Step 3.5 that computes the table, with a MTP layer for each of `heads`.

    The i-th head is for the i-th token of a draft; each has cells of its own. The hidden state is
    not normed, unlike in the other models. `part` as in `write_glm4moe`.
    """
    n_layer, tensors = 2, _ends(table)  # the first of full attention, the second with a window
    prefixes = [f"blk.{layer}" for layer in range(n_layer + len(heads))]
    if part == "head":
        del prefixes[:n_layer]
    elif part == "trunk":
        del prefixes[n_layer:]
    for prefix in prefixes:
        tensors |= _norms(prefix, table, "attn_norm", "ffn_norm")
        tensors |= _silent_feed_forward(prefix, table)
        tensors |= (_token_before if prefix == "blk.0" else _silent_attention)(prefix, table)
    for layer, head in enumerate(heads if part != "trunk" else (), n_layer):
        tensors |= _mtp(f"blk.{layer}", head)
    facts: dict[str, Any] = {
        **facts_of(table, n_layer + len(heads), n_ctx_train),
        "nextn_predict_layers": len(heads) or None,
        "rope.dimension_count": 2 * N_ROT,  # half of them in layers of full attention
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [layer == 1 for layer in range(n_layer + len(heads))],
        "expert_feed_forward_length": N_FF,
    }
    facts |= header or {}
    return write_gguf(path, "step35", facts, table.vocab, tensors, chat_template)


# EAGLE-3


def write_llama_table(
    path: Path,
    table: Table,
    *,
    n_layer: int = 4,
    n_ctx_train: int = 256,
    chat_template: str | None = None,
    header: Header | None = None,
) -> Path:
    """A Llama that computes the table; its last layer but one adds the class to the state."""
    tensors = _ends(table)
    for layer in range(n_layer):
        prefix = f"blk.{layer}"
        tensors |= _norms(prefix, table, "attn_norm", "ffn_norm")
        tensors |= _token_before(prefix, table, n_rot=HEAD_DIM, is_neox=False)
        if layer != n_layer - 2:
            tensors |= _silent_attention(prefix, table)
        tensors |= _silent_feed_forward(prefix, table)
    facts: Header = {
        **facts_of(table, n_layer, n_ctx_train),
        "rope.dimension_count": HEAD_DIM,  # llama.cpp takes no other of this architecture
        **(header or {}),
    }
    return write_gguf(path, "llama", facts, table.vocab, tensors, chat_template)


def write_eagle3(
    path: Path,
    head: Head,
    *,
    target_layers: Sequence[int] = (1, 2, 3),
    own_embeddings: bool = False,
    own_output: bool = False,
    n_ctx_train: int = 256,
    header: Header | None = None,
) -> Path:
    """An EAGLE-3 draft beside `write_llama_table`, whose inputs of those layers it reads.

    It takes the token from the first of the three and the class from the last: the latter must be
    the input of the target's last layer. An output that is not the target's is always written.
    The state of a cell becomes the target's last one for the cell's token: attention to the cell
    itself adds the token and its class, and takes away what the cell before left.
    """
    table = head.table
    n_embd, n_tokens, scale = n_embd_of(table), len(table.vocab), _scale(table)
    token = np.diag((np.arange(n_embd) < n_tokens).astype(np.float32))
    class_ = np.eye(n_embd, dtype=np.float32) - token
    class_of_token = _class_of_token(table)
    nothing = np.zeros_like(token)
    fresh = token / np.sqrt(n_embd)
    if head.sees == "hidden":
        moves = [(0, np.hstack([fresh, (class_of_token - token - class_) / scale]))]
    else:
        moves = [
            (0, np.hstack([fresh, -(token + class_) / scale])),
            (1, np.hstack([class_of_token / np.sqrt(n_embd), nothing])),
        ]
    tensors: dict[str, npt.NDArray[Any]] = {
        "fc.weight": np.hstack([token, nothing, class_]),
        "output_norm.weight": np.ones(n_embd, np.float32),
        **_norms("blk.0", table, "attn_norm", "attn_norm_2", "ffn_norm"),
        **_silent_feed_forward("blk.0", table),
        **_attention(
            "blk.0",
            moves,
            n_token_dims=n_tokens,
            total=float(np.sqrt(n_embd)),
            head_dim=n_embd,
            is_neox=False,
        ),
    }
    if own_embeddings:
        tensors["token_embd.weight"] = _ends(table)["token_embd.weight"]
    if own_output or not head.is_exact:
        tensors["output.weight"] = output_matrix(table, head.by_token)[head.kept]
    if head.n_kept is not None:
        tensors["d2t"] = head.kept.astype(np.int64)
    facts: Header = {
        **facts_of(table, 1, n_ctx_train, n_head=len(moves)),
        "attention.key_length": n_embd,
        "attention.value_length": n_embd,
        "target_layers": list(target_layers),
        "target_hidden_size": n_embd,
        **(header or {}),
    }
    return write_gguf(path, "eagle3", facts, table.vocab, tensors)


# The assistant of Gemma 4


def write_gemma4(
    path: Path,
    table: Table,
    *,
    n_ctx_train: int = 256,
    chat_template: str | None = None,
    header: Header | None = None,
) -> Path:
    """A Gemma 4 of two layers: the first, with a window, adds the class of the token before."""
    n_embd = n_embd_of(table)
    tensors = _ends(table) | _gemma_layers(table, n_embd, adds_class=True)
    tensors["token_embd.weight"] /= np.float32(np.sqrt(n_embd))  # Gemma multiplies by that
    facts = _gemma_facts(n_embd, n_ctx_train) | (header or {})
    return write_gguf(path, "gemma4", facts, table.vocab, tensors, chat_template)


def write_gemma4_assistant(path: Path, head: Head, *, header: Header | None = None) -> Path:
    """A draft beside `write_gemma4`. Its own state, as the target's, names a token and a class.

    With "attention" it reads the class from the target's cell of the token before the last one of
    the text, for all drafted tokens.
    """
    table = head.table
    n_target, n_embd = n_embd_of(table), n_embd_of(table) + N_OWN_DIMS
    tensors = _gemma_layers(table, n_embd, adds_class=head.sees == "attention")
    for name in [name for name in tensors if "attn_k" in name or "attn_v" in name]:
        del tensors[name]
    projection = np.zeros((n_embd, 2 * n_target), np.float32)
    projection[:n_target, :n_target] = np.eye(n_target)
    if head.sees == "hidden":
        scale = np.float32(np.sqrt(n_target / 2))  # of a normed state with a token and a class
        projection[:n_target, n_target:] = _class_of_token(table) / scale
    n_normed, n_wanted = np.sqrt(n_embd / 2), np.sqrt(n_target / 2)
    output = np.pad(output_matrix(table, head.by_token), ((0, 0), (0, N_OWN_DIMS)))
    tensors |= {
        "token_embd.weight": output * np.float32(n_wanted / n_normed),  # the output matrix too
        "output_norm.weight": np.ones(n_embd, np.float32),
        "nextn.pre_projection.weight": projection,
        "nextn.post_projection.weight": np.eye(n_target, n_embd, dtype=np.float32)
        * np.float32(n_wanted / n_normed),
    }
    facts = _gemma_facts(n_embd, 256) | {
        "embedding_length_out": n_target,
        "nextn_predict_layers": 2,
    }
    return write_gguf(path, "gemma4-assistant", facts | (header or {}), table.vocab, tensors)


def _gemma_facts(n_embd: int, n_ctx_train: int) -> dict[str, Any]:
    return {
        **transformer(n_embd, 2, n_ctx_train),
        "feed_forward_length": N_FF,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        **{
            f"attention.{of}_length{kind}": HEAD_DIM
            for of in ("key", "value")
            for kind in ("", "_swa")
        },
        "rope.dimension_count": HEAD_DIM,
        "rope.dimension_count_swa": HEAD_DIM,
        "rope.freq_base_swa": 10000.0,
        "embedding_length_per_layer_input": 0,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": WINDOW,
        "final_logit_softcapping": 0.0,
        "attention.sliding_window_pattern": [True, False],
    }


def _gemma_layers(table: Table, n_embd: int, *, adds_class: bool) -> dict[str, F32]:
    """Both layers; a norm of zeros makes attention and feed-forward silent.

    Queries, keys and values are normed, and so is what attention adds.
    """
    tensors: dict[str, F32] = {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    n_more = n_embd - n_embd_of(table)
    matrix = np.pad(_class_of_token(table), ((0, n_more), (0, n_more)))
    for layer in range(2):
        prefix = f"blk.{layer}"
        tensors |= _attention(
            prefix, [(1, matrix)], n_token_dims=len(table.vocab), total=1.0, n_rot=HEAD_DIM
        )
        ffn = {"gate": (N_FF, n_embd), "up": (N_FF, n_embd), "down": (n_embd, N_FF)}
        constants = {
            **{f"ffn_{name}": np.zeros(shape) for name, shape in ffn.items()},
            **{f"{name}_norm": np.ones(n_embd) for name in ("attn", "ffn")},
            "post_ffw_norm": np.zeros(n_embd),
            "post_attention_norm": np.full(
                n_embd, 1 / np.sqrt(n_embd) if adds_class and layer == 0 else 0.0
            ),
            "attn_q_norm": np.full(HEAD_DIM, PEAK / 8),
            "attn_k_norm": np.ones(HEAD_DIM),
            "layer_output_scale": np.ones(1),
        }
        tensors |= {f"{prefix}.{n}.weight": t.astype(np.float32) for n, t in constants.items()}
    return tensors
