"""Parses tool calls in generated text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from ggufspec.common.facts import json_object
from ggufspec.engine.text import overlap

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)


class ToolCallParser:
    """Separates a text that comes in pieces into content and tool calls."""

    def __init__(self) -> None:
        self._held = ""
        self._has_opening = False

    def push(self, text: str) -> str:
        """Add a piece; returns the content that cannot be part of a call any more."""
        self._held += text
        if self._has_opening:
            return ""
        at = self._held.find(OPENING)
        if at < 0:
            at = len(self._held) - overlap(self._held, OPENING)
        else:
            self._has_opening = True
        content, self._held = self._held[:at], self._held[at:]
        return content

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The remaining content, and the calls. What is not a valid call is content."""
        if not self._has_opening:
            return self._held, []
        calls = [_call_of(match[1]) for match in _CALL.finditer(self._held)]
        valid = [call for call in calls if call is not None]
        return ("", valid) if valid and len(valid) == len(calls) else (self._held, [])


def _call_of(text: str) -> dict[str, Any] | None:
    if (found := json_object(text)) is None:
        return None
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str):
        return None
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
