"""Tool calls as models write them -> as OpenAI's clients read them. Knows text, no models.

Of the forms that models were taught, one is read: `<tool_call>{"name": ..., "arguments": ...}
</tool_call>`, of Hermes and Qwen.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)


def can_call(template: str) -> bool:
    """Whether a chat template takes tools, and has calls written in the form that is read here."""
    return "tools" in template and OPENING in template


class ToolReader:
    """Parts a text into what is said and what is called, as it comes."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = False

    def push(self, text: str) -> str:
        """What is said for certain so far."""
        self._held += text
        if self._calls:
            return ""
        at = self._held.find(OPENING)
        if at < 0:
            at = len(self._held) - _overlap(self._held)
        else:
            self._calls = True
        said, self._held = self._held[:at], self._held[at:]
        return said

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What else is said, and the calls. What cannot be read as a call is said."""
        if not self._calls:
            return self._held, []
        calls = []
        for match in _CALL.finditer(self._held):
            call = _call_of(match[1])
            if call is None:
                return self._held, []
            calls.append(call)
        return ("", calls) if calls else (self._held, [])


def _call_of(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str):
        return None
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _overlap(text: str) -> int:
    longest = min(len(text), len(OPENING) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(OPENING[:n])), 0)
