"""Tables of logits, which tiny targets compute and tiny heads draft from; the planted weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt
from tiny_file import F32, Tensors
from tiny_vocab import BPE, SPM, Vocab

Sees = Literal["hidden", "attention"]

N_CLASS_DIMS = 32
HEAD_DIM = 32
N_ROT = 8
PEAK = 100.0  # how far the attention score of the wanted token is above the others'
UNSPOKEN = -8.0  # the logit of control, byte and padding tokens
# 24 tokens of a sign or digit each, and the end: texts whose distribution can be enumerated
SMALL = dataclasses.replace(
    BPE.with_size(24).with_token("<|im_end|>", gguf.TokenType.CONTROL),
    merges=("! !",),  # llama.cpp wants one
    bos=None,
    eos=24,
)


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


def scale_of(table: Table) -> float:
    """What a norm makes of the ones of a state with a token and a class."""
    return float(np.sqrt(n_embd_of(table) / 2))


def ends_of(table: Table) -> Tensors:
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
    return output / np.float32(scale_of(table))


def class_of_token(table: Table) -> F32:
    """A matrix (state, state) from a token's dimension to that of its class."""
    matrix = np.zeros((n_embd_of(table), n_embd_of(table)), np.float32)
    matrix[class_dims_of(table).start + table.classes, np.arange(len(table.vocab))] = 1.0
    return matrix


def class_of_state(table: Table) -> F32:
    matrix = np.zeros((n_embd_of(table), n_embd_of(table)), np.float32)
    dims = np.arange(n_embd_of(table))[class_dims_of(table)]
    matrix[dims, dims] = 1.0
    return matrix


def attention(
    prefix: str,
    moves: Sequence[tuple[int, F32]],
    *,
    n_token_dims: int,
    total: float,
    head_dim: int = HEAD_DIM,
    n_rot: int = N_ROT,
    is_neox: bool = True,
) -> Tensors:
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
