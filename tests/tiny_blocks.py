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
from tiny_file import F32, Header, write_gguf
from tiny_heads import facts_of
from tiny_tables import N_ROT, SMALL, Head, Table, class_dims_of, n_embd_of, output_matrix
from tiny_vocab import Vocab

Kind = Literal["dflash", "dspark", "dflash2"]
Ids = npt.NDArray[np.intp]

MASK = "<|mask|>"
PATH_SHARE = 0.25  # of DFlash2: how much of a token's share in a row is that of the path
TARGET_LAYERS = (1, 2, 3)  # whose inputs are read
SURE = 3.0  # of DSpark: the logit of its confidence


def with_mask(vocab: Vocab) -> Vocab:
    """One more token, the mask of a block; target and draft need the same vocabulary."""
    return vocab.with_token(MASK, gguf.TokenType.CONTROL)


SMALL_WITH_MASK = with_mask(SMALL)


# What is drafted


@dataclass(frozen=True, kw_only=True)
class BlockHead:
    """A draft of whole blocks, along the target's likeliest tokens after a text: the path.

    Each row has the share of a class that the path gives, and the share of a token: in DFlash that
    of the path, so that rows do not depend on what was drafted; in DSpark that of the token drafted
    before (Markov head), which is the likeliest of its row. DFlash2 adds up a part of both: what
    the path gives chooses `top_k` candidates for each row, the token before decides between them.
    `right`, `noise`, `n_kept` and `seed` as in tiny_heads.Head: after a wrong token comes another
    token's row. The vocabulary must have the token `MASK`, the table no markers.
    """

    table: Table
    kind: Kind = "dflash"
    block_size: int = 4
    right: float = 1.0
    noise: float = 0.0
    n_kept: int | None = None
    seed: int = 0
    from_anchor: bool = True  # DSpark: the place of the last token drafts the first one
    has_confidence: bool = True  # DSpark
    top_k: int = 4  # DFlash2

    @property
    def mask(self) -> int:
        return self.table.vocab.id_of(MASK)

    @property
    def first(self) -> int:
        """The place in the block that drafts the first token."""
        return 0 if self.kind == "dspark" and self.from_anchor else 1

    @property
    def n_max(self) -> int:
        """How many tokens it can draft."""
        return self.block_size - self.first

    @cached_property
    def head(self) -> Head:
        """Its rows by token."""
        return Head(
            table=self.table,
            right=self.right,
            noise=self.noise,
            n_kept=self.n_kept,
            seed=self.seed,
        )

    def row(self, tokens: Sequence[int], drafted: Sequence[int]) -> F32:
        """Logits of the token after `tokens` and `drafted`; of DSpark, its own likeliest tokens.

        They are -inf for tokens that it cannot draft.
        """
        before, now = self._path(tokens, len(drafted))
        previous = [*tokens, *drafted][-1]
        by_token, candidates = self.head.by_token, self.head.kept
        if self.kind == "dflash2":
            candidates = self.candidates(tokens, len(drafted))
            found = PATH_SHARE * by_token[now] + (1 - PATH_SHARE) * by_token[previous]
        else:
            found = by_token[now if self.kind == "dflash" else previous]
        row = np.full(len(self.table.vocab), -np.inf, np.float32)
        row[candidates] = self.table.mixed(found, int(self.table.classes[before]))[candidates]
        return row

    def rows(self, tokens: Sequence[int], n: int) -> F32:
        """Logits (n, n_vocab) of the n tokens after `tokens` where each is the likeliest."""
        drafted: list[int] = []
        rows = np.empty((n, len(self.table.vocab)), np.float32)
        for i in range(n):
            rows[i] = self.row(tokens, drafted)
            drafted.append(int(rows[i].argmax()))
        return rows

    def drafted(self, tokens: Sequence[int], n: int) -> list[int]:
        """Its likeliest continuation."""
        return [int(token) for token in self.rows(tokens, n).argmax(axis=1)]

    def candidates(self, tokens: Sequence[int], n_drafted: int) -> Ids:
        """The tokens that DFlash2 can draft after `n_drafted` tokens, whichever they are."""
        before, now = self._path(tokens, n_drafted)
        kept, class_ = self.head.kept, self.table.classes[before]
        logits = self.by_path[now, kept] + self.table.by_class[class_, kept]
        return np.asarray(kept[np.argsort(-logits)[: self.top_k]])

    def confidence(self, tokens: Sequence[int], n: int) -> F32:
        """What the confidence head of DSpark says of each row: little after a wrong token."""
        previous = [tokens[-1], *self.drafted(tokens, n)][:n]
        logits = np.where(np.isin(previous, self.head.wrong), -SURE, SURE)
        return (1 / (1 + np.exp(-logits))).astype(np.float32)

    @cached_property
    def tilt(self) -> F32:
        """By token: no two candidates of DFlash2 are equally likely."""
        return np.linspace(0, 0.2, len(self.table.vocab), dtype=np.float32)

    @cached_property
    def by_path(self) -> F32:
        """What chooses candidates of DFlash2 beside the class: logits (token of the path, next)."""
        return np.asarray(np.float32(PATH_SHARE) * self.head.by_token + self.tilt)

    def _path(self, tokens: Sequence[int], n: int) -> tuple[int, int]:
        """The last two tokens of the text that the target would write."""
        if len(tokens) < 2:
            raise ValueError("a draft needs two tokens: the class of the one before the last")
        before, now = [*tokens[-2:], *self.table.greedy(tokens, n)][-2:]
        return before, now


