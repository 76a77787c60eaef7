"""The session of a draft of another vocabulary, in the target's tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from ggufspec.decoding.types import Logits, n_same, token_array
from ggufspec.errors import NoRoomError
from ggufspec.llama.saved_text import SavedText
from ggufspec.llama.session import LlamaSession, Piece
from ggufspec.llama.vocab_map import VocabMap


class MappedSession:
    """A draft's session in the target's tokens; see decoding.types.Session.

    The draft reads each token of the target as VocabMap.spelled gives it, so a longer text only
    appends to its tokens. In a text with compounds (see VocabMap), if the likeliest token may begin
    one, the draft also evaluates the next token for their logits; that row is kept.
    """

    def __init__(self, session: LlamaSession, vocab_map: VocabMap) -> None:
        self.sequence = session.sequence
        self._session = session
        self._map = vocab_map
        self._rows = vocab_map.empty_rows(1)
        # The last text, what the draft reads for it, and how many of that for its first 0, 1 ... n.
        self._text, self._read, self._ends = array("i"), array("i"), array("i", [0])
        self._ahead: tuple[array[int], Logits] | None = None  # a text of the draft, and its row

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """See decoding.types.Session. Tokens of the target that the draft lacks have -inf.

        Takes one pass, but one or two per row for compounds or if the cache has no room for all
        rows. Raises NoRoomError if the text has too many tokens of the draft, DecodeError,
        ClosedError.
        """
        if len(self._rows) <= len(draft):
            self._rows = self._map.empty_rows(len(draft) + 1)
        if draft and self._fill_together(tokens, draft):
            return self._rows[: len(draft) + 1]
        for i in range(len(draft) + 1):
            text = [*tokens, *draft[:i]] if i else tokens
            read = self._reading(text) or array("i", [self._map.anchor])
            if len(read) > self._session.n_ctx:
                raise NoRoomError(
                    f"the text has {len(read):,} tokens of the draft, whose context has "
                    f"{self._session.n_ctx:,}; use a larger context (n_ctx, -c)"
                )
            self._fill(self._rows[i : i + 1], read)
        return self._rows[: len(draft) + 1]

    def _fill_together(self, tokens: Sequence[int], draft: Sequence[int]) -> bool:
        """Write all rows with one pass; false, without effect, if a row may need a further pass."""
        read, n = self._reading([*tokens, *draft]), len(tokens)
        ends = [end - self._ends[n] for end in self._ends[n:]]
        start = len(read) - ends[-1]
        fits = start > 0 and len(read) <= self._session.n_ctx and ends[-1] < self._session.n_rows
        texts = (self._text[:i] for i in range(n, n + len(ends)))
        if not fits or any(map(self._map.has_compounds, texts)):
            return False
        rows = self._session.score(read[:start], read[start:])
        self._map.widen(rows[ends], self._rows[: len(ends)])
        return True

    def _fill(self, out: Logits, read: array[int]) -> None:
        """Write the row after the draft's text `read` into `out` (1, n_vocab)."""
        known = self._ahead
        rows = known[1] if known and known[0] == read else self._session.score(read)
        self._map.widen(rows, out)
        first = int(rows[0].argmax())
        may_begin = first in self._map.compounds and self._map.has_compounds(self._text)
        if may_begin and len(read) < self._session.n_ctx:
            logit = float(rows[0, first])
            ahead = array("i", [*read, first])
            rows = self._session.score(ahead).copy()
            self._ahead = (ahead, rows)
            self._map.add_compounds(first, logit, rows[0], out[0])

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of `tokens` the cache holds. Raises ClosedError."""
        n_read = self._session.n_common(self._reading(tokens))
        return max(bisect_right(self._ends, n_read) - 1, 0)

    def piece(self, tokens: Sequence[int], n_most: int | None = None) -> Piece | None:
        """See LlamaSession.piece; counts tokens of the draft. None also where there is no room."""
        read = self._reading(tokens)
        return self._session.piece(read, n_most) if len(read) < self._session.n_ctx else None

    def feed(self, tokens: Sequence[int]) -> None:
        read = self._reading(tokens)
        if len(read) < self._session.n_ctx:
            self._session.feed(read)

    def forget(self) -> None:
        """Empty the cache of this sequence. Raises ClosedError."""
        self._ahead = None
        self._session.forget()

    def save(self, tokens: Sequence[int]) -> SavedText | None:
        """See LlamaSession.save; what is saved has tokens of the draft."""
        return self._session.save(self._reading(tokens))

    @property
    def n_bytes(self) -> int:
        return self._session.n_bytes

    def restore(self, saved: SavedText | None) -> None:
        self._ahead = None
        self._session.restore(saved)

    def borrow(self, sequence: int, tokens: Sequence[int]) -> None:
        self._session.borrow(sequence, self._reading(tokens))

    def _reading(self, tokens: Sequence[int]) -> array[int]:
        """The draft's tokens for a text; valid until the next text."""
        tokens = token_array(tokens)
        n = n_same(tokens, self._text)
        del self._text[n:], self._ends[n + 1 :]
        if n == 0:
            self._read = array("i", self._map.start(max(tokens[0], 0)) if tokens else ())
            self._ends[0] = len(self._read)
        del self._read[self._ends[n] :]
        for token in tokens[n:]:
            if token >= 0:  # else a cell of an image, which is left out
                self._read.extend(self._map.spelled(token))
            self._ends.append(len(self._read))
        self._text.extend(tokens[n:])
        return self._read
