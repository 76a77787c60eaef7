"""The parts of a batch, and the protocol of heads that read a batch's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class BatchPart(NamedTuple):
    """One sequence in a batch: new tokens, and logits for the last `n_rows` of them.

    `parents`: the last tokens form a tree; parents[i] is the parent of node i: see types.Draft.
    """

    sequence: int
    tokens: Sequence[int]
    n_rows: int
    parents: Sequence[int] = ()


Parts = Sequence[BatchPart]


class Follower(Protocol):
    """Reads the hidden states of a context: see llama/head.py."""

    def follow(self, tokens: Sequence[int], sequence: int) -> int:
        """The context is about to read `tokens`; returns how many it may skip at most."""
        ...

    def after_decode(self, parts: Parts, positions: Sequence[int]) -> None:
        """Called after a decode of `parts` at `positions`. Raises DecodeError and Ctrl-C."""
        ...
