"""A head without a model that has the distributions of a block at once: see BlockHeadSession."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from fakes import FakeSession

from ggufspec import _native
from ggufspec.decoding.types import Logits
from ggufspec.errors import NoRoomError

# Logits of the next token: by the text that the target has decoded, and by what was drafted since.
Rows = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]


class FakeBlocks(FakeSession):
    """Its block begins behind `text`, which the loop extends.

    `is_chained`: a row depends on the token drafted before it, as of DFlash2: then there is none
    behind a token that its row cannot give. Else it depends on how many were drafted.
    """

    def __init__(
        self, text: Sequence[int], rows: Rows, n_rows: int, *, is_chained: bool = False
    ) -> None:
        super().__init__(lambda prefix: self._row(prefix))
        self.text = text
        self._rows = rows
        self.n_rows = n_rows
        self._is_chained = is_chained
        self.last_row = np.empty(0)

    def score(
        self, tokens: Sequence[int], draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Logits:
        assert not draft
        self.last_row = self._row(tuple(tokens))
        return super().score(tokens)

    def gaps(self, tokens: Sequence[int], n_most: int) -> Sequence[float]:
        known, drafted = self._split(tuple(tokens))
        found: list[float] = []
        while len(found) < n_most and len(drafted) < self.n_rows:
            row = np.asarray(self._rows(known, drafted), np.float32)
            found.append(_native.gap_of(row[None]))
            drafted = (*drafted, int(row.argmax()))
        return found

    def _split(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        n = len(self.text)
        assert tokens[:n] == tuple(self.text)
        return tokens[:n], tokens[n:]

    def _row(self, tokens: tuple[int, ...]) -> np.ndarray:
        known, drafted = self._split(tokens)
        if len(drafted) >= self.n_rows:
            raise NoRoomError("behind the block")
        if self._is_chained and drafted:
            before = self._rows(known, drafted[:-1])
            if before[drafted[-1]] == -np.inf:
                raise NoRoomError("behind a token that is no candidate")
        return self._rows(known, drafted)
