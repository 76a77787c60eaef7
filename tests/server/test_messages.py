"""Anthropic's Messages API: its blocks, its counts and errors, and what agents send."""

from __future__ import annotations

from typing import Any

import pytest
from server.dialects import HELLO, INPUT, SCHEMA, documents_of
from serving import Live, serving

from ggufspec.engine.engine import Engine
from ggufspec.server.dialects.messages import MessagesRequest

WEATHER: dict[str, Any] = {"name": "weather", "input_schema": SCHEMA}


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "x", "max_tokens": 200, "messages": HELLO, "temperature": 0, **more}


def messages_of(**body: Any) -> list[dict[str, Any]]:
    """The messages of the chat that a request is."""
    chat = MessagesRequest.model_validate(asked(**body)).chat()
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_blocks_become_messages_of_a_chat() -> None:
    turns = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "So", "signature": ""},
                {"type": "text", "text": "I say"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": INPUT},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "three"},
                {"type": "tool_result", "tool_use_id": "1", "content": "none", "is_error": True},
            ],
        },
        {"role": "system", "content": "four"},
    ]
    system, first, answer, result, *last = messages_of(messages=turns, system="Be brief.")
    assert system == {"role": "system", "content": "Be brief."}
    assert first == {"role": "user", "content": "one\ntwo"}
    assert (answer["content"], answer["reasoning_content"]) == ("I say", "So")
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": INPUT}
    assert result == {"role": "tool", "tool_call_id": "1", "content": "Error: none"}
    assert last == [{"role": "user", "content": "three"}, {"role": "system", "content": "four"}]
    first = [{"role": "system", "content": "one"}, *HELLO]
    assert messages_of(messages=first) == first


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_required_tool_is_called(forced: Live, choice: dict[str, Any]) -> None:
    one = {**choice, "disable_parallel_tool_use": True}
    body = forced.ok("/v1/messages", **asked(tools=[WEATHER], tool_choice=one))
    (call,) = body["content"]
    assert (body["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "weather")
    assert set(call["input"]) == {"city", "days"}


def test_tokens_are_counted_as_they_are_used(forced: Live) -> None:
    body = asked(system="Be brief.", tools=[WEATHER], tool_choice={"type": "auto"})
    del body["max_tokens"]
    n_tokens = forced.ok("/v1/messages/count_tokens", **body)["input_tokens"]
    usage = forced.ok("/v1/messages", **body, max_tokens=1)["usage"]
    assert n_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["cache_creation_input_tokens"] == 0
    for path, sent, least in (
        ("chat/completions", {"messages": HELLO}, {"max_tokens": 1}),
        ("responses", {"input": "hi"}, {"max_output_tokens": 16}),
    ):
        usage = forced.ok(f"/v1/{path}", **sent, **least)["usage"]
        counted = forced.ok(f"/v1/{path}/input_tokens", **sent)["input_tokens"]
        assert counted == usage.get("prompt_tokens", usage.get("input_tokens"))
    # Beyond the context, too: agents shorten a conversation by the count.
    many = {**body, "tools": [{**WEATHER, "name": f"tool_{i}"} for i in range(60)]}
    assert forced.ok("/v1/messages/count_tokens", **many)["input_tokens"] > forced.engine.n_ctx


def test_the_stop_sequence_that_came_is_named(endless: Engine) -> None:
    with serving(endless) as live:
        body = asked(stop_sequences=["xyz", "fg"])
        ended = {"stop_reason": "stop_sequence", "stop_sequence": "fg"}
        assert ended.items() <= live.ok("/v1/messages", **body).items()
        events = documents_of(live.post("/v1/messages", stream=True, **body))
        assert events[-2]["delta"] == ended


def test_errors_have_the_types_of_the_api(chat_pair: Engine) -> None:
    with serving(chat_pair, api_keys=("secret",), n_body_bytes=10_000) as live:
        cases: list[tuple[str, dict[str, Any], dict[str, str], int, str]] = [
            ("/v1/messages", asked(max_tokens=-1), {}, 400, "invalid_request_error"),
            ("/v1/messages", asked(system="!" * 10_000), {}, 413, "request_too_large"),
            ("/v1/messages/batches", {}, {}, 404, "not_found_error"),
            ("/v1/messages", asked(), {"Authorization": "x"}, 401, "authentication_error"),
        ]
        for path, body, headers, status, kind in cases:
            response = live.client.post(path, json=body, headers=headers)
            assert response.status_code == status
            assert response.json()["type"] == "error"
            assert response.json()["error"]["type"] == kind
        headers = {"Authorization": "", "X-Api-Key": "secret"}
        body = asked(max_tokens=1)
        assert live.client.post("/v1/messages", json=body, headers=headers).status_code == 200


def test_an_agents_request_is_accepted(forced: Live) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools: list[Any] = [
        {"name": f"tool_{i}", "input_schema": {"type": "object"}, "eager_input_streaming": True}
        for i in range(5)
    ]
    tools[-1] |= {**cached, "type": "custom", "strict": False, "input_examples": [INPUT]}
    body = asked(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"},
            {"type": "text", "text": "You are an agent. " * 50, **cached},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello", **cached}]}],
        tools=tools,
        tool_choice={"type": "auto", "disable_parallel_tool_use": False},
        thinking={"type": "adaptive", "display": "summarized"},
        output_config={"effort": "xhigh"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "me"},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        max_tokens=2,
        top_k=40,
        top_p=0.9,
        temperature=1,
        stream=True,
    )
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,x"}
    response = forced.client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert response.status_code == 200, response.text
    # Another header, as each request has: nothing of the prompt is processed again.
    body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1; cch=xyz;"
    usage = documents_of(forced.client.post("/v1/messages?beta=true", json=body))[-2]["usage"]
    assert usage["input_tokens"] == 1
    assert usage["cache_read_input_tokens"] > 500


def test_reasoning_and_formats_are_those_of_a_chat() -> None:
    for kind, wanted in (("enabled", True), ("adaptive", True), ("disabled", False)):
        body = asked(thinking={"type": kind, "budget_tokens": 1024})
        chat = MessagesRequest.model_validate(body).chat()
        assert chat.chat_template_kwargs == {"enable_thinking": wanted, "thinking": wanted}
    json_chat = MessagesRequest.model_validate(
        asked(output_config={"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}})
    ).chat()
    assert (json_chat.reasoning_effort, json_chat.json_schema) == ("high", SCHEMA)
    for one_call in (True, False):
        choice = {"type": "auto", "disable_parallel_tool_use": one_call}
        chat = MessagesRequest.model_validate(asked(tools=[WEATHER], tool_choice=choice)).chat()
        assert chat.parallel_tool_calls is not one_call
