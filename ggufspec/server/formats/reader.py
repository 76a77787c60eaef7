"""Reads a text that comes in pieces, with generators that yield when they need more text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from ggufspec.engine.text import n_begun

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Write = Callable[[str], None]

MAX_NAME = 256  # characters of a name or key; with a longer one, a text is no call
MAX_UNCERTAIN = 4096  # characters of a text that may be a call; a longer text is content
SPACES = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,\]})]*")


class NoCallError(Exception):
    """The text that looked like a call is content."""


class Reader:
    """An incomplete text, and the current place in it.

    Text before the place is dropped; `keep` keeps it from an earlier place on.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False  # the text is complete
        self._kept: int | None = None

    def add(self, text: str) -> None:
        start = self.at if self._kept is None else self._kept
        self.text = self.text[start:] + text
        self.at -= start
        if self._kept is not None:
            self._kept = 0

    def keep(self, at: int) -> None:
        """Keep the text from a place on, until `taken` or `forget`."""
        self._kept = at

    def taken(self) -> str:
        """The kept text up to the current place; afterwards nothing is kept."""
        start, self._kept = self._kept, None
        return self.text[start : self.at]

    def forget(self) -> None:
        self._kept = None

    @property
    def n_kept(self) -> int:
        """Number of kept characters before the current place."""
        return 0 if self._kept is None else self.at - self._kept

    def spaces(self) -> Steps[None]:
        while (yield from self.matching(SPACES)):
            pass

    def accept(self, *words: str) -> Steps[str | None]:
        """Skip and return the longest of these words that comes next; None if none comes next."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, words), default=0)]
            could_be = [word for word in words if word.startswith(rest) and len(word) > len(rest)]
            if not could_be or self.is_over:
                found = max(
                    (word for word in words if rest.startswith(word)), key=len, default=None
                )
                self.at += len(found or "")
                return found
            yield

    def next_word(self, *words: str) -> Steps[str | None]:
        """Skip white space, then `accept` one of these words."""
        yield from self.spaces()
        return (yield from self.accept(*words))

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at >= len(self.text) and not self.is_over:
            yield
        return self.text[self.at : self.at + 1]

    def matching(self, regex: re.Pattern[str]) -> Steps[str]:
        """Skip and return a match of up to MAX_NAME characters; `regex` tests single characters."""
        while True:
            match = regex.match(self.text, self.at)
            end = match.end() if match else self.at
            if end < len(self.text) or end - self.at > MAX_NAME or self.is_over:
                found, self.at = self.text[self.at : end], end
                return found
            yield

    def until(self, marks: Marks, write: Write) -> Steps[str | None]:
        """Write the text before the first of the marks; skips and returns it, None at the end."""
        while True:
            match = marks.regex.search(self.text, self.at) if marks.regex else None
            if match and (self.is_over or not marks.may_be_longer(self.text, match)):
                write(self.text[self.at : match.start()])
                self.at = match.end()
                return match[0]
            end = match.start() if match else len(self.text)
            if not match and not self.is_over:
                end -= marks.n_begun(self.text, self.at)
            write(self.text[self.at : end])
            self.at = end
            if self.is_over:
                return None
            yield

    def bounded(self, mark: str) -> Steps[str | None]:
        """A short text before a mark, which is skipped; None if the mark does not come."""
        while True:
            end = self.text.find(mark, self.at, self.at + MAX_NAME + len(mark))
            if end >= 0:
                found, self.at = self.text[self.at : end], end + len(mark)
                return found
            if self.is_over or len(self.text) - self.at > MAX_NAME:
                return None
            yield

    def string(self, write: Write, quote: str = '"') -> Steps[bool]:
        """Write the rest of a string, with its quote; False if the text ends in it."""
        while (mark := (yield from self.until(_STRING_MARKS[quote], write))) != quote:
            escaped = yield from self.peek()
            if mark is None or not escaped:
                return False
            write(mark + escaped)
            self.at += 1
        write(quote)
        return True

    def json_value(self, write: Write) -> Steps[bool]:
        """Write one JSON value as it comes; False if the text ends in it."""
        yield from self.spaces()
        if (yield from self.peek()) not in ("{", "[", '"'):
            scalar = yield from self.matching(_SCALAR)
            write(scalar)
            return bool(scalar)
        depth = 0
        while (mark := (yield from self.until(_JSON_MARKS, write))) is not None:
            write(mark)
            if mark != '"':
                depth += 1 if mark in "{[" else -1
            elif not (yield from self.string(write)):
                return False
            if depth == 0:
                return True
        return False


class Marks:
    """Words to search for in a text that comes in pieces."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = sorted({word for word in words if word})
        by_length = sorted(self._words, key=len, reverse=True)
        self._n_longest = len(by_length[0]) if by_length else 0
        found = "|".join(map(re.escape, by_length))
        self.regex = re.compile(found) if found else None

    def n_begun(self, text: str, at: int) -> int:
        """Length of the longest end of a text that may be the beginning of a mark."""
        return n_begun(text, self._words, min(len(text) - at, self._n_longest - 1))

    def may_be_longer(self, text: str, match: re.Match[str]) -> bool:
        """Whether a longer mark may turn out to be at the place of a match."""
        rest = text[match.start() : match.start() + self._n_longest]
        return any(len(word) > len(rest) and word.startswith(rest) for word in self._words)


_JSON_MARKS = Marks('"{}[]')
_STRING_MARKS = {quote: Marks([quote, "\\"]) for quote in "\"'"}


def decoded(raw: str) -> str:
    """Decodes a JSON string that is given without quotes; returns `raw` if it is not valid."""
    try:
        found = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return raw
    return str(found)
