"""What a chat parser returns, and collects."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class ContentDelta(NamedTuple):
    """More text of the answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """More text of the reasoning before the answer."""

    text: str


class CallDelta(NamedTuple):
    """More of one tool call; its first delta has the id and the name.

    `arguments` is a piece of JSON text: the pieces of a call, joined, are its arguments.
    """

    call_index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


ChatDelta = ContentDelta | ReasoningDelta | CallDelta


class ChatParser(Protocol):
    """Separates a generated text that comes in pieces into content, reasoning and tool calls."""

    def push(self, text: str) -> list[ChatDelta]:
        """Add a piece; returns what is certain after it."""

    def finish(self) -> list[ChatDelta]:
        """What was still held back."""


class Deltas:
    """Collects what a parser found; white space before and after calls and reasoning is none."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._found: list[ChatDelta] = []
        self.new_id = new_id
        self._spaces: list[str] = []  # they belong to the content if more of it comes
        self.has_content = False
        self.n_calls = 0
        self._skips_spaces = False

    def take(self) -> list[ChatDelta]:
        """What was found since the last call; texts of one kind are joined."""
        found, self._found = self._found, []
        joined: list[ChatDelta] = []
        for delta in found:
            last = joined[-1] if joined else None
            if isinstance(last, ContentDelta) and isinstance(delta, ContentDelta):
                joined[-1] = ContentDelta(last.text + delta.text)
            elif isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
                joined[-1] = ReasoningDelta(last.text + delta.text)
            elif (
                isinstance(last, CallDelta)
                and isinstance(delta, CallDelta)
                and last.call_index == delta.call_index
            ):
                joined[-1] = last._replace(arguments=last.arguments + delta.arguments)
            else:
                joined.append(delta)
        return joined

    def content(self, text: str) -> None:
        """More content."""
        if self._skips_spaces:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._skips_spaces, self.has_content = False, True
            self._found += [ContentDelta("".join([*self._spaces, kept]))]
            self._spaces.clear()
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        if text:
            self._found.append(ReasoningDelta(text))

    def part(self) -> None:
        """Something other than content comes: the white space around it is dropped."""
        self._spaces.clear()
        self._skips_spaces = True

    def restart(self) -> None:
        """What came so far is of the prompt."""
        self.has_content = False
        self._spaces.clear()

    def finish(self) -> None:
        """Nothing else comes: white space at the end is content."""
        if self._spaces and self.has_content:
            self._found.append(ContentDelta("".join(self._spaces)))

    def begin(self, name: str, id: str | None) -> None:
        """A call is certain."""
        self.part()
        self._found.append(CallDelta(self.n_calls, "", id or self.new_id(), name))
        self.n_calls += 1

    def write(self, text: str) -> None:
        """More JSON text of the last call's arguments."""
        if text:
            self._found.append(CallDelta(self.n_calls - 1, text))