# Planted weights
#
# In a block, x is the last token of the text, y the one before. The target's features of y, and
# of the token before y, are in the injected cells one and two places before x. The attention of
# the only layer has a head for each distance; where no cell is, the sink takes all. So the place i
# finds x with head i, the cell of y with head i + 1, the one before that with head i + 2. The heads
# write, each to dimensions of its own, that x was found, and the class of y: `_DOUBT` times more or
# less of it where the two cells disagree on the class of the token before y. The feed-forward has
# a unit for each (place, x, class of y), which writes the target's state before the token that the
# place drafts (DSpark: the class only), so large that the norm leaves nothing else of the state.

_PEAK = 300.0  # the wanted cell's score is 4 * _PEAK, others' at most 3.8 * _PEAK (6,000 tokens)
_SINK = 3.9 * _PEAK
_CONSTANT = 4.0  # large: the norm of a first cell without a class before is about the same
_DOUBT = 3.0
_SURE = 0.75  # of the class of y that must be found
_GAIN, _LOUD = 128.0, 1000.0
_KERNEL, _GROUP = 3, 16  # of convolutions


@dataclass(frozen=True)
class _Layout:
    """Dimensions of the state in a block, and of the values of attention."""

    head: BlockHead
    n_tokens: int
    n_classes: int
    n_embd: int
    head_dim: int
    tokens: Ids  # all but the mask's, which is not zero in injected cells, too
    classes: Ids
    constant: int
    places: Ids  # one for each place of the block: x was found at that distance
    seen: Ids  # (place, class): the class of y, as that place needs it
    before: Ids  # in injected cells: the class of the token before the cell's


