"""The four APIs for conversations in one form: what is asked of each, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import tiny
from serving import Live

# It shows tools and reasoning; both come back from the text that the model writes.
TEMPLATE = (
    "{# <think> </think> #}{% if tools %}<|im_start|>system\nAnswer with <tool_call>{name, "
    "arguments}</tool_call>:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    + tiny.CHATML.replace(
        "{{ message['content'] }}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ message['content'] }}{% for call in message.tool_calls %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}",
    )
)
# It begins an answer with reasoning.
OPENED = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {  # in the order, and with the keys, that Ollama's client sends
    "type": "object",
    "required": ["city", "days"],
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
INPUT = {"city": "Paris", "days": 2}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(INPUT)}}}\n</tool_call>'


class Said(NamedTuple):
    """An answer, without its ids."""

    text: str
    reasoning: str
    calls: list[tuple[str, Any]]  # name and arguments
    reason: str  # of its end, in the words of the API
    n_prompt: int
    n_reused: int | None  # None: the API does not say
    n_written: int


class Dialect(NamedTuple):
    path: str
    body: Callable[..., dict[str, Any]]
    whole: Callable[[Any], Said]
    streamed: Callable[[httpx.Response], Said]
    answered: Callable[[Any], list[Any]]  # what is sent back: the answer, with results of its calls
    ends: dict[str, str]  # reasons, by their names in OpenAI's chats
    error: Callable[[list[Any]], str]  # the message of a stream that failed, from its documents
    first: list[str]  # the types of the documents of a stream before any text

    def ask(self, live: Live, turns: Any = HELLO, *, stream: bool = False, **more: Any) -> Said:
        response = self.post(live, turns, stream=stream, **more)
        assert response.status_code == 200, response.text
        return self.streamed(response) if stream else self.whole(response.json())

    def post(self, live: Live, turns: Any = HELLO, **more: Any) -> httpx.Response:
        asked = {name: value for name, value in more.items() if value is not None}
        return live.post(self.path, **self.body(turns, **asked))


def documents_of(response: httpx.Response) -> list[Any]:
    """The documents of a stream; each event that is named has the name of its type."""
    if response.headers["content-type"] == "application/x-ndjson":
        return [json.loads(line) for line in response.text.splitlines()]
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.split("\n\n"):
        name, _, data = frame.rpartition("data: ")
        if data and data != "[DONE]" and not frame.startswith(":"):
            found.append(json.loads(data))
            assert name.strip() in ("", f"event: {found[-1].get('type')}")
    return found


def _limited(asked: dict[str, Any], name: str) -> dict[str, Any]:
    limit = asked.pop("limit", None)
    return {"temperature": 0, **asked, **({} if limit is None else {name: limit})}


# Chat completions


def _chat(turns: Any, schema: Any = None, **asked: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    formed = {"response_format": form} if schema else {}
    usage = {"stream_options": {"include_usage": True}}
    return {"messages": turns, **formed, **usage, **_limited(asked, "max_tokens")}


def _said_by_chat(body: Any) -> Said:
    (choice,), usage = body["choices"], body["usage"]
    message = choice["message"]
    called = [each["function"] for each in message.get("tool_calls", ())]
    return Said(
        message["content"] or "",
        message.get("reasoning_content", ""),
        [(each["name"], _loaded(each["arguments"])) for each in called],
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )


def _streamed_by_chat(response: httpx.Response) -> Said:
    *chunks, last = documents_of(response)
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    choices = [chunk["choices"][0] for chunk in chunks]
    first, *deltas, end = [choice["delta"] for choice in choices]
    assert first == {"role": "assistant", "content": None}
    assert end == {}
    assert {choice["finish_reason"] for choice in choices[:-1]} <= {None}
    calls: list[Any] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if call["index"] == len(calls):
            assert call["id"]
            calls.append({**call, "function": {"name": call["function"]["name"], "arguments": ""}})
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    joined = {
        name: "".join(delta.get(name, "") for delta in deltas)
        for name in ("content", "reasoning_content")
    }
    choice = {"message": {**joined, "tool_calls": calls}, **choices[-1]}
    return _said_by_chat({"choices": [choice], "usage": last["usage"]})


def _answered_by_chat(body: Any) -> list[Any]:
    message = body["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        for call in message["tool_calls"]
    ]
    return [message, *results]


# Anthropic's messages


def _message(
    turns: Any, stop: Any = None, tools: Any = (), schema: Any = None, **asked: Any
) -> dict[str, Any]:
    own = [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
        for each in tools
    ]
    formed = {"output_format": {"type": "json_schema", "schema": schema}} if schema else {}
    stops = {} if stop is None else {"stop_sequences": stop}
    body = {"max_tokens": 100_000, **_limited(asked, "max_tokens")}
    return {"messages": turns, **({"tools": own} if own else {}), **formed, **stops, **body}


def _said_by_message(body: Any) -> Said:
    def joined(kind: str, name: str) -> str:
        return "".join(block[name] for block in body["content"] if block["type"] == kind)

    usage = body["usage"]
    n_reused = usage["cache_read_input_tokens"]
    return Said(
        joined("text", "text"),
        joined("thinking", "thinking"),
        [(block["name"], block["input"]) for block in body["content"] if "input" in block],
        body["stop_reason"],
        usage["input_tokens"] + n_reused,
        n_reused,
        usage["output_tokens"],
    )


def _streamed_by_message(response: httpx.Response) -> Said:
    start, *events, delta, stop = documents_of(response)
    assert stop == {"type": "message_stop"}
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] > 0
    blocks: list[Any] = []
    for event in events:  # each block begins, is added to, and ends before the next
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "deltas": [], "is_open": True})
        assert event["index"] == len(blocks) - 1
        assert blocks[-1]["is_open"]
        if event["type"] == "content_block_delta":
            blocks[-1]["deltas"].append(event["delta"])
        blocks[-1]["is_open"] = event["type"] != "content_block_stop"
    names = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
    for block in blocks:
        assert not block["is_open"]
        text = "".join(each.get(names[block["type"]], "") for each in block["deltas"])
        if block["type"] == "tool_use":
            block["input"] = _loaded(text)
        else:
            block[block["type"]] = text
        is_signed = block["deltas"][-1]["type"] == "signature_delta"
        assert is_signed == (block["type"] == "thinking")
    usage = {**delta["usage"]}
    return _said_by_message({"content": blocks, **delta["delta"], "usage": usage})


def _answered_by_message(body: Any) -> list[Any]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}
        for block in body["content"]
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": results}]


# OpenAI's responses


def _response(turns: Any, tools: Any = (), schema: Any = None, **asked: Any) -> dict[str, Any]:
    own = [{"type": "function", **each["function"]} for each in tools]
    formed = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    body = {"input": turns, **({"tools": own} if own else {}), **(formed if schema else {})}
    return {**body, **_limited(asked, "max_output_tokens")}


def _said_by_response(body: Any) -> Said:
    def joined(kind: str) -> str:
        contents = [item["content"] for item in body["output"] if item["type"] == kind]
        return "".join(part["text"] for content in contents for part in content)

    usage = body["usage"]
    called = [item for item in body["output"] if item["type"] == "function_call"]
    return Said(
        joined("message"),
        joined("reasoning"),
        [(item["name"], _loaded(item["arguments"])) for item in called],
        body["status"],
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
    )


def _streamed_by_response(response: httpx.Response) -> Said:
    events = documents_of(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    body = events[-1]["response"]
    assert events[-1]["type"] == f"response.{body['status']}"
    assert body["output"] == [
        each["item"] for each in events if each["type"] == "response.output_item.done"
    ]
    for i, item in enumerate(body["output"]):
        mine = [each for each in events if each.get("output_index") == i]
        ids = {each["item_id"] if "item_id" in each else each["item"]["id"] for each in mine}
        assert ids == {item["id"]}
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(each["delta"] for each in mine if each["type"].endswith(".delta")) == text
        assert any(text == each.get("arguments", each.get("text")) for each in mine)
    return _said_by_response(body)


def _answered_by_response(body: Any) -> list[Any]:
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        for item in body["output"]
        if item["type"] == "function_call"
    ]
    return [*body["output"], *results]


# Ollama's chats


def _ollama(
    turns: Any, tools: Any = None, schema: Any = None, stream: bool = False, **asked: Any
) -> dict[str, Any]:
    more = {"tools": tools} if tools else {}
    more |= {"format": schema} if schema else {}
    options = _limited(asked, "num_predict")
    return {"messages": turns, **more, "options": options, "stream": stream}


def _said_by_ollama(body: Any) -> Said:
    message = body["message"]
    called = [each["function"] for each in message.get("tool_calls", ())]
    return Said(
        message["content"],
        message.get("thinking", ""),
        [(each["name"], each["arguments"]) for each in called],
        body["done_reason"],
        body["prompt_eval_count"],
        None,
        body["eval_count"],
    )


def _streamed_by_ollama(response: httpx.Response) -> Said:
    *parts, last = documents_of(response)
    assert last["done"] is True
    assert not any(part["done"] for part in parts)
    messages = [part["message"] for part in parts]
    message = {
        "content": "".join(each["content"] for each in messages),
        "thinking": "".join(each.get("thinking", "") for each in messages),
        "tool_calls": [call for each in messages for call in each.get("tool_calls", ())],
    }
    return _said_by_ollama({**last, "message": message})


def _answered_by_ollama(body: Any) -> list[Any]:
    results = [
        {"role": "tool", "tool_name": call["function"]["name"], "content": "rain"}
        for call in body["message"]["tool_calls"]
    ]
    return [body["message"], *results]


def _loaded(arguments: str) -> Any:
    """The arguments of a call; those that were cut off as they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        *(_chat, _said_by_chat, _streamed_by_chat, _answered_by_chat),
        {},
        lambda found: str(found[-1]["error"]["message"]),
        [],
    ),
    "messages": Dialect(
        "/v1/messages",
        *(_message, _said_by_message, _streamed_by_message, _answered_by_message),
        {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"},
        lambda found: str(found[-1]["error"]["message"]),
        ["ping"],
    ),
    "responses": Dialect(
        "/v1/responses",
        *(_response, _said_by_response, _streamed_by_response, _answered_by_response),
        {"length": "incomplete", "stop": "completed", "tool_calls": "completed"},
        lambda found: str(found[-1]["response"]["error"]["message"]),
        ["response.created", "response.in_progress"],
    ),
    "ollama": Dialect(
        "/api/chat",
        *(_ollama, _said_by_ollama, _streamed_by_ollama, _answered_by_ollama),
        {"tool_calls": "stop"},
        lambda found: str(found[-1]["error"]),
        [],
    ),
}
