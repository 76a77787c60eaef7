"""Reads an answer that comes in pieces, by generators that yield when they need more text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Generator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, TypeVar

from ggufspec.engine.text import n_begun
from ggufspec.server.formats.values import json_text

Result = TypeVar("Result")
Parsing = Generator[None, None, Result]
Write = Callable[[str], None]

MAX_NAME = 256  # characters of a name or key; with a longer one, a text is no call
MAX_UNCERTAIN = 4096  # characters of a text that may be a call; a longer text is content
SPACES = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,\]})]*")


class TextDelta(NamedTuple):
    """More of the content or the reasoning, written at `start` to `end` (in characters)."""

    kind: Literal["text", "reasoning"]
    text: str
    start: int = 0
    end: int = 0


class CallDelta(NamedTuple):
    """More of one tool call; its first delta has the id and the name.

    `text` is a piece of JSON text: the pieces of a call, joined, are its arguments.
    """

    call_index: int
    text: str = ""
    id: str | None = None
    name: str | None = None


ChatDelta = TextDelta | CallDelta


class Deltas:
    """Collects the deltas of a parser; drops white space next to calls and reasoning."""

    def __init__(
        self, reader: Reader, *, has_short_ids: bool, known_ids: Collection[str | None]
    ) -> None:
        """`has_short_ids`: calls have ids of nine characters, as some templates require.

        `known_ids`: those of earlier calls, which no call gets again.
        """
        self._reader = reader
        self._found: list[ChatDelta] = []
        self._has_short_ids = has_short_ids
        self._ids = {None, "", *known_ids}
        self._spaces: list[str] = []  # white space, dropped unless more of its part follows
        self.has_content = False
        self.n_calls = 0
        self.n_members = 0  # number of the last call's arguments
        self._skips_spaces = False

    def take(self) -> list[ChatDelta]:
        """Returns and removes the collected deltas; adjacent ones of one part are joined."""
        found, self._found = self._found, []
        return [_joined(list(together)) for _, together in groupby(found, _part_of)]

    def content(self, text: str) -> None:
        self._add("text", text)
        self.has_content = self.has_content or bool(text.strip())

    def reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def _add(self, kind: Literal["text", "reasoning"], text: str) -> None:
        if self._skips_spaces:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._skips_spaces = False
            found = "".join([*self._spaces, kept])
            end = self._reader.n_read - len(text) + len(kept)
            self._found.append(TextDelta(kind, found, end - len(found), end))
            self._spaces.clear()
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])

    def part(self) -> None:
        """Begin or end a part other than content; the white space around it is dropped."""
        self._spaces.clear()
        self._skips_spaces = True

    def restart(self) -> None:
        """Reset at the end of the prompt's part of the answer."""
        self.has_content = False
        self._spaces.clear()

    def finish(self) -> None:
        """End the text: white space at the end is content."""
        if self._spaces and self.has_content:
            text, end = "".join(self._spaces), self._reader.n_read
            self._found.append(TextDelta("text", text, end - len(text), end))

    def begin(self, name: str, id: str | None) -> None:
        self.part()
        if id in self._ids:
            random = secrets.token_hex(12)
            id = random[:9] if self._has_short_ids else f"call_{random}"
        self._ids.add(id)
        self._found.append(CallDelta(self.n_calls, "", id, name))
        self.n_calls += 1
        self.n_members = 0

    def write(self, text: str) -> None:
        if text:
            self._found.append(CallDelta(self.n_calls - 1, text))

    def key(self, key: str) -> None:
        self.write(("{" if not self.n_members else ", ") + json_text(key) + ": ")
        self.n_members += 1

    def end_object(self) -> None:
        """Close the object of the last call's arguments."""
        self.write("}" if self.n_members else "{}")


