"""A model as a function from tokens to logits, which reuses its KV cache where possible."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ggufspec.decoding.types import Logits, token_array
from ggufspec.llama import image_cells, saved_text
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import N_FIRST
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.image_cells import CellsFor, n_replaced, replaced
from ggufspec.llama.saved_text import Checkpoints, SavedText

# Where a tail cannot be dropped, its beginning is decoded again from a checkpoint. More tokens than
# this since the checkpoint get a batch and a checkpoint of their own, instead of being decoded with
# each draft.
_MAX_REPEATED = 16
# Where a whole draft can be dropped, checkpoints are for texts that depart earlier, and for decodes
# that fail. Saving one every 128 tokens costs less than 1 % of decoding them.
_SPACING = 128
# A piece of a prompt that takes longer is halved: Ctrl-C is heard between two, on a GPU.
_SLOW_PIECE_SECONDS = 1.0
_MIN_PIECE = 32
# With sliding windows, a text that is saved gets checkpoints so many tokens before the end of its
# prompt, for turns that depart in its answer, or drop the last tokens of the prompt; the last two.
_N_DROPPED = 5
_N_WINDOWS = 2


class Piece(NamedTuple):
    """Tokens of a prompt that a sequence of a context has to decode next, without logits.

    `n_unread`: number of prompt tokens that are not held, including these.
    """

    context: Context
    sequence: int
    tokens: Sequence[int]
    n_unread: int


class LlamaSession:
    """One sequence of a context; see decoding.types.Session."""

    def __init__(
        self,
        context: Context,
        sequence: int = 0,
        *,
        n_vocab: int | None = None,
        drafts: bool = False,
        cells_for: CellsFor | None = None,
    ) -> None:
        """`n_vocab`: the width of rows, for a draft whose vocabulary has other tokens at its end.
        The tokens of a text that it lacks are left out.

        `drafts`: this is the draft model, so each of its tokens may be dropped again.
        `cells_for`: what this model reads for the cells of an image; None: the cells.
        """
        self._context = context
        self.sequence = sequence
        self.n_ctx = context.n_ctx  # tokens that a text can have
        self.n_rows = context.n_rows  # maximum rows of a score
        self._n_vocab = context.n_vocab if n_vocab is None else n_vocab
        self._drafts = drafts
        self._cells_for = cells_for
        self._n_droppable = context.n_droppable
        self._checkpoints = Checkpoints(context, sequence)
        self._short = ShortCache(context, sequence) if context.options.n_kept else None
        # Whether a saved text cannot be continued from a shorter prefix of it.
        self.is_cut_by_saving = context.model.has_windows
        self._n_firm = 0  # see saved_text.n_firm
        self._n_fed = 0  # tokens of the last prompt

    def score(
        self, tokens: Sequence[int], draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Logits:
        """Logits after the last of `tokens`, then after each of `draft`: (n_draft + 1, n_vocab).

        `parents`: the draft is a tree of at most Context.n_leaves leaves, see types.Draft. Valid
        until the next score or feed of this session. Raises DecodeError, ClosedError.
        """
        part = self.prepare(tokens, draft, parents)
        self._context.decode(part.tokens, part.n_rows, self.sequence, parents)
        return self.rows_of(part, 0)

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of `tokens` the cache holds. Raises ClosedError."""
        own = self._own(tokens)
        n = self._n_known(own) if self._short is None else self._short.n_common(own)
        cells_for = self._cells_for
        return n if cells_for is None else n_replaced(token_array(tokens), n, cells_for)

    def _n_known(self, tokens: array[int]) -> int:
        n = self._context.n_common(tokens, self.sequence)
        return n if n >= self._n_firm else self._checkpoints.last_until(n)

    @property
    def held(self) -> array[int]:
        """The tokens that the cache holds."""
        return array("i", self._context.native.cells(self.sequence))

    @property
    def n_held(self) -> int:
        """How many tokens the cache holds."""
        return self._context.n_cells(self.sequence)

    def feed(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Decode `tokens` in pieces before a score; calls `progress(n_done, n_all)` after each."""
        self._n_fed = len(tokens)
        self._feed(self._room(tokens), progress)

    def _feed(self, tokens: array[int], progress: Callable[[int, int], None] | None = None) -> None:
        n_all = len(self._unread(tokens)) if progress is not None else 0
        n_most: int | None = None
        while piece := self._piece(tokens, n_most):
            before = self._context.decode_seconds
            self._context.decode(piece.tokens, 0, self.sequence)
            if self._context.decode_seconds - before > _SLOW_PIECE_SECONDS:
                n_most = max(len(piece.tokens) // 2, _MIN_PIECE)
            if progress is not None:
                progress(max(n_all - piece.n_unread + len(piece.tokens), 0), n_all)

    def piece(self, tokens: Sequence[int], n_most: int | None = None) -> Piece | None:
        """The next of `tokens` to decode, at most `n_most`; None: all are held.

        Drops the cells that differ.
        """
        piece = self._piece(self._room(tokens), n_most)
        if piece is not None:
            self._n_fed = len(tokens)
        return piece

    def _piece(self, tokens: array[int], n_most: int | None) -> Piece | None:
        unread = self._unread(tokens)
        if not unread:
            return None
        n = min(n_most or len(unread), self._context.n_batch)
        if self._n_droppable is not None and not self._drafts:
            n = min(n, self._checkpoints.save_at_end(tokens) or n)
        if self._context.projector is not None:
            n = image_cells.n_apart(token_array(unread), n)
        return Piece(self._context, self.sequence, unread[:n], len(unread))

    def unread(self, tokens: Sequence[int]) -> Sequence[int]:
        """The last of `tokens` that are not held, after dropping cells that differ."""
        return self._unread(self._room(tokens))

    def _unread(self, tokens: array[int]) -> Sequence[int]:
        n_usable = self._n_known(tokens)
        if min(n_usable, self._n_needless(tokens)) == len(tokens):
            return ()
        return tokens[self._resume(tokens, n_usable) :]

    def forget(self) -> None:
        """Empty the cache of this sequence. Raises ClosedError."""
        self._checkpoints.take(())
        self._n_firm = 0
        self._context.truncate(0, self.sequence)

    def borrow(self, sequence: int, tokens: Sequence[int]) -> None:
        """Copy the cells that another sequence holds of a prefix, if sequences can share cells."""
        context = self._context
        if context.can_share_passes:
            n = context.n_left_out[sequence]
            context.copy_prefix(sequence, self.sequence, _read(self._own(tokens), n))
            context.n_left_out[self.sequence] = n

    def save(self, tokens: Sequence[int]) -> SavedText | None:
        """A copy of the state of a text, after dropping cells that differ.

        None if nothing is held, or if a part of the text is left out. Raises DecodeError,
        ClosedError.
        """
        if self._short is not None:
            return None
        tokens = self._own(tokens)
        self._resume(tokens, len(tokens))
        saved = saved_text.save(self._context, self.sequence)
        if saved is None:
            return None
        saved = saved._replace(checkpoints=self._checkpoints.saved[:])
        place = self._n_fed - _N_DROPPED
        if self.is_cut_by_saving and self._n_firm < place < saved.n_least:
            self._context.truncate(place, self.sequence)
            self._checkpoints.save()
            saved = saved._replace(checkpoints=self._checkpoints.saved[-_N_WINDOWS:])
            self.restore(saved)
        return saved

    @property
    def n_bytes(self) -> int:
        """Bytes that `save` would copy or keep, about. Raises ClosedError."""
        if self._short is not None:
            return 0
        return self._context.n_bytes(self.sequence) + self._checkpoints.n_bytes

    def restore(self, saved: SavedText | None) -> None:
        """Replace the state by a saved one. Raises DecodeError, ClosedError."""
        self.forget()
        if saved is not None:
            saved_text.restore(self._context, saved, self.sequence)
            self._checkpoints.take(saved.checkpoints)
            self._n_firm = saved_text.n_firm(self._context, len(saved.tokens))

    def prepare(
        self,
        tokens: Sequence[int],
        draft: Sequence[int] = (),
        parents: Sequence[int] = (),
        wants_rows: bool = True,
    ) -> BatchPart:
        """Drop the cells that differ, and decode all but the last batch of a score, returned."""
        context = self._context
        tokens = self._room(tokens, len(draft))
        known = self._resume(tokens, len(tokens) - wants_rows)
        if context.projector is not None and (n := image_cells.n_to_last_image(tokens)) > known:
            self._feed(tokens[:n])
            known = n
        if (draft or self._drafts) and self._needs_checkpoint(len(draft)):
            if draft and len(tokens) - known > _MAX_REPEATED:
                self._feed(tokens[:-1])
                known = len(tokens) - 1
            self._checkpoints.save()
        missing = [*tokens[known:], *draft]
        if (n_before := len(missing) - context.n_batch) > 0:
            self._feed(array("i", [*tokens, *draft])[: known + n_before])
            del missing[:n_before]
        return BatchPart(self.sequence, missing, (len(draft) + 1) * wants_rows, parents)

    def rows_of(self, part: BatchPart, start: int) -> Logits:
        """The rows of a part that was prepared, and begins at `start` in the last batch."""
        rows = self._context.rows(start + len(part.tokens) - part.n_rows, part.n_rows)
        if self._n_vocab == self._context.n_vocab:
            return rows
        found = np.full((len(rows), self._n_vocab), -np.inf, np.float32)
        found[:, : rows.shape[1]] = rows[:, : self._n_vocab]
        return found

    def _room(self, tokens: Sequence[int], n_more: int = 0) -> array[int]:
        """The tokens to read of a text, leaving room for `n_more`: all, or see ShortCache."""
        tokens = self._own(tokens)
        return tokens if self._short is None else self._short.room(tokens, n_more)

    def _own(self, tokens: Sequence[int]) -> array[int]:
        """The tokens of a text that this model reads."""
        tokens = token_array(tokens)
        if self._cells_for is not None:
            tokens = replaced(tokens, self._cells_for)
        n_vocab = self._context.n_vocab
        return tokens if self._n_vocab <= n_vocab else _known(tokens, n_vocab)

    def _resume(self, tokens: array[int], n_most: int) -> int:
        """Drop the cells that differ from the first `n_most` tokens; returns how many remain."""
        n_most = min(n_most, self._n_needless(tokens))
        n = min(self._context.n_common(tokens, self.sequence), n_most) if self._n_firm else n_most
        if n < self._n_firm:
            self._checkpoints.drop_after(n)
            n_most = self._checkpoints.go_back()
            self._n_firm = saved_text.n_firm(self._context, n_most)
        known = self._context.resume(tokens, n_most, self.sequence)
        if self._n_droppable is not None:
            self._checkpoints.drop_after(self._context.n_cells(self.sequence))
        return self._checkpoints.go_back() if known < 0 else known

    def _n_needless(self, tokens: array[int]) -> int:
        """Length of the prefix that the head does not need recomputed."""
        follower = self._context.follower
        return len(tokens) if follower is None else follower.follow(tokens, self.sequence)

    def _needs_checkpoint(self, n_draft: int) -> bool:
        if self._n_droppable is None:
            return False
        n_since = self._context.n_cells(self.sequence) - self._checkpoints.last
        # A draft model decodes its tokens one by one, and states are kept within a decode only.
        return self._drafts or n_draft > self._n_droppable or n_since > _SPACING


def _known(tokens: array[int], n_vocab: int) -> array[int]:
    """The tokens of a text that a vocabulary has; one token of it if it has none of them."""
    values = np.frombuffer(tokens, np.int32)
    if not len(values) or values.max() < n_vocab:
        return tokens
    return array("i", values[values < n_vocab].tobytes()) or array("i", [0])


# Of the cache: what is held once tokens were left out, so that this happens rarely ...
_SHARE_HELD = 3 / 4
# ... and the newest tokens that are not worth reading more for, after a text went back.
_SHARE_LEAST = 1 / 4


class ShortCache:
    """The cells of a sequence of a context with `options.n_kept`.

    Of a text that does not fit, its first N_FIRST and its newest tokens: only drafts change.
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
                self._context.native.drop_middle(N_FIRST, n_dropped, self._sequence)
        self._context.n_left_out[self._sequence] = n_left_out
        return _read(tokens, n_left_out)

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of a text are held or left out."""
        n = self._context.n_common(_read(tokens, self._n_left_out), self._sequence)
        return n + self._n_left_out if n > N_FIRST else n

    @property
    def _n_left_out(self) -> int:
        return self._context.n_left_out[self._sequence]


def _read(tokens: Sequence[int], n_left_out: int) -> array[int]:
    """The tokens of a text without the `n_left_out` after its first N_FIRST."""
    tokens = token_array(tokens)
    return tokens[:N_FIRST] + tokens[N_FIRST + n_left_out :] if n_left_out else tokens
