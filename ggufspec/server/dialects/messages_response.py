"""Writes answers in the form of Anthropic's Messages API, whole or as events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ggufspec.server.dialects.answers import Answer, Part, Step
from ggufspec.server.dialects.renderer import NAMED_EVENTS
from ggufspec.server.errors import ApiError, anthropic_error
from ggufspec.server.events import ChoiceDelta, ChoiceFinished, ParsedRequest

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {  # by kind of part: type of delta, and name of its text
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_SIGNATURE = "unsigned"  # some clients send back only signed reasoning


class MessageRenderer:
    """The message that answers one request."""

    framing = replace(NAMED_EVENTS, keep_alive=NAMED_EVENTS.frame({"type": "ping"}))

    def __init__(self, parsed: ParsedRequest, model: str) -> None:
        self._answer = Answer(0, parsed.parser() if parsed.parser else None)
        self._n_prompt = len(parsed.prompts[0])
        self._head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._has_begun = False
        self._n_blocks = 0
        self._open: Part | None = None  # the part whose block has begun and not ended

    def add(self, event: ChoiceDelta | ChoiceFinished) -> list[dict[str, Any]]:
        """Process an event; returns its events of the stream."""
        found: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._head, **empty, "usage": _usage(self._n_prompt)}
            found.append({"type": "message_start", "message": message})
        for step in self._answer.add(event):
            found += self._block_events(step)
        return found

    def end(self) -> list[dict[str, Any]]:
        """The last events of a stream."""
        last = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [*self._block_end(), last, {"type": "message_stop"}]

    def body(self) -> dict[str, Any]:
        """The message as a whole."""
        content = [_block(part) for part in self._answer.parts]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage()}

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        """The last event of a failed stream."""
        return [anthropic_error(error)]

    def _block_events(self, step: Step) -> Iterator[dict[str, Any]]:
        part, text = step.part, step.delta.text
        if step.is_first:
            yield from self._block_end()
            self._open, self._n_blocks = part, self._n_blocks + 1
            empty = _block(Part(part.kind, id=part.id, name=part.name), signature="")
            yield self._of_block("content_block_start", content_block=empty)
        kind, name = _DELTAS[part.kind]
        yield self._of_block("content_block_delta", delta={"type": kind, name: text})

    def _block_end(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._of_block("content_block_delta", delta=delta)
        yield self._of_block("content_block_stop")

    def _of_block(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._n_blocks - 1, **more}

    def _stop(self) -> dict[str, Any]:
        reason, stop = self._answer.finish_reason, self._answer.stop
        if reason == "stop":
            return {"stop_reason": "stop_sequence" if stop else "end_turn", "stop_sequence": stop}
        return {"stop_reason": _REASONS.get(str(reason), "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        stats, n_thinking = self._answer.stats, self._answer.n_reasoning_tokens
        usage = _usage(stats.n_prompt, stats.n_prompt_reused, stats.n_generated)
        return {**usage, "output_tokens_details": {"thinking_tokens": n_thinking}}


def _usage(n_prompt: int, n_reused: int = 0, n_generated: int = 0) -> dict[str, int]:
    """Token counts. Every prompt is cached, without a separate step, so creation counts 0."""
    return {
        "input_tokens": n_prompt - n_reused,
        "cache_read_input_tokens": n_reused,
        "cache_creation_input_tokens": 0,
        "output_tokens": n_generated,
    }


def _block(part: Part, signature: str = _SIGNATURE) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": signature}
    called = {"type": "tool_use", "id": part.id, "name": part.name}
    return {**called, "input": part.arguments}
