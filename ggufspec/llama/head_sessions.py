"""Sessions of heads that draft a block of tokens in one pass, or read the target's KV cache.

DFlash, DFlash2, DSpark: https://arxiv.org/abs/2602.06036, and llama.cpp's src/models/dflash.cpp.
Gemma 4 assistants:
https://github.com/huggingface/transformers/blob/main/docs/source/en/model_doc/gemma4_assistant.md
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ggufspec import _native
from ggufspec.decoding.types import Logits, n_same, token_array
from ggufspec.errors import NoRoomError
from ggufspec.llama import hidden_states, saved_text
from ggufspec.llama.context import Context
from ggufspec.llama.hidden_states import BatchPart, GivenStates, Hidden
from ggufspec.llama.saved_text import SavedText
from ggufspec.models.head_facts import Block

# Without cells, the states of this many last tokens of a batch are kept: of a round, some of whose
# tokens may be rejected.
_MOST_KEPT = 64


class BlockHead(Protocol):
    """What the sessions of one head share."""

    context: Context
    n_unread_max: int  # see head.Head
    block_owner: BlockHeadSession | None  # whose block was computed last


class BlockHeadSession:
    """A head as a function from tokens to logits; see decoding.types.Session.

    It writes the target's states into its cells, one for each token that the target has decoded.
    After them it computes a block: the text's last token and masks, whose cells are dropped at
    once. So a row of a block depends on the text and its place alone, not on the tokens between.
    With DFlash2, a row also depends on the token before it.
    """

    def __init__(self, head: BlockHead, block: Block, sequence: int) -> None:
        self.sequence = sequence
        self._head = head
        self._context = head.context
        self._block = block
        self._given = GivenStates(head.n_unread_max)
        self._held = array("i")  # the tokens whose states are in cells
        self._n_true = 0  # length of the text of its last block, if its rows are still there
        self._text = array("i")  # that text
        self._gaps: list[float] = []  # logit gaps of its first rows
        self._candidates: Candidates | None = None  # of its rows, with DFlash2
        self._n_firm = 0  # see saved_text.n_firm

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """See decoding.types.Session. Raises DecodeError, ClosedError.

        NoRoomError beyond the end of a block, if the target has not given states of the text, and
        (DFlash2) after a token that is not a candidate.
        """
        if draft:
            texts = [[*tokens, *draft[:i]] for i in range(len(draft) + 1)]
            return np.concatenate([self.score(text).copy() for text in texts])
        tokens = token_array(tokens)
        i = self._row(tokens)
        if self._candidates is not None:
            return self._candidates.row(i, tokens[self._n_true :], self._context.n_vocab)
        return self._context.rows(self._block.first + i, 1)

    def gaps(self, tokens: Sequence[int], n_most: int) -> Sequence[float]:
        """Logit gaps of the row after `tokens` and of the next ones of its block, at most `n_most`.

        With DFlash2, those along the likeliest tokens. All are known before a token is drawn.
        Raises the errors of `score`.
        """
        tokens = token_array(tokens)
        i = self._row(tokens)
        if self._candidates is not None:
            return self._candidates.gaps(i, tokens[self._n_true :], n_most)
        for k in range(len(self._gaps), min(i + n_most, self._n_rows)):
            self._gaps.append(_native.gap_of(self._context.rows(self._block.first + k, 1)))
        return self._gaps[i : i + n_most]

    def follow(self, tokens: Sequence[int]) -> int:
        tokens = token_array(tokens)
        self._given.choose_path(tokens)
        self._given.cut(tokens)
        n_held = self._drop(tokens)
        return self._given.end if self._given.first <= n_held <= self._given.end else n_held

    def take(self, position: int, part: BatchPart, states: Hidden) -> None:
        tokens = token_array(part.tokens[: len(part.tokens) - len(part.parents)])
        del self._held[position + n_same(tokens, self._held[position:]) :]
        self._given.take(position, part, states)
        n_left = 0 if part.parents else max(part.n_rows - 1, 0)
        if len(self._given) > self._head.n_unread_max:
            self._read(self._given.end - n_left)

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of `tokens` it has read. Raises ClosedError."""
        tokens = token_array(tokens)
        n = min(n_same(tokens, self._held), self._context.n_common(tokens, self.sequence))
        return n if n >= self._n_firm else 0

    def _drop(self, tokens: array[int]) -> int:
        n = self.n_common(tokens)
        del self._held[n:]
        if n < self._n_firm:
            self._n_firm = 0
        return n

    def piece(self, tokens: Sequence[int], n_most: int | None = None) -> None:
        """None: it reads prompts along with the target."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Read the last tokens that the target has read; earlier ones were read along with it."""
        self.follow(tokens)
        self._read(self._given.end)

    def forget(self) -> None:
        """Empty the cache of this sequence. Raises ClosedError."""
        self._context.truncate(0, self.sequence)
        del self._held[:]
        self._n_firm = 0
        self._given.forget()
        self._head.block_owner = None

    def save(self, tokens: Sequence[int]) -> SavedText | None:
        """A copy of its cells of a text. Raises DecodeError, ClosedError."""
        self.feed(tokens)
        self._context.truncate(len(self._held), self.sequence)
        return saved_text.save(self._context, self.sequence)

    @property
    def n_bytes(self) -> int:
        return self._context.n_bytes(self.sequence)

    def restore(self, saved: SavedText | None) -> None:
        """Replace its cells by a saved copy. Raises DecodeError, ClosedError."""
        self.forget()
        if saved is not None:
            saved_text.restore(self._context, saved, self.sequence)
            self._held = saved.tokens[:]
            self._n_firm = saved_text.n_firm(self._context, len(saved.tokens))

    def borrow(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take over `tokens`, with which the text of another sequence that has read them begins."""
        if self._context.can_share_passes:
            self.forget()
            tokens = token_array(tokens)
            self._context.copy_prefix(sequence, self.sequence, tokens)
            self._held = tokens[:]

    def _row(self, tokens: array[int]) -> int:
        self._given.choose_path(tokens)
        n_known = n_same(tokens, self._held)
        if self._given.first <= n_known:  # else the states belong to another text
            n_known = max(n_known, self._given.n_known(tokens))
        n_true = min(len(tokens), n_known + 1)
        i, is_there = len(tokens) - n_true, self._head.block_owner is self
        if not (is_there and n_true == self._n_true and n_same(tokens, self._text) == n_true):
            self._compute(tokens[:n_true], i)
        if i >= self._n_rows:
            raise NoRoomError(f"the head drafts {self._n_rows} tokens at once")
        return i

    @property
    def _n_rows(self) -> int:
        n_room = self._context.n_ctx - self._n_true + 1
        return min(self._context.n_rows, n_room) - self._block.first

    def _compute(self, text: array[int], i: int) -> None:
        """Compute the block after `text`, if blocks have a row `i`."""
        context, block = self._context, self._block
        self._head.block_owner = None
        self._n_true, self._text, self._gaps = len(text), text, []
        if i >= self._n_rows:
            raise NoRoomError(f"the head drafts {max(self._n_rows, 0)} tokens at once")
        n_before = len(text) - 1
        self._drop(text[:n_before])
        self._read(n_before)
        if len(self._held) < n_before:
            raise NoRoomError("hidden states of this text are missing")
        context.truncate(n_before, self.sequence)
        n_tokens = self._n_rows + block.first
        # llama.cpp computes logits of all tokens, and keeps the first ones unless all are asked
        # for. With DFlash2, none are used, but one is asked for: without any, states are read.
        masks = [block.mask] * (n_tokens - 1)
        n_logits = 1 if block.n_candidates else n_tokens
        try:
            context.decode(array("i", [text[-1], *masks]), n_logits, self.sequence)
        finally:
            context.truncate(n_before, self.sequence)
        if block.n_candidates:
            rows = hidden_states.hidden(context.pointer, n_tokens, context.model.n_embd)
            self._candidates = Candidates(rows[block.first :], block.n_candidates)
        self._head.block_owner = self

    def _read(self, end: int) -> None:
        """Write the states of the text up to `end` into cells, as far as the target gave them."""
        given, context = self._given, self._context
        end = min(end, given.end)
        if not given.first <= len(self._held) < end:
            return
        self._head.block_owner = None
        context.truncate(len(self._held), self.sequence)
        for start in range(len(self._held), end, context.n_batch):
            stop = min(start + context.n_batch, end)
            tokens, states = given.tokens(start, stop), given.between(start, stop)
            context.decode_hidden(tokens, states, 0, self.sequence)
            self._held.extend(tokens)
        given.drop_before(end - 1)


class Candidates:
    """DFlash2's candidates per place of a block: see the end of llama.cpp's models/dflash.cpp."""

    def __init__(self, rows: Hidden, n: int) -> None:
        """rows (n_places, width): `n` token ids, then n x n scores [previous candidate, candidate].

        At the first place the previous token is the text's last one, so all rows of scores agree.
        """
        self._tokens: NDArray[np.int32] = rows[:, :n].astype(np.int32)
        self._scores = rows[:, n : n + n * n].reshape(-1, n, n).copy()
        two = np.partition(self._scores, -2)[..., -2:] if n > 1 else None
        gaps = np.full(self._scores.shape[:2], np.inf) if two is None else two[..., 1] - two[..., 0]
        self._gaps, self._likeliest = gaps, self._scores.argmax(-1)

    def row(self, i: int, drafted: Sequence[int], n_vocab: int) -> Logits:
        """Logits (1, n_vocab) at place `i` after `drafted`. Raises NoRoomError."""
        logits = np.full((1, n_vocab), -np.inf, np.float32)
        logits[0, self._tokens[i]] = self._scores[i, self._before(i, drafted)]
        return logits

    def gaps(self, i: int, drafted: Sequence[int], n_most: int) -> list[float]:
        found, before = [], self._before(i, drafted)
        for k in range(i, min(i + n_most, len(self._tokens))):
            found.append(float(self._gaps[k, before]))
            before = int(self._likeliest[k, before])
        return found

    def _before(self, i: int, drafted: Sequence[int]) -> int:
        if i == 0:
            return 0
        (places,) = np.nonzero(self._tokens[i - 1] == drafted[i - 1])
        if not len(places):
            raise NoRoomError("the head has no distribution after this token")
        return int(places[0])


class SharedCacheSession:
    """A head without cells of its own (Gemma 4 assistants), as a function from tokens to logits.

    It drafts all tokens at the position of the text's last token, from the target's cells before
    it: the first with the target's hidden state of the previous token, the others with its own.
    """

    n_bytes = 0  # see LlamaSession.n_bytes

    def __init__(self, context: Context, target: Context, sequence: int) -> None:
        self.sequence = sequence
        self._context = context
        self._target = target
        self._first = 0  # the position of the first state that the target gave and is kept
        self._states = np.empty((0, context.n_hidden), np.float32)
        self._text = array("i")  # the tokens of the last score
        self._n_true = 0  # tokens of _text that are not drafted
        self._own: list[Hidden] = []  # its own states (1, width) after _n_true, _n_true + 1 ...

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """See decoding.types.Session. Raises NoRoomError without the target's hidden state.

        Drops the target's cells that differ from `tokens`, and that of the last token, which the
        target computes again. Also raises DecodeError, ClosedError.
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
        """See HeadSession.follow: all but the last token, whose state would else be missing."""
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
        self.restore(None)

    def piece(self, tokens: Sequence[int], n_most: int | None = None) -> None:
        """None, and `feed` does nothing: the head reads the target's cells."""

    def feed(self, tokens: Sequence[int]) -> None:
        """See piece."""

    def save(self, tokens: Sequence[int]) -> SavedText | None:
        """None: the head reads the target's cells."""
        return None

    def restore(self, saved: SavedText | None) -> None:
        """Drop all states: the target has received the cells of another text."""
        self._states = self._states[:0]
        self._text, self._n_true, self._own = array("i"), 0, []

    def borrow(self, sequence: int, tokens: Sequence[int]) -> None:
        """Nothing to do: the target has borrowed the cells."""

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
        own: Hidden = hidden_states.hidden(context.pointer, 1, context.n_hidden).copy()
        return own
