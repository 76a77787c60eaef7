"""Finds banned strings in a text while it is generated, and holds back what may become one.

When a token completes a banned string, the text goes back to the token in which the string began,
and that token is not allowed there: each token has the model's distribution without the tokens that
led to a banned string at its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.types import Round
from ggufspec.engine.text import n_begun


class HeldToken(NamedTuple):
    """A token with its bytes, and the logits that it was drawn from if they are needed."""

    token: int
    piece: bytes
    row: NDArray[np.float32] | None
    is_drafted: bool


class BannedStrings:
    """Tokens that are held back. Upper and lower case of ASCII are the same."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(text.encode().lower() for text in strings)
        self._n_longest = max(map(len, self._strings))
        self._held: list[HeldToken] = []

    def push(self, token: HeldToken) -> Sequence[HeldToken]:
        """Hold one more token. If it completes a string, forget and return the string's tokens."""
        self._held.append(token)
        text = self._text()
        at = min((at for each in self._strings if (at := text.find(each)) >= 0), default=-1)
        return () if at < 0 else self._taken(self._token_at(at), len(self._held))

    def release(self) -> Sequence[HeldToken]:
        """The tokens in which no banned string can begin; they are held no longer."""
        text = self._text()
        n = n_begun(text, self._strings, self._n_longest - 1)
        return self._taken(0, self._token_at(len(text) - n) if n else len(self._held))

    def release_all(self) -> Sequence[HeldToken]:
        return self._taken(0, len(self._held))

    def _taken(self, begin: int, end: int) -> Sequence[HeldToken]:
        taken = self._held[begin:end]
        del self._held[begin:end]
        return taken

    def _text(self) -> bytes:
        return b"".join(each.piece for each in self._held).lower()

    def _token_at(self, at: int) -> int:
        ends = accumulate(len(each.piece) for each in self._held)
        return next(i for i, end in enumerate(ends) if end > at)


def drop_tokens(rounds: list[Round], n: int) -> None:
    """Remove the last `n` tokens from rounds; drafted ones count as not accepted."""
    for i in reversed(range(len(rounds))):
        tokens = rounds[i].tokens
        n_kept = max(len(tokens) - n, 0)
        n_accepted = min(rounds[i].n_accepted, n_kept)
        rounds[i] = rounds[i]._replace(tokens=tokens[:n_kept], n_accepted=n_accepted)
        n -= len(tokens) - n_kept
        if not n:
            return
