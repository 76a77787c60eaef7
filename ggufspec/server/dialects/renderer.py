"""The interface between routes and dialects: how to write an answer, and frame a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceDelta, ChoiceFinished

Document = Mapping[str, Any]
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Framing:
    """How the documents of a stream are written. `end`: the bytes after the last one.

    `keep_alive`: bytes for a waiting client; b"": none. `is_named`: the name of each event is the
    `type` of its document.
    """

    media_type: str
    before: bytes = b"data: "
    after: bytes = b"\n\n"
    keep_alive: bytes = b": waiting\n\n"  # a comment, which clients ignore
    end: bytes = b""
    is_named: bool = False

    def frame(self, document: Document) -> bytes:
        """The bytes of one document."""
        name = b"event: %b\n" % document["type"].encode() if self.is_named else b""
        return b"".join([name, self.before, _to_json(document).encode(), self.after])


CHUNKS = Framing("text/event-stream", end=b"data: [DONE]\n\n")
NAMED_EVENTS = Framing("text/event-stream", is_named=True)
JSON_LINES = Framing("application/x-ndjson", before=b"", after=b"\n", keep_alive=b"")


class Renderer(Protocol):
    """Writes the answer to one request, whole or as the documents of a stream."""

    framing: Framing

    def add(self, event: ChoiceDelta | ChoiceFinished) -> Sequence[Document]:
        """Process an event; returns its documents."""

    def end(self) -> Sequence[Document]:
        """The documents after the last event."""

    def body(self) -> Document:
        """The body of a response without streaming, after the last event."""

    def error(self, error: ApiError) -> Sequence[Document]:
        """The last documents of a failed stream."""
