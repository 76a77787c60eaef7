"""Limits the tokens of a text, and chooses which to drop when the context is full."""

from __future__ import annotations

import sys
from array import array

from ggufspec.engine.options import CheckedOptions


class Room:
    """n_end: number of tokens, prompt included, at which the text ends or is shifted.

    n_dropped: tokens dropped so far.
    """

    def __init__(
        self, options: CheckedOptions, *, n_prompt: int, n_ctx: int, can_shift: bool
    ) -> None:
        """`can_shift`: it has no constraint, whose state counts from the prompt on."""
        n_most = n_ctx if options.max_tokens is None else options.max_tokens
        self.n_end = self._n_wanted = min(n_prompt + n_most, n_ctx)
        if can_shift and options.context_shift and not options.min_tokens:
            self._n_wanted = sys.maxsize if options.max_tokens is None else n_prompt + n_most
        self.n_dropped = 0
        self._n_ctx = n_ctx
        self._n_keep = min(n_prompt if options.n_keep < 0 else options.n_keep, n_ctx // 2)

    @property
    def can_shift(self) -> bool:
        """Whether the text may continue beyond the context, by dropping older tokens."""
        return self.n_end < self._n_wanted

    def shift(self, tokens: array[int]) -> None:
        """Drop the older half of a text, except the first tokens.

        The remaining tokens are processed again, so the next token has the model's distribution
        after them. (llama.cpp moves its cells instead, which depend on the dropped tokens.)
        """
        n = (len(tokens) - self._n_keep) // 2
        del tokens[self._n_keep : self._n_keep + n]
        self.n_dropped += n
        self._n_wanted -= n
        self.n_end = min(self._n_wanted, self._n_ctx)
