"""Writes tiny block drafts (DFlash, DSpark, DFlash2) that draft from a planted table."""

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
from tiny import F32, Header, Vocab, write_gguf
from tiny_heads import N_ROT, SMALL, Head, Table, class_dims_of, facts_of, n_embd_of, output_matrix

Kind = Literal["dflash", "dspark", "dflash2"]
Ids = npt.NDArray[np.intp]

MASK = "<|mask|>"


def with_mask(vocab: Vocab) -> Vocab:
    """One more token, the mask of a block; target and draft need the same vocabulary."""
    return vocab.with_token(MASK, gguf.TokenType.CONTROL)


SMALL_WITH_MASK = with_mask(SMALL)


# What is drafted


@dataclass(frozen=True, kw_only=True)
class BlockHead:
    """A draft of whole blocks: the i-th row of logits is that after i - 1 of the likeliest tokens.

    The target's likeliest: a row does not depend on what was drafted before it. `right`, `noise`,
    `n_kept` and `seed` are those of tiny_heads.Head: after a wrong token comes another one's row.
    The vocabulary must have the token `MASK`, the table no markers.
    """

    table: Table
    kind: Kind = "dflash"
    block_size: int = 4
    right: float = 1.0
    noise: float = 0.0
    n_kept: int | None = None
    seed: int = 0

    @property
    def mask(self) -> int:
        return self.table.vocab.id_of(MASK)

    @property
    def n_max(self) -> int:
        """How many tokens it can draft."""
        return self.block_size - self.first

    @property
    def first(self) -> int:
        """The place in the block that drafts the first token."""
        return 1

    @cached_property
    def head(self) -> Head:
        """The rows by token."""
        return Head(
            table=self.table,
            right=self.right,
            noise=self.noise,
            n_kept=self.n_kept,
            seed=self.seed,
        )

    def path(self, tokens: Sequence[int], n: int) -> list[int]:
        """The last two of `tokens`, then the target's likeliest tokens: on these, rows depend."""
        if len(tokens) < 2:
            raise ValueError("a draft needs two tokens: the class of the one before the last")
        return [*tokens[-2:], *self.table.greedy(tokens, n)]

    def rows(self, tokens: Sequence[int], n: int) -> F32:
        """Logits (n, n_vocab) of the n tokens after `tokens`."""
        path = self.path(tokens, n)
        rows = np.full((n, len(self.table.vocab)), -np.inf, np.float32)
        kept = self.head.kept
        for i in range(n):
            class_ = int(self.table.classes[path[i]])
            rows[i, kept] = self.table.mixed(self.head.by_token[path[i + 1]], class_)[kept]
        return rows

    def drafted(self, tokens: Sequence[int], n: int) -> list[int]:
        """The likeliest token of each row."""
        return [int(token) for token in self.rows(tokens, n).argmax(axis=1)]


# Planted weights
#
# In a block, x is the last token of the text, y the one before. The target's features of y, and
# of the token before y, are in the injected cells one and two places before x. The attention of
# the only layer has a head for each distance; where no cell is, the sink takes all. So the place i
# finds x with head i, the cell of y with head i + 1, the one before that with head i + 2. The heads
# write, each to dimensions of its own, that x was found, and the class of y: `_DOUBT` times more or
# less of it where the two cells disagree on the class of the token before y. The feed-forward has
# a unit for each (place, x, class of y), which writes the state of the target before the token that
# the place drafts, so large that the norm leaves nothing else of the state.

_PEAK = 300.0  # how far a score falls from one cell to the next is a tenth of it at least
_SINK = 3.9 * _PEAK  # the score of the wanted cell is 4 * _PEAK
_DOUBT = 3.0
_SURE = 0.75  # of the class of y that must be found
_GAIN, _LOUD = 128.0, 1000.0


