"""Ends the reasoning of a text after a number of tokens: then only its end mark may follow."""

from __future__ import annotations

from array import array
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from ggufspec.decoding.types import Constraint, Masks, n_same

ANY = 2**31  # more tokens than a text has
_N_CHARACTER = 4  # bytes of a character, at most


class TokenMarks(NamedTuple):
    """The marks around reasoning, in the bytes of `piece`, and the tokens that write the end."""

    begin: bytes
    end: bytes
    end_tokens: Sequence[int]
    piece: Callable[[int], bytes]  # the bytes of a token; a control token in a mark has its own


class _Part(Enum):
    START = auto()  # only white space, or the beginning of a mark, since the text or its last part
    REASONING = auto()
    CONTENT = auto()


class _Place(NamedTuple):
    """What a text is in after one of its tokens. `tail`: bytes that may belong to a mark."""

    part: _Part
    n: int = 0  # tokens of reasoning so far
    tail: bytes = b""


class ReasoningBudget:
    """A decoding.types.Constraint: after `n_most` tokens of reasoning, its end mark must follow.

    Before, and after the end, `inner` decides alone. Where `inner` does not allow the end mark, it
    is not forced. A character that the reasoning has begun is completed first, in up to three
    tokens. Each method takes the whole text, which may be any other text than before.
    """

    def __init__(
        self,
        marks: TokenMarks,
        n_most: int,
        n_start: int,
        n_vocab: int,
        inner: Constraint | None = None,
        *,
        is_open: bool = False,
    ) -> None:
        """`n_start`: tokens of the prompt; `is_open`: it has begun the reasoning."""
        self.inner = inner
        self._marks, self._n_most, self._n_start = marks, n_most, n_start
        self._n_words = -(-n_vocab // 32)
        self._n_tail = max(len(marks.end) - 1, _N_CHARACTER)
        self._text = array("i")
        # The place before the first token of the text, and after each.
        self._places = [_Place(_Part.REASONING if is_open else _Part.START)]

    def masks(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Masks:
        """Which tokens may follow: see decoding.types.Constraint."""
        if self.inner is None:
            rows = np.full((len(draft) + 1, self._n_words), 0xFFFFFFFF, np.uint32)
        else:
            rows = np.array(self.inner.masks(tokens, draft))
        text = _joined(tokens, draft)
        for i, row in enumerate(rows):
            if end := self._end_after(text[: len(tokens) + i]):
                word, bit = divmod(end[0], 32)
                allowed = row[word] & np.uint32(1 << bit)
                row[:] = 0
                row[word] = allowed
        return rows

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        n = len(draft) if self.inner is None else self.inner.n_allowed(tokens, draft)
        text = _joined(tokens, draft)
        for i in range(n):
            end = self._end_after(text[: len(tokens) + i])
            if end and end[0] != draft[i]:
                return i
        return n

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """The rest of the end mark where it must follow; else what `inner` forces."""
        if end := self._end_after(tokens):
            return end
        found = () if self.inner is None else self.inner.forced(tokens)
        return found[: self.n_allowed(tokens, found)]

    def n_free(self, tokens: Sequence[int]) -> int:
        """How many further tokens may be any: see decoding.types.Constraint."""
        n = ANY if self.inner is None else self.inner.n_free(tokens)
        place = self._place_after(tokens)
        if place.part is _Part.CONTENT:
            return n
        # The begin mark takes one token at least.
        return min(n, max(self._n_most - place.n, 0) + (place.part is _Part.START))

    def is_over(self, tokens: Sequence[int]) -> bool:
        return self.inner is not None and self.inner.is_over(tokens)

    def _end_after(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens of the end mark that must follow; empty: the reasoning need not end here."""
        part, n, tail = self._place_after(tokens)
        if part is not _Part.REASONING or n < self._n_most:
            return ()
        if n < self._n_most + _N_CHARACTER - 1 and _ends_inside_character(tail):
            return ()
        whole = self._marks.end_tokens
        n_begun = min(len(whole) - 1, n)
        while list(tokens[len(tokens) - n_begun :]) != list(whole[:n_begun]):
            n_begun -= 1
        rest = whole[n_begun:]
        if self.inner is not None and self.inner.n_allowed(tokens, rest) < len(rest):
            return ()
        return rest

    def _place_after(self, tokens: Sequence[int]) -> _Place:
        text = array("i", tokens[self._n_start :])
        n_common = n_same(text, self._text)
        del self._text[n_common:], self._places[n_common + 1 :]
        for token in text[n_common:]:
            self._text.append(token)
            self._places.append(self._next(self._places[-1], token))
        return self._places[-1]

    def _next(self, place: _Place, token: int) -> _Place:
        part, n, tail = place
        if part is _Part.CONTENT:
            return place
        text = tail + self._marks.piece(token)
        if part is _Part.REASONING:
            _, end, rest = text.partition(self._marks.end)
            if not end:
                return _Place(part, n + 1, text[-self._n_tail :])
            n, text = n + 1, rest
        text, begin = text.lstrip(), self._marks.begin
        if begin.startswith(text):
            part = _Part.REASONING if text == begin else _Part.START
            return _Place(part, n, b"" if text == begin else text)
        if text.startswith(begin):
            return _Place(_Part.REASONING, n, text[len(begin) :])
        return _Place(_Part.CONTENT)


def _joined(tokens: Sequence[int], draft: Sequence[int]) -> array[int]:
    text = array("i", tokens)
    text.extend(draft)
    return text


def _ends_inside_character(data: bytes) -> bool:
    """Whether the last bytes begin a character of UTF-8 without completing it."""
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return bool(decoder.getstate()[0])