class ChatParser:
    """Separates a text that comes in pieces into content, reasoning and tool calls.

    Raises nothing: what is no call is content.
    """

    def __init__(self, reader: Reader, deltas: Deltas, steps: Parsing[None], begun: str) -> None:
        """`steps`: new, from `reader` to `deltas`; `begun`: what the prompt has of the answer."""
        self._reader, self._deltas, self._steps = reader, deltas, steps
        next(steps)
        self.push(begun)
        reader.n_dropped -= len(begun)
        deltas.restart()

    def push(self, text: str) -> list[ChatDelta]:
        """Add a piece of text; returns the deltas that are certain after it."""
        if text:
            self._reader.add(text)
            next(self._steps, None)
            if self._reader.n_kept > MAX_UNCERTAIN:
                self._steps.throw(NoCallError)
        return self._deltas.take()

    def finish(self) -> list[ChatDelta]:
        """Returns the deltas that were held back until the end of the text."""
        self._reader.is_over = True
        for _ in self._steps:
            pass
        self._deltas.finish()
        return self._deltas.take()


def _part_of(delta: ChatDelta) -> str | int:
    """A key that is equal for deltas of the same part of an answer."""
    return delta.call_index if isinstance(delta, CallDelta) else delta.kind


def _joined(deltas: Sequence[ChatDelta]) -> ChatDelta:
    first, last, text = deltas[0], deltas[-1], "".join([each.text for each in deltas])
    if isinstance(first, CallDelta) or isinstance(last, CallDelta):
        return first._replace(text=text)
    return first._replace(text=text, end=last.end)


class NoCallError(Exception):
    """The text that looked like a call is content."""


class Reader:
    """An incomplete text, and the current place in it.

    Text before the place is dropped; `keep` keeps it from an earlier place on.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.n_dropped = 0  # characters before `text`
        self.is_over = False  # the text is complete
        self._kept: int | None = None

    def add(self, text: str) -> None:
        start = self.at if self._kept is None else self._kept
        self.text = self.text[start:] + text
        self.at -= start
        self.n_dropped += start
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

    @property
    def n_read(self) -> int:
        """Number of characters before the current place, dropped ones included."""
        return self.n_dropped + self.at

    def spaces(self) -> Parsing[None]:
        while (yield from self.matching(SPACES)):
            pass

    def accept(self, *words: str) -> Parsing[str | None]:
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

    def next_word(self, *words: str) -> Parsing[str | None]:
        """Skip white space, then `accept` one of these words."""
        yield from self.spaces()
        return (yield from self.accept(*words))

    def peek(self) -> Parsing[str]:
        """The next character; empty at the end."""
        while self.at >= len(self.text) and not self.is_over:
            yield
        return self.text[self.at : self.at + 1]

    def matching(self, regex: re.Pattern[str]) -> Parsing[str]:
        """Skip and return a match of up to MAX_NAME characters; `regex` tests single characters."""
        while True:
            match = regex.match(self.text, self.at)
            end = match.end() if match else self.at
            if end < len(self.text) or end - self.at > MAX_NAME or self.is_over:
                found, self.at = self.text[self.at : end], end
                return found
            yield

    def until(self, marks: Marks, write: Write) -> Parsing[str | None]:
        """Write the text before the first of the marks; skips and returns it, None at the end."""
        while True:
            match = marks.regex.search(self.text, self.at) if marks.regex else None
            if match and (self.is_over or not marks.may_be_longer(self.text, match)):
                text, self.at = self.text[self.at : match.start()], match.start()
                write(text)
                self.at = match.end()
                return match[0]
            end = match.start() if match else len(self.text)
            if not match and not self.is_over:
                end -= marks.n_begun(self.text, self.at)
            text, self.at = self.text[self.at : end], end
            write(text)
            if self.is_over:
                return None
            yield

    def bounded(self, mark: str) -> Parsing[str | None]:
        """A short text before a mark, which is skipped; None if the mark does not come."""
        while True:
            end = self.text.find(mark, self.at, self.at + MAX_NAME + len(mark))
            if end >= 0:
                found, self.at = self.text[self.at : end], end + len(mark)
                return found
            if self.is_over or len(self.text) - self.at > MAX_NAME:
                return None
            yield

    def string(self, write: Write, quote: str = '"') -> Parsing[bool]:
        """Write the rest of a string, with its quote; False if the text ends in it."""
        while (mark := (yield from self.until(_STRING_MARKS[quote], write))) != quote:
            escaped = yield from self.peek()
            if mark is None or not escaped:
                return False
            write(mark + escaped)
            self.at += 1
        write(quote)
        return True

    def json_value(self, write: Write) -> Parsing[bool]:
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
