"""What a chat parser returns."""

from __future__ import annotations

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
