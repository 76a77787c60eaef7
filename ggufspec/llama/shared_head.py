"""The session of a head that reads the target's KV cache (Gemma 4 assistants).

https://github.com/huggingface/transformers/blob/main/docs/source/en/model_doc/gemma4_assistant.md
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ggufspec.decoding.types import Logits, n_same, token_array
from ggufspec.errors import NoRoomError
from ggufspec.llama import extension
from ggufspec.llama.batch_part import BatchPart
from ggufspec.llama.context import Context
from ggufspec.llama.extension import Hidden
from ggufspec.llama.saved_text import SavedText

# Hidden states of the last tokens of a batch that are kept: those of a round, of which some may be
# rejected.
_MOST_KEPT = 64


class SharedCacheSession:
    """A head without cells of its own, as a function from tokens to logits.

    It drafts all tokens at the position of the text's last token, from the target's cells before
    it: the first with the target's hidden state of the previous token, the others with its own.
    """

    def __init__(self, context: Context, target: Context, sequence: int) -> None:
        self.sequence = sequence
        self._context = context
        self._target = target
        self._first = 0  # the position of the first state that the target gave and is kept
        self._states = np.empty((0, context.n_hidden), np.float32)
        self._text = array("i")  # the tokens of the last score
        self._n_true = 0  # those of them that are not drafted
        self._own: list[Hidden] = []  # its own states (1, width) after _n_true, _n_true + 1 ...

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """Logits after the last of `tokens`, then after each of `draft`: (n_draft + 1, n_vocab).

        Valid until the next score. Drops the target's cells that differ from `tokens`, and the cell
        of the last token, which the target computes again. Raises NoRoomError if the target has not
        given the hidden state, DecodeError, ClosedError.
        """
        if draft:
            texts = [[*tokens, *draft[:i]] for i in range(len(draft) + 1)]
            return np.concatenate([self.score(text).copy() for text in texts])
        tokens = token_array(tokens)
        n_true = self._target.resume(tokens, len(tokens) - 1, self.sequence) + 1
        known = min(n_same(tokens, self._text), len(tokens) - 1)
        if n_true != self._n_true or known < n_true:
            known, self._n_true = n_true - 1, n_true
        del self._own[known + 1 - n_true :]
        self._text = tokens[:known]
        for token in tokens[known:]:
            self._own.append(self._step(token, self._own[-1] if self._own else self._given()))
            self._text.append(token)
        return self._context.rows(0, 1)

    def follow(self, tokens: Sequence[int]) -> int:
        """The target is about to read `tokens`.

        Returns the maximum number that it need not decode again: all but the last one, whose state
        would otherwise be missing.
        """
        n = len(tokens)
        return n if self._first < n <= self._first + len(self._states) else max(n - 1, 0)

    def take(self, position: int, part: BatchPart, states: Hidden) -> None:
        """The target, which reads no trees, has decoded `part`; `states` is copied."""
        kept = states[-_MOST_KEPT:].copy()
        self._states, self._first = kept, position + len(states) - len(kept)

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of `tokens` the target's cache holds. Raises ClosedError."""
        return self._target.n_common(token_array(tokens), self.sequence)

    def forget(self) -> None:
        """Drop all states of a text. Raises ClosedError."""
        self._context.truncate(0, self.sequence)
        self._states = self._states[:0]
        self._text, self._n_true, self._own = array("i"), 0, []

    def save(self, tokens: Sequence[int]) -> SavedText | None:
        """Nothing: the target's cells are those that it reads."""
        return None

    def restore(self, saved: SavedText | None) -> None:
        """Drop all states: the target has received the cells of another text."""
        self._states = self._states[:0]
        self._text, self._n_true, self._own = array("i"), 0, []

    def borrow(self, sequence: int, tokens: Sequence[int]) -> None:
        """Nothing to do: the target's cells are those that it borrows."""

    def _given(self) -> Hidden:
        """The target's state of the token before the text's last one."""
        if self._n_true < 2:
            raise NoRoomError("a head without cells needs two tokens to draft from")
        i = self._n_true - 2 - self._first
        if not 0 <= i < len(self._states):
            raise NoRoomError("the hidden state of this text is missing")
        return self._states[i : i + 1]

    def _step(self, token: int, state: Hidden) -> Hidden:
        """Compute logits after a token; returns its own state."""
        context = self._context
        context.truncate(0, self.sequence)  # llama.cpp has added no cell
        context.decode_hidden(array("i", [token]), state, 1, self.sequence)
        own: Hidden = extension.hidden(context.pointer, 1, context.n_hidden).copy()
        return own
