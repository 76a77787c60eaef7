"""A model as a function from tokens to logits. The KV cache is its private memo.

Knows which tokens the cells of its context hold: forgets what differs, decodes what is missing.
Nobody outside hears of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from ggufspec.core import Logits, token_array
from ggufspec.llama.context import Checkpoint, Context

# A model that cannot drop its tail re-decodes from a checkpoint; that many tokens may be decoded
# again with each draft before they get a batch, and a checkpoint, of their own.
_MAX_REPEATED = 16
# Checkpoints lie at distances of about 1, 2, 4 ... tokens from the end, so that a few suffice:
# nine reach back over a draft of defaults.N_DRAFT_LIMIT tokens.
_N_DISTANCES = 9
_SLOW_PIECE_SECONDS = 1.0
_MIN_PIECE = 32


class LlamaSession:
    """The one sequence of a context, as a core.Session."""

    def __init__(
        self, context: Context, *, n_vocab: int | None = None, drafts: bool = False
    ) -> None:
        """`n_vocab`: cut or pad rows to that width, if a draft's vocabulary is padded differently.

        `drafts`: this is the draft model, whose every token may be taken back.
        """
        self._context = context
        self._n_vocab = context.n_vocab if n_vocab is None else n_vocab
        self._drafts = drafts
        self._can_drop_tail = context.model.can_drop_tail
        self._changes_width = self._n_vocab != context.n_vocab
        self._checkpoints: list[tuple[int, Checkpoint]] = []  # by rising number of cells

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """Logits after the last of `tokens`, then after each of `draft`: (n_draft + 1, n_vocab).

        Valid until the next score or feed of this session. Raises DecodeError, ClosedError.
        """
        context = self._context
        tokens = token_array(tokens)
        n_rows = len(draft) + 1
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
        context.decode(wanted, n_rows)
        rows = context.rows(len(wanted) - n_rows, n_rows)
        return self._as_wide_as_asked(rows) if self._changes_width else rows

    def feed(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Read `tokens` ahead of a score, in pieces; `progress` hears (done, of).

        Returns how many of them were known already.
        """
        tokens = token_array(tokens)
        if self._context.holds(tokens):
            return len(tokens)
        known = self._resume(tokens, len(tokens))
        self._decode_all(tokens[known:], progress)
        return known

    def forget(self) -> None:
        """Hold nothing any more. Raises ClosedError."""
        self._checkpoints.clear()
        self._context.truncate(0)

    def _resume(self, tokens: array[int], n_most: int) -> int:
        """Forget what differs from the first `n_most` tokens; returns how many are still known."""
        known = self._context.resume(tokens, n_most)
        if not self._can_drop_tail:
            # Checkpoints behind what is left belong to another text.
            n_cells = self._context.n_cells
            while self._checkpoints and self._checkpoints[-1][0] > n_cells:
                self._checkpoints.pop()
        return self._go_back() if known < 0 else known

    def _go_back(self) -> int:
        """Restore the last checkpoint that still holds, or forget everything."""
        while self._checkpoints:
            n_cells, saved = self._checkpoints[-1]
            self._context.restore(saved, n_cells)
            if self._context.truncate(n_cells):
                return n_cells
            self._checkpoints.pop()
        self._context.truncate(0)
        return 0

    def _decode_all(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Decode without logits, in pieces small enough that Ctrl-C and progress stay lively."""
        done, piece = 0, self._context.n_batch
        while done < len(tokens):
            before = self._context.decode_seconds
            self._context.decode(tokens[done : done + piece], 0)
            done = min(done + piece, len(tokens))
            if self._context.decode_seconds - before > _SLOW_PIECE_SECONDS:
                piece = max(piece // 2, min(_MIN_PIECE, piece))
            if progress is not None:
                progress(done, len(tokens))

    def _save_checkpoint(self) -> None:
        n = self._context.n_cells
        if n and not (self._checkpoints and self._checkpoints[-1][0] == n):
            self._checkpoints.append((n, self._context.checkpoint()))
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
