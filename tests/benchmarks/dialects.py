"""The recorded session in three dialects: chat completions, Anthropic's messages, responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
Counts = tuple[int, int, int]  # generated tokens, tokens of the prompt, those that were cached


@dataclass(frozen=True)
class Session:
    """Tools and messages, as in OpenAI's chat completions."""

    tools: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def before(self, index: int) -> Session:
        """The session up to a message."""
        return Session(self.tools, self.messages[:index])

    def length(self, index: int) -> int:
        """Characters of a message with its calls."""
        message = self.messages[index]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return len(message["content"]) + sum(map(len, map(json.dumps, calls)))


@dataclass(frozen=True)
class Dialect:
    """How a session is sent, and how the events of a streamed answer are read."""

    path: str
    body: Callable[[Session, int], dict[str, Any]]  # for an answer of so many tokens
    has_text: Callable[[Event], bool]
    counts: Callable[[Sequence[Event]], Counts]


_SHARED = {"model": "any", "temperature": 0, "stream": True}


def _chat_body(session: Session, n_tokens: int) -> dict[str, Any]:
    tools = {"tools": session.tools} if session.tools else {}
    usage = {"stream_options": {"include_usage": True}}
    return {**_SHARED, **tools, **usage, "messages": session.messages, "max_tokens": n_tokens}


def _chat_has_text(event: Event) -> bool:
    deltas = [choice["delta"] for choice in event.get("choices", ())]
    names = ("content", "reasoning_content", "tool_calls")
    return any(delta.get(name) for delta in deltas for name in names)


def _chat_counts(events: Sequence[Event]) -> Counts:
    usage = _last(events, "usage")
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["completion_tokens"], usage["prompt_tokens"], n_cached


def _messages_body(session: Session, n_tokens: int) -> dict[str, Any]:
    system, made = "", list[dict[str, Any]]()
    for message in session.messages:
        role, content = message["role"], message["content"]
        if role == "system":
            system = content
            continue
        blocks: list[dict[str, Any]] = [{"type": "text", "text": content}] if content else []
        if role == "tool":
            role, call_id = "user", message["tool_call_id"]
            blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": content}]
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            used = {"id": call["id"], "name": name, "input": json.loads(arguments)}
            blocks.append({"type": "tool_use", **used})
        made.append({"role": role, "content": blocks})
    functions = [tool["function"] for tool in session.tools]
    tools = [
        {**{key: each[key] for key in ("name", "description")}, "input_schema": each["parameters"]}
        for each in functions
    ]
    further = ({"system": system} if system else {}) | ({"tools": tools} if tools else {})
    return {**_SHARED, **further, "messages": made, "max_tokens": n_tokens}


def _messages_has_text(event: Event) -> bool:
    begun = event.get("content_block", {}).get("type")
    return bool(event["type"] == "content_block_delta" or begun == "tool_use")


def _messages_counts(events: Sequence[Event]) -> Counts:
    usage: dict[str, Any] = {}
    for event in events:
        usage |= event.get("message", {}).get("usage", {}) | event.get("usage", {})
    n_cached = usage.get("cache_read_input_tokens") or 0
    return usage["output_tokens"], usage["input_tokens"] + n_cached, n_cached


def _responses_body(session: Session, n_tokens: int) -> dict[str, Any]:
    instructions, made = {}, list[dict[str, Any]]()
    for message in session.messages:
        role, content = message["role"], message["content"]
        if role == "system":
            instructions = {"instructions": content}
        elif role == "tool":
            call_id = message["tool_call_id"]
            made.append({"type": "function_call_output", "call_id": call_id, "output": content})
        elif content:
            kind = "output_text" if role == "assistant" else "input_text"
            parts = [{"type": kind, "text": content}]
            made.append({"type": "message", "role": role, "content": parts})
        for call in message.get("tool_calls", ()):
            made.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in session.tools]
    further = {**instructions, **({"tools": tools} if tools else {})}
    return {**_SHARED, **further, "input": made, "max_output_tokens": n_tokens}


def _responses_has_text(event: Event) -> bool:
    is_call = event.get("item", {}).get("type") == "function_call"
    return is_call or str(event["type"]).endswith(".delta")


def _responses_counts(events: Sequence[Event]) -> Counts:
    usage = _last(events, "response")["usage"]
    n_cached = usage["input_tokens_details"]["cached_tokens"]
    return usage["output_tokens"], usage["input_tokens"], n_cached


def _last(events: Sequence[Event], name: str) -> Any:
    """The last value of this name; ValueError for a stream without one, which has an error."""
    for event in reversed(events):
        if event.get(name):
            return event[name]
    raise ValueError(f"the stream has no {name!r}; it ends with {str(events[-1:])[:400]}")


ALL = {
    "chat": Dialect("/v1/chat/completions", _chat_body, _chat_has_text, _chat_counts),
    "messages": Dialect("/v1/messages", _messages_body, _messages_has_text, _messages_counts),
    "responses": Dialect("/v1/responses", _responses_body, _responses_has_text, _responses_counts),
}
