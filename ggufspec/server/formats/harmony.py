"""Parses the channels of gpt-oss: messages with a header that says where they go."""

from __future__ import annotations

import re

from ggufspec.server.formats.parser import SteppedParser, new_id
from ggufspec.server.formats.reader import Marks, Steps

HEADER = "<|start|>assistant"
MESSAGE, CHANNEL = "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
MARKS = (*_ENDS, MESSAGE, CHANNEL, "<|constrain|>")


class HarmonyParser(SteppedParser):
    """Parses text in channels: analysis is reasoning, a message to a function is a call."""

    def __init__(self, begun: str, *, has_tools: bool) -> None:
        """`begun`: what the prompt has of the answer."""
        super().__init__(lambda: new_id(None))
        self._has_tools = has_tools
        self._start(begun)

    def _parse(self) -> Steps[None]:
        reader, deltas = self._reader, self._deltas
        before, inside = Marks([MESSAGE, *_ENDS]), Marks([*_ENDS, CHANNEL])
        while True:
            pieces: list[str] = []
            mark = yield from reader.until(before, pieces.append)
            header = "".join(pieces)
            recipient = _RECIPIENT.search(header) if self._has_tools else None
            if mark != MESSAGE:
                text = header.replace(CHANNEL, "")
                if text.strip() != "assistant":
                    deltas.content(text)
                if mark is None:
                    return
                continue
            deltas.part()
            write = deltas.content
            if recipient:
                deltas.begin(recipient[1], None)
                write = deltas.write
            elif "analysis" in header:
                write = deltas.reasoning
            mark = yield from reader.until(inside, write)
            if mark is None:
                return
