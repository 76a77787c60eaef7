"""A model as a function from tokens to logits. The KV cache is its private memo.

Knows which tokens the cells of its context hold: forgets what differs, decodes what is missing.
Nobody outside hears of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np

from ggufspec.decoding.types import Logits, token_array
from ggufspec.llama.context import Checkpoint, Context

# A model that cannot drop its tail re-decodes from a checkpoint; that many tokens may be decoded
# again with each draft before they get a batch, and a checkpoint, of their own.
_MAX_REPEATED = 16
# Checkpoints lie at distances of about 1, 2, 4 ... tokens from the end, so that a few suffice:
# nine reach back over a draft of defaults.N_DRAFT_LIMIT tokens.
_N_DISTANCES = 9
_SLOW_PIECE_SECONDS = 1.0
_MIN_PIECE = 32


class Wanted(NamedTuple):
    """What is still to be decoded for a score: the rows are those of the last `n_rows` tokens."""

    tokens: Sequence[int]
    n_rows: int


class LlamaSession:
    """A sequence of a context, as a core.Session."""

    def __init__(
        self,
        context: Context,
        sequence: int = 0,
        *,
        n_vocab: int | None = None,
        drafts: bool = False,
    ) -> None:
        """`n_vocab`: cut or pad rows to that width, if a draft's vocabulary is padded differently.

        `drafts`: this is the draft model, whose every token may be taken back.
        """
        self._context = context
        self.sequence = sequence
        self._n_vocab = context.n_vocab if n_vocab is None else n_vocab
        self._drafts = drafts
        self._can_drop_tail = context.model.can_drop_tail
        self._changes_width = self._n_vocab != context.n_vocab
        self._checkpoints: list[tuple[int, Checkpoint]] = []  # by rising number of cells

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """Logits after the last of `tokens`, then after each of `draft`: (n_draft + 1, n_vocab).

        Valid until the next score or feed of this session. Raises DecodeError, ClosedError.
        """
        wanted = self.prepare(tokens, draft)
        self._context.decode(wanted.tokens, wanted.n_rows, self.sequence)
        return self.rows_of(wanted, 0)

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many of the first of `tokens` are held. Raises ClosedError."""
        return self._context.n_common(token_array(tokens), self.sequence)

    @property
    def n_held(self) -> int:
        """How many tokens are held."""
        return self._context.n_cells(self.sequence)

    def feed(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Read `tokens` ahead of a score, in pieces; `progress` hears (done, of).

        Returns how many of them were known already.
        """
        pieces = self.feeding(tokens, progress)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                n_known: int = end.value
                return n_known

    def feeding(
        self,
        tokens: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        n_most: Callable[[], int | None] = lambda: None,
    ) -> Generator[None, None, int]:
        """The same, a piece at a time: between two, others may use this session.

        `n_most()`: tokens that the next piece may have; None: as many as are quick.
        """
        tokens = token_array(tokens)
        if self.n_common(tokens) == len(tokens):
            return len(tokens)
        first = known = self._resume(tokens, len(tokens))
        piece = self._context.n_batch
        while known < len(tokens):
            n = min(n_most() or piece, piece, len(tokens) - known)
            piece = self._decode(tokens[known : known + n], piece)
            if progress is not None:
                progress(max(known + n - first, 0), len(tokens) - first)
            yield
            known = self._resume(tokens, len(tokens))
        return first

    def forget(self) -> None:
        """Hold nothing any more. Raises ClosedError."""
        self._checkpoints.clear()
        self._context.truncate(0, self.sequence)

    def borrow(self, other: LlamaSession, n_tokens: int) -> None:
        """Hold the first `n_tokens` that another sequence of the same context holds, and no more.

        They are not read again. Only where sequences share their memory.
        """
        if self._context.can_share_passes:
            self._context.copy_prefix(other.sequence, self.sequence, n_tokens)

    def prepare(self, tokens: Sequence[int], draft: Sequence[int]) -> Wanted:
        """Forget what differs and decode what no one batch can take; returns what is left."""
        context = self._context
        tokens = token_array(tokens)
        known = self._resume(tokens, len(tokens) - 1)
        if not self._can_drop_tail and (draft or self._drafts):
            if draft and len(tokens) - known > _MAX_REPEATED:
                self._decode_all(tokens[known:-1])
                known = len(tokens) - 1
            self._save_checkpoint()
        wanted = [*tokens[known:], *draft]
        if len(wanted) > context.n_batch:
            n_before = len(wanted) - context.n_batch
            self._decode_all(wanted[:n_before])
            del wanted[:n_before]
        return Wanted(wanted, len(draft) + 1)

    def rows_of(self, wanted: Wanted, start: int) -> Logits:
        """The rows of what was wanted, which stands in the last batch from `start` on."""
        first = start + len(wanted.tokens) - wanted.n_rows
        rows = self._context.rows(first, wanted.n_rows)
        return self._as_wide_as_asked(rows) if self._changes_width else rows

    def _resume(self, tokens: array[int], n_most: int) -> int:
        """Forget what differs from the first `n_most` tokens; returns how many are still known."""
        known = self._context.resume(tokens, n_most, self.sequence)
        if not self._can_drop_tail:
            # Checkpoints behind what is left belong to another text.
            n_cells = self._context.n_cells(self.sequence)
            while self._checkpoints and self._checkpoints[-1][0] > n_cells:
                self._checkpoints.pop()
        return self._go_back() if known < 0 else known

    def _go_back(self) -> int:
        """Restore the last checkpoint that still holds, or forget everything."""
        while self._checkpoints:
            n_cells, saved = self._checkpoints[-1]
            self._context.restore(saved, n_cells, self.sequence)
            if self._context.truncate(n_cells, self.sequence):
                return n_cells
            self._checkpoints.pop()
        self._context.truncate(0, self.sequence)
        return 0

    def _decode_all(self, tokens: Sequence[int]) -> None:
        """Decode without logits, in pieces small enough that Ctrl-C stays lively."""
        done, piece = 0, self._context.n_batch
        while done < len(tokens):
            part = tokens[done : done + piece]
            piece = self._decode(part, piece)
            done += len(part)

    def _decode(self, tokens: Sequence[int], piece: int) -> int:
        """Decode without logits; how many tokens the next piece should have, after `piece`."""
        before = self._context.decode_seconds
        self._context.decode(tokens, 0, self.sequence)
        if self._context.decode_seconds - before > _SLOW_PIECE_SECONDS:
            return max(piece // 2, min(_MIN_PIECE, piece))
        return piece

    def _save_checkpoint(self) -> None:
        n = self._context.n_cells(self.sequence)
        if n and not (self._checkpoints and self._checkpoints[-1][0] == n):
            self._checkpoints.append((n, self._context.checkpoint(self.sequence)))
            self._checkpoints = thin(self._checkpoints, n)

    def _as_wide_as_asked(self, rows: Logits) -> Logits:
        n = rows.shape[1]
        asked = np.full((len(rows), self._n_vocab), -np.inf, np.float32)
        asked[:, :n] = rows[:, : self._n_vocab]
        return asked


def thin(checkpoints: list[tuple[int, Checkpoint]], n: int) -> list[tuple[int, Checkpoint]]:
    """Of the checkpoints in each doubling of the distance to `n`, keep the oldest."""
    oldest: dict[int, tuple[int, Checkpoint]] = {}
    for kept in checkpoints:
        oldest.setdefault((n - kept[0]).bit_length(), kept)
    return [kept for distance, kept in oldest.items() if distance < _N_DISTANCES]
