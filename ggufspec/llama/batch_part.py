"""The parts of a batch, and what reads the hidden states that a batch leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class BatchPart(NamedTuple):
    """One sequence in a batch: tokens after those that it holds, logits of the last `n_rows`.

    `parents`: the last tokens are a tree, and these the nodes that they follow: see types.Draft.
    """

    sequence: int
    tokens: Sequence[int]
    n_rows: int
    parents: Sequence[int] = ()


Parts = Sequence[BatchPart]


class Follower(Protocol):
    """What reads the hidden states of a context: see llama/head.py."""

    def follow(self, tokens: Sequence[int], sequence: int) -> int:
        """How many of `tokens`, which it is about to read, it need not decode again, at most."""
        ...

    def after_decode(self, parts: Parts, positions: Sequence[int]) -> None:
        """It has decoded `parts` at `positions`. Raises DecodeError, KeyboardInterrupt."""
        ...
