"""The pieces of an answer that a chat parser returns, their collector, and the parser."""

from __future__ import annotations

import secrets
from itertools import groupby
from typing import NamedTuple

from ggufspec.server.formats.reader import MAX_UNCERTAIN, NoCallError, Reader, Steps
from ggufspec.server.formats.values import json_text


class ContentDelta(NamedTuple):
    text: str


class ReasoningDelta(NamedTuple):
    text: str


class CallDelta(NamedTuple):
    """More of one tool call; its first delta has the id and the name.

    `text` is a piece of JSON text: the pieces of a call, joined, are its arguments.
    """

    call_index: int
    text: str = ""
    id: str | None = None
    name: str | None = None


ChatDelta = ContentDelta | ReasoningDelta | CallDelta


class Deltas:
    """Collects the deltas of a parser; drops white space next to calls and reasoning."""

    def __init__(self, *, has_short_ids: bool) -> None:
        """`has_short_ids`: calls have ids of nine characters, as some templates require."""
        self._found: list[ChatDelta] = []
        self._has_short_ids = has_short_ids
        self._spaces: list[str] = []  # white space, dropped unless more of its part follows
        self.has_content = False
        self.n_calls = 0
        self.n_members = 0  # number of the last call's arguments
        self._skips_spaces = False

    def take(self) -> list[ChatDelta]:
        """Returns and removes the collected deltas; adjacent ones of one part are joined."""
        found, self._found = self._found, []
        return [
            first._replace(text="".join([first.text, *(each.text for each in more)]))
            for _, (first, *more) in groupby(found, _part_of)
        ]

    def content(self, text: str) -> None:
        self._add(ContentDelta, text)
        self.has_content = self.has_content or bool(text.strip())

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta, text)

    def _add(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if self._skips_spaces:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._skips_spaces = False
            self._found.append(kind("".join([*self._spaces, kept])))
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
            self._found.append(ContentDelta("".join(self._spaces)))

    def begin(self, name: str, id: str | None) -> None:
        self.part()
        made = (
            secrets.token_hex(4) + "0" if self._has_short_ids else f"call_{secrets.token_hex(12)}"
        )
        self._found.append(CallDelta(self.n_calls, "", id or made, name))
        self.n_calls += 1
        self.n_members = 0

    def write(self, text: str) -> None:
        """Add JSON text to the last call's arguments."""
        if text:
            self._found.append(CallDelta(self.n_calls - 1, text))

    def key(self, key: str) -> None:
        """Add a key to the last call's arguments, which are an object."""
        self.write(("{" if not self.n_members else ", ") + json_text(key) + ": ")
        self.n_members += 1

    def end_object(self) -> None:
        """Close the object of the last call's arguments."""
        self.write("}" if self.n_members else "{}")


class ChatParser:
    """Separates a text that comes in pieces into content, reasoning and tool calls.

    Raises nothing: what is no call is content.
    """

    def __init__(self, reader: Reader, deltas: Deltas, steps: Steps[None], begun: str) -> None:
        """`steps`: a new generator that reads from `reader` and writes to `deltas`.

        `begun`: the beginning of the answer, if the prompt contains it.
        """
        self._reader, self._deltas, self._steps = reader, deltas, steps
        next(steps)
        self.push(begun)
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


def _part_of(delta: ChatDelta) -> tuple[type, int]:
    """A key that is equal for deltas of the same part of an answer."""
    return type(delta), delta.call_index if isinstance(delta, CallDelta) else 0
