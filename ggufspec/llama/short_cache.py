"""Chooses the tokens that a draft reads if its cache is smaller than the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ggufspec.decoding.types import token_array
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import N_FIRST

# Of the cache: what is held once tokens were left out, so that this happens rarely ...
_SHARE_HELD = 3 / 4
# ... and the newest tokens that are not worth reading more for, after a text went back.
_SHARE_LEAST = 1 / 4


class ShortCache:
    """The cells of a sequence of a context with `options.n_kept`.

    For a text that does not fit, they hold its first N_FIRST and its newest tokens. That changes
    the drafts, not the text.
    """

    def __init__(self, context: Context, sequence: int) -> None:
        self._context = context
        self._sequence = sequence
        self._n_kept = context.options.n_kept

    def room(self, tokens: Sequence[int], n_more: int = 0) -> array[int]:
        """The tokens to read of a text, so that they and `n_more` further tokens fit.

        Leaves out more of a text that has grown too long, and drops the cells of those tokens.
        Reads tokens that were left out if the text has changed there, or has become so short that
        few of its newest tokens would be held.
        """
        tokens, n_left_out = token_array(tokens), self._n_left_out
        n = len(tokens) + n_more
        if n <= self._n_kept and not n_left_out:
            return tokens
        n_known = self._context.n_common(_read(tokens, n_left_out), self._sequence)
        n_cells = self._context.n_cells(self._sequence)
        has_parted = n_known <= min(N_FIRST, max(n_cells - 1, 0))
        if has_parted or n - N_FIRST - n_left_out < self._n_kept * _SHARE_LEAST:
            # Also the first tokens: layers with sliding windows may have lost them.
            self._context.truncate(0, self._sequence)
            n_left_out = n_known = 0
        if n - n_left_out > self._n_kept:
            n_dropped = n - int(self._n_kept * _SHARE_HELD) - n_left_out
            n_left_out += n_dropped
            if n_known > N_FIRST + n_dropped:
                self._context.drop_middle(N_FIRST, n_dropped, self._sequence)
        self._context.n_left_out[self._sequence] = n_left_out
        return _read(tokens, n_left_out)

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of a text are held, with those that are left out."""
        n = self._context.n_common(_read(tokens, self._n_left_out), self._sequence)
        return n + self._n_left_out if n > N_FIRST else n

    def borrow(self, sequence: int, tokens: Sequence[int]) -> None:
        """Copy the cells that another sequence holds of a prefix of `tokens`."""
        context, n_left_out = self._context, self._context.n_left_out[sequence]
        context.copy_prefix(sequence, self._sequence, _read(tokens, n_left_out))
        context.n_left_out[self._sequence] = n_left_out

    @property
    def _n_left_out(self) -> int:
        return self._context.n_left_out[self._sequence]


def _read(tokens: Sequence[int], n_left_out: int) -> array[int]:
    """The tokens of a text without the `n_left_out` after its first N_FIRST."""
    tokens = token_array(tokens)
    return tokens[:N_FIRST] + tokens[N_FIRST + n_left_out :] if n_left_out else tokens
