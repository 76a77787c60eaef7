"""Heads: drafts that read the target's hidden states beside its tokens (MTP, EAGLE-3, DFlash).

MTP: DeepSeek-V3, https://arxiv.org/abs/2412.19437; EAGLE-3: https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ggufspec.common.failures import log_failure
from ggufspec.decoding.types import Logits, n_same, token_array
from ggufspec.errors import DecodeError, NoRoomError
from ggufspec.llama import hidden_states, saved_text
from ggufspec.llama.context import Context, HeadLink
from ggufspec.llama.head_sessions import BlockHeadSession, SharedCacheSession
from ggufspec.llama.hidden_states import BatchPart, GivenStates, Hidden
from ggufspec.llama.log import listening
from ggufspec.llama.saved_text import SavedText
from ggufspec.models.head_facts import EAGLE3, EAGLE3_ROWS, MTP

# States of a round's tokens, some of which may be rejected, and of tokens since the last draft,
# which may not be needed. With 64, a text without drafts was 5 % slower (EAGLE-3, SmolLM2 135M).
_MOST_UNREAD = 256


class Head:
    """The context of a head, which follows what the target's context decodes."""

    def __init__(
        self, link: HeadLink, context: Context, *, n_unread_max: int = _MOST_UNREAD
    ) -> None:
        """`context`: made with `link`, and with as many sequences as the target's.

        `n_unread_max`: tokens of a sequence whose hidden states are kept before they are read.
        Raises ModelError if the loaded llama.cpp lacks what heads need.
        """
        self.context = context
        self.n_unread_max = n_unread_max
        self.block_owner: BlockHeadSession | None = None  # whose block was computed last
        self._target, self.facts = target, facts = link
        self.n_draft_max = target.n_rows - 1
        inside = [layer for layer in facts.target_layers if layer < target.model.n_layers]
        with listening():
            if facts.kind == MTP or len(inside) < len(facts.target_layers):
                hidden_states.keep_hidden(target.pointer, of_rows_only=False)
            hidden_states.keep_layer_inputs(target.pointer, inside)
            if facts.block is None or facts.block.n_candidates:
                hidden_states.keep_hidden(context.pointer, of_rows_only=facts.block is None)
        make: Callable[[int], HeadSession | SharedCacheSession | BlockHeadSession]
        if facts.block is not None:
            make = partial(BlockHeadSession, self, facts.block)
        elif facts.shares_cache:
            make = partial(SharedCacheSession, context, target)
        else:
            make = partial(HeadSession, self)
        self.sessions = [make(i) for i in range(context.n_sequences)]
        self._unused: set[int] = set()
        target.follower = self

    def use(self, sequence: int, *, is_used: bool) -> None:
        """Set whether the head drafts for the text that a sequence is about to read.

        If not, no states are kept: a draft of a later text makes the target decode it again.
        """
        # A head without cells keeps only the states of the last decode, maybe of another text.
        takes = is_used or self.facts.shares_cache
        (self._unused.discard if takes else self._unused.add)(sequence)

    def follow(self, tokens: Sequence[int], sequence: int) -> int:
        if sequence in self._unused:
            return len(tokens)
        return self.sessions[sequence].follow(tokens)

    def after_decode(self, parts: Sequence[BatchPart], positions: Sequence[int]) -> None:
        """The target has decoded `parts` at `positions`. Raises KeyboardInterrupt.

        A head that fails no longer drafts for that text.
        """
        if {part.sequence for part in parts} <= self._unused:
            return
        states = self._states(sum(len(part.tokens) for part in parts))
        first = 0
        for part, position in zip(parts, positions, strict=True):
            n = len(part.tokens)
            if part.sequence not in self._unused:
                session = self.sessions[part.sequence]
                try:
                    session.take(position, part, states[first : first + n])
                except DecodeError as error:
                    log_failure("the head has failed, and the text goes on without it", error)
                    self.use(part.sequence, is_used=False)
                    session.forget()
            first += n

    def encoded(self, states: Hidden) -> Hidden:
        """The input of the head, computed from states of the target."""
        if self.facts.kind == MTP:
            return states
        found = np.empty((len(states), self.context.n_hidden), np.float32)
        n_most = min(EAGLE3_ROWS, self.context.n_batch)  # more would end the process
        for i in range(0, len(states), n_most):
            piece = states[i : i + n_most]
            encoded = hidden_states.encode(self.context.pointer, piece, found.shape[1])
            found[i : i + n_most] = encoded
        return found

    def _states(self, n: int) -> Hidden:
        """The target's states of the last batch, of n tokens; valid until its next decode."""
        target, model = self._target.pointer, self._target.model
        if self.facts.kind == MTP:
            return hidden_states.hidden(target, n, self.context.n_hidden)
        inputs = [
            hidden_states.layer_input(target, layer, n, model.n_embd)
            if layer < model.n_layers
            else hidden_states.hidden(target, n, model.n_embd)
            for layer in self.facts.target_layers
        ]
        return np.concatenate(inputs, axis=1)