def _layout_of(head: BlockHead) -> _Layout:
    """Raises ValueError if the target's state is too small."""
    table, n_places = head.table, head.block_size
    n_tokens, n_classes, n_embd = len(table.vocab), table.n_classes, n_embd_of(table)
    tokens, classes = np.arange(n_tokens), np.arange(n_embd)[class_dims_of(table)]
    free = np.setdiff1d(np.arange(n_embd), np.concatenate([tokens, classes]))
    if len(free) < 1 + n_places * (1 + n_classes):
        raise ValueError(f"too few dimensions for {n_places} places and {n_classes} classes")
    constant, places, rest = np.split(free, [1, 1 + n_places])
    seen = rest[: n_places * n_classes].reshape(n_places, n_classes)
    return _Layout(
        head=head,
        n_tokens=n_tokens,
        n_classes=n_classes,
        n_embd=n_embd,
        head_dim=-(-(n_tokens + 1 + 2 * n_classes) // 32) * 32,
        tokens=tokens[tokens != head.mask],
        classes=classes,
        constant=int(constant[0]),
        places=places,
        seen=seen,
        before=seen[0],
    )


def _attention(layout: _Layout) -> dict[str, npt.NDArray[Any]]:
    n, n_embd, head_dim = layout.head.block_size + 2, layout.n_embd, layout.head_dim
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
    length = np.sqrt(_CONSTANT**2 + 2)  # of what is injected: a constant and two classes
    value[of_class, classes] = length / np.sqrt(n_embd)
    value[of_class + n_classes, layout.before] = length / np.sqrt(n_embd)
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
        named = layout.constant if head.kind == "dspark" else now
        down[unit, named] = down[unit, layout.classes[before]] = _LOUD
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
    """From features to a cell: a constant, the class of its token, that of the one before."""
    fc = np.zeros((n_layers, layout.n_embd, layout.n_embd), np.float32)
    fc[0, layout.head.mask, : layout.n_tokens] = _CONSTANT
    fc[0, layout.classes[layout.head.table.classes], np.arange(layout.n_tokens)] = 1.0
    fc[-1, layout.before, layout.classes] = 1.0
    return np.concatenate(list(fc), axis=1)


def _markov(head: BlockHead) -> dict[str, F32]:
    """DSpark: the share of the token before, which is named by as many dimensions as tokens."""
    n_tokens, n_embd, wrong = len(head.table.vocab), n_embd_of(head.table), head.head.wrong
    confidence = np.zeros((1, n_embd + n_tokens), np.float32)
    confidence[0, n_embd + wrong] = -2 * SURE
    tensors = {
        "markov_w1.weight": np.eye(n_tokens, dtype=np.float32),
        "markov_w2.weight": head.head.by_token.T[head.head.kept],
    }
    if head.has_confidence:
        tensors["conf_proj.weight"] = confidence
        tensors["conf_proj.bias"] = np.full(1, SURE, np.float32)
    return tensors


def _selector(head: BlockHead) -> dict[str, F32]:
    """DFlash2: scores of pairs, and convolutions that change nothing."""
    n_tokens, n_embd = len(head.table.vocab), n_embd_of(head.table)
    pairs = np.float32(1 - PATH_SHARE) * head.head.by_token - head.tilt
    hidden = np.zeros((n_tokens, n_embd), np.float32)
    hidden[:, :n_tokens] = np.sqrt(2 / n_embd)  # a state names one token: the gate is 1
    base = np.zeros((2, _KERNEL, n_embd), np.float32)
    base[:, 0] = 1.0
    projection = np.zeros((2 * _KERNEL * n_embd // _GROUP, n_embd), np.float32)
    tensors = {
        "selector_predecessor.weight": np.eye(n_tokens, dtype=np.float32),
        "selector_successor.weight": pairs.T,
        "selector_hidden.weight": hidden,
    }
    for part in ("attn", "ffn"):
        tensors[f"blk.0.{part}_conv_base"] = base
        tensors[f"blk.0.{part}_conv_proj.weight"] = projection
    return tensors


# Into the file


def write_dflash(
    path: Path,
    head: BlockHead,
    *,
    own_embeddings: bool = False,
    own_output: bool = False,
    header: Header | None = None,
) -> Path:
    """A block draft beside `write_llama_table`, whose inputs of those layers it reads.

    It takes the token from the first of them and the class of the token before from the last, which
    must be the input of the target's last layer. An output that is not the target's is always
    written, and also beside own embeddings: llama.cpp would use these instead. Beside a Gemma, the
    header needs its "embedding_scale", or the draft own embeddings.
    """
    table = head.table
    layout = _layout_of(head)
    n_embd = layout.n_embd
    ones = np.ones(n_embd, np.float32)
    layer = _attention(layout) | _feed_forward(layout)
    layer |= {"attn_norm.weight": ones, "ffn_norm.weight": ones}
    tensors: dict[str, npt.NDArray[Any]] = {
        "fc.weight": _fusion(layout, len(TARGET_LAYERS)),
        "enc.output_norm.weight": ones,
        "output_norm.weight": ones,
        **{f"blk.0.{name}": tensor for name, tensor in layer.items()},
    }
    if own_embeddings:
        tensors["token_embd.weight"] = np.eye(layout.n_tokens, n_embd, dtype=np.float32)
    by_token = head.head.by_token
    facts_of_kind: dict[str, Any] = {}
    if head.kind == "dspark":
        by_token = np.zeros_like(by_token)
        tensors |= _markov(head)
        facts_of_kind = {
            "sample_from_anchor": head.from_anchor,
            "has_confidence_head": head.has_confidence,
        }
    elif head.kind == "dflash2":
        by_token = head.by_path
        tensors |= _selector(head)
        facts_of_kind = {
            "conv_kernel_size": _KERNEL,
            "conv_group_size": _GROUP,
            "selector_rank": layout.n_tokens,
            "selector_top_k": head.top_k,
        }
    is_targets = head.kind == "dspark" and head.n_kept is None
    is_targets |= head.kind == "dflash" and head.head.is_exact
    if own_output or own_embeddings or not is_targets:
        tensors["output.weight"] = output_matrix(table, by_token)[head.head.kept]
    if head.n_kept is not None:
        tensors["d2t"] = head.head.kept.astype(np.int64)
    facts: Header = {
        **facts_of(table, 1),
        "feed_forward_length": len(layer["ffn_gate.weight"]),
        "attention.head_count": len(layer["attn_sinks.weight"]),
        "attention.head_count_kv": 1,
        "attention.key_length": layout.head_dim,
        "attention.value_length": layout.head_dim,
        "target_layers": list(TARGET_LAYERS),
        "block_size": head.block_size,
        **facts_of_kind,
        **(header or {}),
    }
    vocab = dataclasses.replace(table.vocab, mask=head.mask)
    return write_gguf(path, "dflash", facts, vocab, tensors)