@dataclass(frozen=True)
class _Layout:
    """Dimensions of the state in a block, and of the values of attention."""

    head: BlockHead

    @property
    def n_tokens(self) -> int:
        return len(self.head.table.vocab)

    @property
    def n_classes(self) -> int:
        return self.head.table.n_classes

    @property
    def n_embd(self) -> int:
        return n_embd_of(self.head.table)

    @property
    def n_heads(self) -> int:
        return self.head.block_size + 2

    @property
    def head_dim(self) -> int:
        return -(-(self.n_tokens + 1 + 2 * self.n_classes) // 32) * 32

    @property
    def tokens(self) -> Ids:
        """All but the mask's, which is 1 in injected cells, too."""
        return np.flatnonzero(np.arange(self.n_tokens) != self.head.mask)

    @property
    def classes(self) -> Ids:
        return np.arange(self.n_embd)[class_dims_of(self.head.table)]

    @cached_property
    def _free(self) -> Ids:
        used = np.concatenate([np.arange(self.n_tokens), self.classes])
        free = np.setdiff1d(np.arange(self.n_embd), used)
        if len(free) < 1 + self.head.block_size * (1 + self.n_classes):
            raise ValueError("too few dimensions for so many places and classes")
        return free

    @property
    def constant(self) -> int:
        return int(self._free[0])

    @property
    def places(self) -> Ids:
        """One for each place of the block: x was found at that distance."""
        return self._free[1:][: self.head.block_size]

    @property
    def seen(self) -> Ids:
        """(place, class): the class of y, as that place needs it."""
        shape = self.head.block_size, self.n_classes
        free: Ids = self._free[1 + self.head.block_size :][: np.prod(shape)].reshape(shape)
        return free

    @property
    def before(self) -> Ids:
        """In injected cells: the class of the token before the cell's, as the target has it."""
        return self.seen[0]


def _attention(layout: _Layout) -> dict[str, npt.NDArray[Any]]:
    n, n_embd, head_dim = layout.n_heads, layout.n_embd, layout.head_dim
    tokens, classes = layout.tokens, layout.classes
    pairs = np.arange(N_ROT).reshape(2, -1)
    shifts = np.arange(n)[:, None] * np.array([1.0, 0.1, 0.01, 0.001])
    query, key = np.zeros((n, head_dim)), np.zeros(head_dim)
    query[:, pairs[0]], query[:, pairs[1]], key[pairs[0]] = np.cos(shifts), -np.sin(shifts), 1.0
    is_token = (np.arange(n_embd) < layout.n_tokens) / np.sqrt(n_embd)
    # Values: the token, that there is one, its class (of injected cells), the class before.
    n_tokens, n_classes = layout.n_tokens, layout.n_classes
    found, of_class = n_tokens, n_tokens + 1 + np.arange(n_classes)
    value = np.zeros((head_dim, n_embd))
    value[tokens, tokens] = value[found, tokens] = 1 / np.sqrt(n_embd)
    value[of_class, classes] = np.sqrt(3 / n_embd)  # a cell has three ones
    value[of_class + n_classes, layout.before] = np.sqrt(3 / n_embd)
    output = np.zeros((n_embd, n, head_dim))
    for i in range(layout.head.block_size):
        output[tokens, i, tokens] = 1.0 if i else 0.0  # at its own place, x is there already
        output[layout.places[i], i, found] = 1.0
        output[layout.seen[i], i + 1, of_class] = 1.0
        output[layout.seen[i], i + 1, of_class + n_classes] = _DOUBT
        output[layout.seen[i], i + 2, of_class] = -_DOUBT
    norm = 2 / np.sqrt(head_dim)  # queries and keys have four ones
    return {
        "attn_q.weight": np.outer(query.ravel(), is_token).astype(np.float16),
        "attn_k.weight": np.outer(key, is_token).astype(np.float16),
        "attn_v.weight": value.astype(np.float32),
        "attn_output.weight": output.reshape(n_embd, -1).astype(np.float16),
        "attn_q_norm.weight": np.full(head_dim, _PEAK * norm * np.sqrt(head_dim), np.float32),
        "attn_k_norm.weight": np.full(head_dim, norm, np.float32),
        "attn_sinks.weight": np.full(n, _SINK, np.float32),
    }


def _feed_forward(layout: _Layout) -> dict[str, npt.NDArray[Any]]:
    """A unit is on where 10 * x + 10 * place + class exceeds 20 + _SURE."""
    head, table = layout.head, layout.head.table
    rows: list[F32] = []
    outs: list[F32] = []
    token, class_ = np.meshgrid(layout.tokens, np.arange(layout.n_classes), indexing="ij")
    now, before = token.ravel(), class_.ravel()  # of the likeliest path, after each start
    starts = (now, before)
    for place in range(head.first, head.block_size):
        unit = np.arange(len(now))
        gate, down = np.zeros((2, len(now), layout.n_embd), np.float32)
        gate[:, layout.places] = -(20 + _SURE)
        gate[:, layout.places[place]] += 10.0
        gate[unit, starts[0]] = 10.0
        gate[unit, layout.seen[place][starts[1]]] = 1.0
        down[unit, now] = down[unit, layout.classes[before]] = _LOUD
        rows.append(gate)
        outs.append(down)
        nexts = (table.by_token[now] + table.by_class[before]).argmax(axis=1)
        now, before = nexts, table.classes[now]
    gate, down = np.concatenate(rows), np.concatenate(outs)
    up = np.zeros_like(gate)
    up[:, layout.places] = 1.0
    parts = {"gate": _GAIN * gate, "up": up, "down": np.ascontiguousarray(down.T)}
    return {f"ffn_{name}.weight": part.astype(np.float16) for name, part in parts.items()}


def _fusion(layout: _Layout, n_layers: int) -> F32:
    """From features to an injected cell: a one, the class of the token, that of the one before."""
    fc = np.zeros((n_layers, layout.n_embd, layout.n_embd), np.float32)
    fc[0, layout.head.mask, : layout.n_tokens] = 1.0
    fc[0, layout.classes[layout.head.table.classes], np.arange(layout.n_tokens)] = 1.0
    fc[-1, layout.before, layout.classes] = 1.0
    return np.concatenate(list(fc), axis=1)


# Into the file


def write_dflash(
    path: Path,
    head: BlockHead,
    *,
    target_layers: Sequence[int] = (1, 2, 3),
    own_embeddings: bool = False,
    own_output: bool = False,
    n_ctx_train: int = 256,
    header: Header | None = None,
) -> Path:
    """A block draft beside `write_llama_table`, whose inputs of those layers it reads.

    It takes the token from the first of them and the class of the token before from the last, which
    must be the input of the target's last layer. An output that is not the target's is always
    written, and also beside own embeddings: llama.cpp would use these instead.
    """
    table = head.table
    layout = _Layout(head)
    n_embd = layout.n_embd
    ones = np.ones(n_embd, np.float32)
    layer = _attention(layout) | _feed_forward(layout)
    layer |= {"attn_norm.weight": ones, "ffn_norm.weight": ones}
    tensors: dict[str, npt.NDArray[Any]] = {
        "fc.weight": _fusion(layout, len(target_layers)),
        "enc.output_norm.weight": ones,
        "output_norm.weight": ones,
        **{f"blk.0.{name}": tensor for name, tensor in layer.items()},
    }
    if own_embeddings:
        tensors["token_embd.weight"] = np.eye(layout.n_tokens, n_embd, dtype=np.float32)
    if own_output or own_embeddings or not head.head.is_exact:
        tensors["output.weight"] = output_matrix(table, head.head.by_token)[head.head.kept]
    if head.n_kept is not None:
        tensors["d2t"] = head.head.kept.astype(np.int64)
    facts: Header = {
        **facts_of(table, 1, n_ctx_train),
        "feed_forward_length": len(layer["ffn_gate.weight"]),
        "attention.head_count": layout.n_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": layout.head_dim,
        "attention.value_length": layout.head_dim,
        "target_layers": list(target_layers),
        "block_size": head.block_size,
        **(header or {}),
    }
    vocab = dataclasses.replace(table.vocab, mask=head.mask)
    return write_gguf(path, "dflash", facts, vocab, tensors)