class HeadSession:
    """A head as a function from tokens to logits; see decoding.types.Session.

    For token i of a text, the head reads the token and a hidden state of the token before it: the
    target's own where the target has decoded that token, else what the head computed there. It
    reads prompts along with the target, and later tokens in the next score.
    """

    def __init__(self, head: Head, sequence: int) -> None:
        self.sequence = sequence
        self._head = head
        self._context = head.context
        self._n_skipped = 1 if head.facts.kind == EAGLE3 else 0  # tokens that it does not read
        self._text = array("i")  # that it has read
        self._n_true = 0  # tokens of _text that were read with states of the target
        self._own: list[Hidden] = []  # its own states (1, width) after _n_true, _n_true + 1 ...
        self._given = GivenStates(head.n_unread_max)
        self._last = 0  # the token of the last batch that has logits
        self._n_firm = 0  # see saved_text.n_firm

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """See decoding.types.Session. Raises DecodeError, ClosedError.

        NoRoomError where the head cannot draft: before the second token of a text (EAGLE-3), or
        beyond its last layer (several MTP layers).
        """
        if draft:
            texts = [[*tokens, *draft[:i]] for i in range(len(draft) + 1)]
            return np.concatenate([self.score(text).copy() for text in texts])
        tokens = token_array(tokens)
        self._given.choose_path(tokens)
        n = len(tokens)
        n_true = min(n, self._given.n_known(tokens) + 1)
        if n_true <= self._n_skipped:
            raise NoRoomError("an EAGLE-3 head needs two tokens to draft from")
        if n - n_true > self._head.n_draft_max:
            raise NoRoomError("the target has not decoded this text")
        known = min(n_same(tokens, self._text), n - 1)
        if known < n_true or self._n_true != n_true or not self._own:
            self._cut(min(known, self._n_true, n_true - 1))
            self._own = []
            if not self._can_go_on:
                raise NoRoomError("hidden states of this text are missing")
            n_read = n_true - 1
            if self._n_skipped:  # EAGLE-3: see _step
                n_read = max(self._n_true, self._n_skipped, n_true - self._context.n_rows)
            if self._n_true < n_read:
                self._read(tokens[self._n_true : n_read])
            known, text = n_true, tokens[:n_true]
            self._own = [self._step(text, self._encoded(n_read - 1, n_true - 1))]
            self._n_true, self._text = n_true, text
            self._given.drop_before(n_true - 2)
        self._cut(known)
        for i in range(known + 1, n + 1):
            text = tokens[:i]
            self._own.append(self._draft_step(text))
            self._text = text
        return self._context.rows(self._last, 1)

    def follow(self, tokens: Sequence[int]) -> int:
        """The target is about to read `tokens`: drop what differs; returns how many it may skip."""
        tokens = token_array(tokens)
        self._given.choose_path(tokens)
        n_held = self._context.n_common(self._text[self._n_skipped :], self.sequence)
        self._cut(min(n_same(tokens, self._text), n_held + self._n_skipped))
        self._given.cut(tokens)
        return self._given.end if self._can_go_on else max(self._n_true - 1, 0)

    def take(self, position: int, part: BatchPart, states: Hidden) -> None:
        """The target has decoded `part`; `states` is copied. Drafted tokens may be rejected."""
        if self._own and self._head.facts.n_layers > 1:
            self._cut(self._n_true - 1)  # a token that not all layers have read
        n = len(part.tokens) - len(part.parents)
        tokens = token_array(part.tokens[:n])
        self._cut(position + n_same(tokens, self._text[position:]))
        self._given.take(position, part, states)
        if len(self._given) > self._head.n_unread_max:
            self._read_unread(max(part.n_rows - 1, 0) if n == len(part.tokens) else 0)

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of `tokens` it has read. Raises ClosedError."""
        self._context.pointer  # noqa: B018  (raises)
        return min(n_same(token_array(tokens), self._text), self._n_true)

    def piece(self, tokens: Sequence[int], n_most: int | None = None) -> None:
        """None: it reads prompts along with the target."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Read the last tokens that the target has read; earlier ones were read along with it."""
        self.follow(tokens)
        self._read_unread()

    def forget(self) -> None:
        """Empty the cache of this sequence. Raises ClosedError."""
        self._context.truncate(0, self.sequence)
        self._cut(0)
        self._given.forget()

    def save(self, tokens: Sequence[int]) -> SavedText | None:
        """A copy of its cells of a text, with the target's last state. Raises as `score`."""
        self.feed(tokens)
        self._cut(self._n_true)
        n = max(self._n_true - self._n_skipped, 0)
        self._context.truncate(n, self.sequence)
        saved = saved_text.save(self._context, self.sequence)
        if saved is None or len(saved.tokens) < n:
            return None
        state = None
        if self._can_go_on:
            state = self._given.between(self._n_true - 1, self._n_true).copy()
        n_least = saved_text.n_firm(self._context, self._n_true)
        return saved._replace(tokens=self._text[:], n_least=n_least, state=state)

    @property
    def n_bytes(self) -> int:
        return self._context.n_bytes(self.sequence)

    def restore(self, saved: SavedText | None) -> None:
        """Replace its cells by a saved copy. Raises DecodeError, ClosedError."""
        self.forget()
        if saved is not None:
            cells = saved._replace(tokens=saved.tokens[self._n_skipped :])
            saved_text.restore(self._context, cells, self.sequence)
            n = self._n_true = len(saved.tokens)
            self._text, self._n_firm = saved.tokens[:], saved_text.n_firm(self._context, n)
            if saved.state is not None:
                self._given.take(n - 1, BatchPart(self.sequence, saved.tokens[-1:], 0), saved.state)

    def borrow(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take over `tokens`, with which the text of another sequence that has read them begins."""
        if self._context.can_share_passes:
            self.forget()
            tokens = token_array(tokens)
            self._context.copy_prefix(sequence, self.sequence, tokens[self._n_skipped :])
            self._text = tokens[:]
            self._n_true = len(tokens)

    @property
    def _can_go_on(self) -> bool:
        """Whether the state that the next token is read with is known."""
        return self._given.first < max(self._n_true, 1) and self._given.end >= self._n_true

    def _read_unread(self, n_left: int = 0) -> None:
        """Read all tokens whose states the target has given, except the last `n_left`."""
        end = self._given.end - n_left
        if self._can_go_on and end > self._n_true:
            self._read(self._given.tokens(self._n_true, end))

    def _read(self, tokens: array[int]) -> None:
        self._cut(self._n_true)
        self._own = []
        start = max(self._n_true, self._n_skipped)
        end = self._n_true + len(tokens)
        states = self._encoded(start - 1, end - 1)
        for layer in range(self._head.facts.n_layers):  # each has cells of its own
            self._decode(start, tokens[len(tokens) - len(states) :], states, 0, layer)
        self._text.extend(tokens)
        self._n_true = end
        self._given.drop_before(end - 2)

    def _draft_step(self, tokens: array[int]) -> Hidden:
        """Read the last token, which was only drafted, with the head's own states."""
        if self._head.facts.n_layers == 1:
            return self._step(tokens, self._own[-1])
        layer = len(tokens) - self._n_true
        if layer >= self._head.facts.n_layers:
            raise NoRoomError(f"the head has {layer} layers, and drafts as many tokens")
        first = self._encoded(self._n_true - 2, self._n_true - 1)
        return self._step(tokens, np.concatenate([first, *self._own]), layer)

    def _step(self, tokens: array[int], states: Hidden, layer: int = 0) -> Hidden:
        """Read the last tokens with `states`; keep logits of the last one and return its state.

        For an EAGLE-3 head, llama.cpp computes logits of all tokens, and keeps the first rows
        unless all are requested. For other heads, it may return the state of the first token.
        """
        start, n_rows = len(tokens) - len(states), len(states) if self._n_skipped else 1
        self._decode(start, tokens[start:], states, n_rows, layer)
        own = hidden_states.hidden(self._context.pointer, n_rows, self._context.n_hidden)
        return np.array(own[-1:])

    def _decode(
        self, start: int, tokens: array[int], states: Hidden, n_rows: int, layer: int
    ) -> None:
        context, n_batch = self._context, self._context.n_batch
        context.truncate(start - self._n_skipped, self.sequence)
        hidden_states.use_head(context.pointer, layer)
        for i in range(0, len(tokens), n_batch):
            piece = tokens[i : i + n_batch]
            wanted = n_rows if i + n_batch >= len(tokens) else 0
            context.decode_hidden(piece, states[i : i + n_batch], wanted, self.sequence)
            self._last = len(piece) - 1

    def _encoded(self, start: int, end: int) -> Hidden:
        """The target's states of positions `start` to `end`, encoded; zeros for position -1."""
        zeros = np.zeros((max(-start, 0), self._context.n_hidden), np.float32)
        if end <= 0:
            return zeros
        found = self._head.encoded(self._given.between(max(start, 0), end))
        return np.concatenate([zeros, found]) if len(zeros) else found

    def _cut(self, n_tokens: int) -> None:
        if n_tokens < self._n_firm:
            n_tokens = self._n_firm = 0
        del self._text[n_tokens:]
        if n_tokens < self._n_true:
            self._own = []
            self._n_true = n_tokens
        del self._own[max(len(self._text) - self._n_true + 1, 0) :]
