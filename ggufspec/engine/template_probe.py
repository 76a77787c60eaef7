"""Finds out what a chat template writes, by rendering short conversations with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ggufspec.errors import PromptError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and other keys that a template uses
Tools = Sequence[Mapping[str, object]]

COMPLETE: Mapping[str, object] = {  # what a function has besides its name
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
_NEEDLE = "q7Zkw"  # what has to be in the text of a short conversation
_ID = "call00001"  # nine letters or digits, which all templates allow
_TOOL = {"type": "function", "function": {"name": "f", **COMPLETE}}
_ARGUMENTS = {_NEEDLE: 1}
_TEXT = json.dumps(_ARGUMENTS)
_USER: Message = {"role": "user", "content": "a"}
# Arguments or contents that were written as Python shows them, parts also as JSON.
_RAW = ("{'" + _NEEDLE, "None", f"'text': '{_NEEDLE}", f'"text": "{_NEEDLE}')


class LimitError(PromptError):
    """A template exceeded a limit of time or memory."""


class TemplateProbe:
    """Answers questions about one template; each is tried once."""

    def __init__(self, render: Callable[[Sequence[Message], Tools], str]) -> None:
        """`render` raises PromptError where the template does not allow something."""
        self._render = render
        self._answers: dict[str, bool] = {}

    def takes(self, role: str, *, in_parts: bool = False) -> bool:
        """Whether the template writes a content of this kind: a text, or parts."""
        said = {"role": role, "content": parts_of("", _NEEDLE) if in_parts else _NEEDLE}
        messages: list[Message] = [_USER, said, _USER]
        if role == "tool":
            messages = [
                *self._called_with_result()[:-1],
                {**said, "name": "f", "tool_call_id": _ID},
            ]
        elif role != "assistant":
            messages = [said] if role == "user" else [said, _USER]
        return self._writes(messages)

    def takes_after(self, before: str, role: str, *, filler: Message | None = None) -> bool:
        """Whether the template writes a message behind one of the role `before` ("": at the start).

        `filler`: a message between the two.
        """
        begun: list[Message] = [{"role": before, "content": "a"}] if before else []
        if before == "assistant":
            begun = [_USER, *begun]
        elif before == "tool":
            begun = self._called_with_result()
        in_parts = not self.takes(role) and self.takes(role, in_parts=True)
        said = {"role": role, "content": parts_of(_NEEDLE) if in_parts else _NEEDLE}
        last = [] if role == "user" else [_USER]
        return self._writes([*begun, *([filler] if filler else []), said, *last])

    def takes_calls(self, *, call_id: str = _ID, n: int = 1) -> bool:
        """Whether calls are written beside one of the empty contents."""
        return any(self.takes_call(content, call_id=call_id, n=n) for content in ("", None))

    def takes_call(
        self, content: str | None, *, reasoning: str = "", call_id: str = _ID, n: int = 1
    ) -> bool:
        """Whether the last of n calls is written beside this content."""
        filled, empty = (_ARGUMENTS, {}) if self.takes_objects() else (_TEXT, "{}")
        arguments = [*[empty] * (n - 1), filled]
        return self._writes(_called(arguments, content, reasoning, call_id))

    def takes_objects(self) -> bool:
        """Whether the arguments of calls are objects; else they are JSON text."""

        def writes(arguments: object) -> bool:
            return any(self._writes(_called([arguments], content)) for content in ("", None))

        return writes(_ARGUMENTS) or not writes(_TEXT)

    def takes_name_from_id(self) -> bool:
        """Whether a call's id is written, but not its name, which the id then has to contain."""
        empty = {} if self.takes_objects() else "{}"

        def writes(**call: str) -> bool:
            return any(self._writes(_called([empty], content, **call)) for content in ("", None))

        return self.takes_calls() and not writes(name=_NEEDLE) and writes(call_id=_NEEDLE)

    def takes_bare_tool(self) -> bool:
        """Whether a tool needs neither description nor parameters."""
        return self._writes([_USER], [{"type": "function", "function": {"name": _NEEDLE}}])

    def _called_with_result(self) -> list[Message]:
        return _called([{} if self.takes_objects() else "{}"])

    def _writes(self, messages: Sequence[Message], tools: Tools | None = None) -> bool:
        """Whether the text has the needle, and no value in Python's or JSON's notation."""
        if tools is None:
            tools = [_TOOL] if any(message["role"] == "tool" for message in messages) else []
        key = json.dumps([messages, tools])
        if key not in self._answers:
            try:
                text = self._render(messages, tools)
            except LimitError:
                raise
            except PromptError:
                text = ""
            raw = any(each in text for each in _RAW)
            self._answers[key] = _NEEDLE in text and not raw
        return self._answers[key]


def parts_of(*texts: str) -> list[dict[str, str]]:
    """A content of text parts."""
    return [{"type": "text", "text": text} for text in texts]


def _called(
    arguments: Sequence[object],
    content: str | None = "",
    reasoning: str = "",
    call_id: str = _ID,
    name: str = "f",
) -> list[Message]:
    """A conversation with calls and their results."""
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        said |= {"thinking": reasoning, "reasoning_content": reasoning}
    said["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": each}}
        for each in arguments
    ]
    result = {"role": "tool", "content": "b", "name": "f", "tool_call_id": call_id}
    return [_USER, said, *[result] * len(arguments)]
