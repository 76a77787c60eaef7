"""Finds out what a chat template writes, by rendering short conversations with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

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


_Asked = ParamSpec("_Asked")
_Ask = Callable[Concatenate["TemplateProbe", _Asked], bool]


def _once(ask: _Ask[_Asked]) -> _Ask[_Asked]:
    @wraps(ask)
    def answer(self: TemplateProbe, /, *args: _Asked.args, **named: _Asked.kwargs) -> bool:
        key = (ask.__name__, args, *named.items())
        if key not in self.known:
            self.known[key] = ask(self, *args, **named)
        return self.known[key]

    return answer


class TemplateProbe:
    """Answers questions about one template; each is tried once."""

    def __init__(self, render: Callable[[Sequence[Message], Tools], str]) -> None:
        """`render` raises PromptError where the template does not allow something."""
        self._render = render
        self._answers: dict[str, bool] = {}  # by conversation
        self.known: dict[tuple[object, ...], bool] = {}  # by question

    @_once
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

    @_once
    def takes_after(self, before: str, role: str, *, filler: str | None = None) -> bool:
        """Whether the template writes a message behind one of the role `before` ("": at the start).

        `filler`: content of a message between the two, of the other role in a conversation.
        """
        begun: list[Message] = [{"role": before, "content": "a"}] if before else []
        if before == "assistant":
            begun = [_USER, *begun]
        elif before == "tool":
            begun = self._called_with_result()
        in_parts = not self.takes(role) and self.takes(role, in_parts=True)
        said = {"role": role, "content": parts_of(_NEEDLE) if in_parts else _NEEDLE}
        last = [] if role == "user" else [_USER]
        if filler is not None:
            begun = [*begun, {"role": other_role(role), "content": filler}]
        return self._writes([*begun, said, *last])

    @_once
    def takes_calls(self, *, call_id: str = _ID, n: int = 1) -> bool:
        """Whether calls are written beside one of the empty contents."""
        return any(self.takes_call(content, call_id=call_id, n=n) for content in ("", None))

    @_once
    def takes_call(
        self, content: str | None, *, reasoning: str = "", call_id: str = _ID, n: int = 1
    ) -> bool:
        """Whether the last of n calls is written beside this content."""
        filled, empty = (_ARGUMENTS, {}) if self.takes_objects() else (_TEXT, "{}")
        arguments = [*[empty] * (n - 1), filled]
        return self._writes(_called(arguments, content, reasoning, call_id))

    @_once
    def takes_objects(self) -> bool:
        """Whether the arguments of calls are objects; else they are JSON text."""

        def writes(arguments: object) -> bool:
            return any(self._writes(_called([arguments], content)) for content in ("", None))

        return writes(_ARGUMENTS) or not writes(_TEXT)

    @_once
    def takes_name_from_id(self) -> bool:
        """Whether a call's id is written, but not its name, which the id then has to contain."""
        empty = {} if self.takes_objects() else "{}"

        def writes(**call: str) -> bool:
            return any(self._writes(_called([empty], content, **call)) for content in ("", None))

        return self.takes_calls() and not writes(name=_NEEDLE) and writes(call_id=_NEEDLE)

    @_once
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


def other_role(role: str) -> str:
    """The user's for the assistant's, and the assistant's for the user's."""
    return "user" if role == "assistant" else "assistant"


def parts_of(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _called(
    arguments: Sequence[object],
    content: str | None = "",
    reasoning: str = "",
    call_id: str = _ID,
    name: str = "f",
) -> list[Message]:
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        said |= {"thinking": reasoning, "reasoning_content": reasoning}
    said["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": each}}
        for each in arguments
    ]
    result = {"role": "tool", "content": "b", "name": "f", "tool_call_id": call_id}
    return [_USER, said, *[result] * len(arguments)]
