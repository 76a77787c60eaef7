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
        self._cells = token_array()
        self._clean = True  # False: a decode broke off, and llama.cpp may hold more than _cells
        self._checkpoints: list[tuple[int, Checkpoint]] = []  # by rising number of cells

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """Logits after the last of `tokens`, then after each of `draft`: (n_draft + 1, n_vocab).

        Valid until the next score or feed of this session. Raises DecodeError, ClosedError.
        """
        tokens = token_array(tokens)
        n_rows = len(draft) + 1
        known = min(common_prefix(self._cells, tokens), len(tokens) - 1)
        known = self._forget_beyond(known)
        if draft and not self._can_drop_tail and len(tokens) - known > _MAX_REPEATED:
            self._decode_all(tokens[known:-1])
            known = len(tokens) - 1
        wanted = [*tokens[known:], *draft]
        n_before = max(len(wanted) - self._context.n_batch, 0)
        self._decode_all(wanted[:n_before])
        if draft or self._drafts:
            self._save_checkpoint()
        last = wanted[n_before:]
        self._decode(last, n_rows)
        return self._as_wide_as_asked(self._context.rows(len(last) - n_rows, n_rows))

    def feed(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Read `tokens` ahead of a score, in pieces; `progress` hears (done, of).

        Returns how many of them were known already.
        """
        tokens = token_array(tokens)
        known = common_prefix(self._cells, tokens)
        if known < len(tokens):
            known = self._forget_beyond(known)
            self._decode_all(tokens[known:], progress)
        return known

    def _forget_beyond(self, n: int) -> int:
        """Drop all but the first `n` cells; returns how many remain, which may be fewer."""
        if n == len(self._cells) and self._clean:
            return n
        # Interrupted anywhere below, _cells claims no more than what llama.cpp holds.
        self._clean = False
        del self._cells[n:]
        if not self._context.truncate(n):
            self._go_back(n)
        self._checkpoints = [kept for kept in self._checkpoints if kept[0] <= len(self._cells)]
        self._clean = True
        return len(self._cells)

    def _go_back(self, n: int) -> None:
        """Restore the last checkpoint of at most `n` cells, or forget everything."""
        for n_cells, saved in reversed(self._checkpoints):
            if n_cells <= n:
                del self._cells[n_cells:]
                self._context.restore(saved)
                if self._context.truncate(n_cells):
                    return
        del self._cells[:]
        self._context.truncate(0)

    def _decode_all(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Decode without logits, in pieces small enough that Ctrl-C and progress stay lively."""
        done, piece = 0, self._context.n_batch
        while done < len(tokens):
            before = self._context.decode_seconds
            self._decode(tokens[done : done + piece], 0)
            done = min(done + piece, len(tokens))
            if self._context.decode_seconds - before > _SLOW_PIECE_SECONDS:
                piece = max(piece // 2, min(_MIN_PIECE, piece))
            if progress is not None:
                progress(done, len(tokens))

    def _decode(self, tokens: Sequence[int], n_rows: int) -> None:
        self._clean = False
        self._context.decode(tokens, len(self._cells), n_rows)
        self._cells.extend(tokens)
        self._clean = True

    def _save_checkpoint(self) -> None:
        n = len(self._cells)
        if self._can_drop_tail or n == 0:
            return
        if self._checkpoints and self._checkpoints[-1][0] == n:
            return
        self._checkpoints.append((n, self._context.checkpoint()))
        self._checkpoints = thin(self._checkpoints, n)

    def _as_wide_as_asked(self, rows: Logits) -> Logits:
        n = rows.shape[1]
        if n == self._n_vocab:
            return rows
        asked = np.full((len(rows), self._n_vocab), -np.inf, np.float32)
        asked[:, :n] = rows[:, : self._n_vocab]
        return asked


def common_prefix(a: array[int], b: array[int]) -> int:
    """The length of the common prefix, by slices: comparing those is a loop in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def thin(checkpoints: list[tuple[int, Checkpoint]], n: int) -> list[tuple[int, Checkpoint]]:
    """Of the checkpoints in each doubling of the distance to `n`, keep the oldest."""
    oldest: dict[int, tuple[int, Checkpoint]] = {}
    for kept in checkpoints:
        oldest.setdefault((n - kept[0]).bit_length(), kept)
    return [kept for distance, kept in oldest.items() if distance < _N_DISTANCES]
