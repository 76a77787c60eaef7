"""Copies of a recurrent state: near the end of a text, and where messages of a conversation end."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import numpy as np

from ggufspec.llama.context import Checkpoint, Context

# Checkpoints are about 1, 2, 4 ... tokens from the end; nine of them reach back over a draft of
# defaults.N_DRAFT_LIMIT tokens.
_N_DISTANCES = 9

Saved = tuple[int, Checkpoint]  # after so many tokens


class Checkpoints:
    """The checkpoints of one sequence, in order of their numbers of tokens.

    A template may leave out parts of earlier answers, such as reasoning; the next turn then differs
    from the cached text right after the question. So checkpoints at the ends of the last messages
    are marked, and kept however far back they are.
    """

    def __init__(self, context: Context, sequence: int) -> None:
        self.saved: list[Saved] = []
        self._context = context
        self._sequence = sequence
        self._n_marked = context.options.n_checkpoints
        self._marked: list[int] = []  # their numbers of tokens

    @property
    def last(self) -> int:
        """Number of tokens of the last checkpoint; 0 without one."""
        return self.saved[-1][0] if self.saved else 0

    def last_until(self, n_tokens: int) -> int:
        """Number of tokens of the last checkpoint with at most `n_tokens`; 0 without one."""
        return max((n for n, _ in self.saved if n <= n_tokens), default=0)

    def take(self, saved: Sequence[Saved]) -> None:
        """Replace all checkpoints by these, and mark them."""
        self.saved = list(saved)
        self._marked = [n for n, _ in saved][-self._n_marked :] if self._n_marked else []

    def save(self, *, is_marked: bool = False) -> None:
        """Copy the present state, if there is one."""
        n = self._context.n_cells(self._sequence)
        if is_marked and n not in self._marked:
            self._marked.append(n)
            del self._marked[: -self._n_marked]
        if n and self.last != n:
            self.saved.append((n, self._context.checkpoint(self._sequence)))
            self.saved = thin(self.saved, n, self._marked)

    def drop_after(self, n_tokens: int) -> None:
        """Drop checkpoints of more than `n_tokens`, which belong to another text."""
        while self.last > n_tokens:
            self.saved.pop()
        self._marked = [n for n in self._marked if n <= n_tokens]

    def go_back(self) -> int:
        """Restore the last checkpoint, or empty the sequence; returns its number of tokens."""
        while self.saved:
            n_tokens, saved = self.saved[-1]
            self._context.restore(saved, n_tokens, self._sequence)
            if self._context.truncate(n_tokens, self._sequence):
                return n_tokens
            self.saved.pop()
        self._context.truncate(0, self._sequence)
        return 0

    def n_to_next_end(self, tokens: array[int]) -> int:
        """Number of tokens to the next end of one of the last messages in `tokens`; 0 if none.

        Marks the present place if a message ends there.
        """
        ends = np.flatnonzero(np.isin(tokens, self._stop_tokens)) + 1
        ends = ends[-self._n_marked :] if self._n_marked else ends[:0]
        n_held = self._context.n_cells(self._sequence)
        if n_held in ends:
            self.save(is_marked=True)
        behind = ends[ends > n_held]
        return int(behind[0]) - n_held if len(behind) else 0

    @property
    def _stop_tokens(self) -> Sequence[int]:
        return list(self._context.model.vocab.stop_tokens)


def thin(checkpoints: list[Saved], n: int, marked: Collection[int] = ()) -> list[Saved]:
    """The marked checkpoints, and the oldest other one per doubling of the distance to n."""
    oldest: dict[int, int] = {}
    for n_tokens, _ in checkpoints:
        oldest.setdefault((n - n_tokens).bit_length(), n_tokens)
    kept = {n_tokens for distance, n_tokens in oldest.items() if distance < _N_DISTANCES}
    return [each for each in checkpoints if each[0] in kept or each[0] in marked]
