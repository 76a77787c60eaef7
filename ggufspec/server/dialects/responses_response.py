"""Writes OpenAI's responses, whole or as events in OpenAI's order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ggufspec.server.dialects.responses_request import ResponsesRequest
from ggufspec.server.dialects.shared import (
    NAMED_EVENTS,
    Answer,
    Document,
    Part,
    Step,
    logprob_entries,
    timings,
)
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceEvent, ChoiceFinished, ParsedRequest

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesRenderer:
    """The response to one request. Each part of the answer is an item of its output."""

    framing = NAMED_EVENTS

    def __init__(
        self,
        body: ResponsesRequest,
        parsed: ParsedRequest,
        model: str,
        store: Callable[[Document], None],
    ) -> None:
        """`store` is called with the response once it is finished."""
        self._answer = Answer(0, parsed.parser() if parsed.parser else None)
        self._with_logprobs = parsed.n_top is not None
        self._with_drafted, self._with_tokens = body.report_drafted, body.return_tokens
        self._store = store
        self._items: list[dict[str, Any]] = []
        self._n_events = 0
        self._response = _beginning(body, parsed, model)

    def add(self, event: ChoiceEvent) -> list[Document]:
        documents = [] if self._n_events else self._begin()
        for step in self._answer.add(event):
            if step.is_first:
                documents += [*self._end_item("completed"), *self._begin_item(step.part)]
            documents.append(self._delta(step))
        if isinstance(event, ChoiceFinished):
            documents += self._finish()
        return documents

    def end(self) -> list[Document]:
        return [self._event(f"response.{self._response['status']}", response=self._response)]

    def body(self) -> Document:
        return self._response

    def error(self, error: ApiError) -> list[Document]:
        """The last events of a failed stream; clients need the first ones of a stream, too."""
        documents = [] if self._n_events else self._begin()
        if self._items:
            part = self._answer.parts[len(self._items) - 1]
            self._items[-1] = _item(part, self._items[-1]["id"], "incomplete")
        code = "rate_limit_exceeded" if error.status_code == 429 else "server_error"
        self._response |= {
            "status": "failed",
            "error": {"code": code, "message": error.detail},
            "output": self._items,
        }
        return [*documents, self._event("response.failed", response=self._response)]

    def _begin(self) -> list[Document]:
        return [
            self._event(f"response.{name}", response={**self._response})
            for name in ("created", "in_progress")
        ]

    def _finish(self) -> list[Document]:
        answer, stats = self._answer, self._answer.stats
        is_cut = answer.finish_reason == "length"
        status: _Status = "incomplete" if is_cut else "completed"
        documents: list[Document] = []
        if not answer.parts:  # clients expect at least one item
            answer.parts.append(Part("text"))
            documents += self._begin_item(answer.parts[0])
        documents += self._end_item("incomplete" if answer.is_stopped_in_call else status)
        self._response |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": stats.n_prompt,
                "input_tokens_details": {
                    "cached_tokens": stats.n_prompt_reused,
                    "cache_write_tokens": 0,
                },
                "output_tokens": stats.n_generated,
                "output_tokens_details": {"reasoning_tokens": answer.n_reasoning_tokens},
                "total_tokens": stats.n_prompt + stats.n_generated,
            },
            "timings": timings([answer]),
        }
        if self._with_tokens:
            self._response["tokens"] = answer.tokens
        if self._with_drafted:
            self._response["ggufspec"] = [answer.statistics()]
        if self._response["store"]:
            self._store(self._response)
        return documents

    def _begin_item(self, part: Part) -> list[Document]:
        id = f"{_PREFIXES[part.kind]}_{secrets.token_hex(12)}"
        self._items.append(item := _item(Part(part.kind, "", part.id, part.name), id, None))
        place = {"output_index": len(self._items) - 1}
        documents = [self._event("response.output_item.added", item=item, **place)]
        if part.kind != "call":
            content = _content(Part(part.kind))
            documents.append(self._item_event("response.content_part.added", part=content))
        return documents

    def _delta(self, step: Step) -> Document:
        text = step.delta.text
        if step.part.kind == "call":
            return self._item_event("response.function_call_arguments.delta", delta=text)
        if step.part.kind == "reasoning":
            return self._item_event("response.reasoning_text.delta", delta=text)
        found = logprob_entries(step.logprobs) if self._with_logprobs else []
        return self._item_event("response.output_text.delta", delta=text, logprobs=found)

    def _end_item(self, status: _Status) -> list[Document]:
        if not self._items:
            return []
        part = self._answer.parts[len(self._items) - 1]
        item = self._items[-1] = _item(part, self._items[-1]["id"], status)
        documents: list[Document] = []
        if part.kind == "call":
            ended: dict[str, Any] = {"name": part.name, "arguments": part.text}
            documents.append(self._item_event("response.function_call_arguments.done", **ended))
        else:
            content = item["content"][0]
            ended = {"text": part.text}
            if part.kind == "text":
                ended["logprobs"] = content["logprobs"]
            name = "output_text" if part.kind == "text" else "reasoning_text"
            documents.append(self._item_event(f"response.{name}.done", **ended))
            documents.append(self._item_event("response.content_part.done", part=content))
        place = {"output_index": len(self._items) - 1}
        return [*documents, self._event("response.output_item.done", item=item, **place)]

    def _item_event(self, kind: str, **more: Any) -> Document:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        content = {} if self._items[-1]["type"] == "function_call" else {"content_index": 0}
        return self._event(kind, **place, **content, **more)

    def _event(self, kind: str, **more: Any) -> Document:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **more}


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    logprobs = logprob_entries(part.logprobs)
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}


def _item(part: Part, id: str, status: _Status | None) -> dict[str, Any]:
    """A part as an item; without a status it has just begun, and has no content."""
    head = {"id": id, "status": status or "in_progress"}
    contents = [_content(part)] if status else []
    if part.kind == "call":
        called = {"call_id": part.id, "name": part.name, "arguments": part.text}
        return {**head, "type": "function_call", **called}
    if part.kind == "reasoning":
        return {**head, "type": "reasoning", "summary": [], "content": contents}
    return {**head, "type": "message", "role": "assistant", "content": contents}


def _beginning(body: ResponsesRequest, parsed: ParsedRequest, model: str) -> dict[str, Any]:
    """A response without output, with the settings of the request and the defaults."""
    sent: Mapping[str, Any] = body.model_dump(mode="json", by_alias=True, warnings=False)
    sampling = parsed.options.sampling
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "service_tier": "default",
        "text": {"format": {"type": "text"}} if body.text is None else sent["text"],
        "tool_choice": sent["tool_choice"] or "auto",
        "tools": sent["tools"] or [],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "usage": None,
        **{name: sent[name] for name in ("instructions", "previous_response_id", "reasoning")},
        "store": body.store,
    }
