"""Requests of Anthropic's Messages API: the chats that they are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import Live

import ggufspec
from ggufspec.server import fields
from ggufspec.server.dialects.messages import CustomTool, MessagesRequest
from ggufspec.server.dialects.ollama import OllamaRequest
from ggufspec.server.schema import GenerationBody

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object"}}
INPUT = {"city": "Paris"}


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "x", "max_tokens": 200, "messages": HELLO, **more}


def message_of(**body: Any) -> list[dict[str, Any]]:
    """The messages of the chat that a request is."""
    chat = MessagesRequest.model_validate(asked(**body)).chat()
    return [message.model_dump(exclude_none=True) for message in chat.messages]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported"),
        ({"container": "c"}, "container: is not supported"),
        ({"max_token": 1}, "max_token: this field is unknown to the server"),
        ({"n": 2}, "n is 2"),
        ({"n_cmpl": 2}, "n_cmpl is 2"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop is given twice"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "json_schema": {"type": "object"},
            },
            "json_schema is given twice",
        ),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "output_format is given twice",
        ),
        ({"thinking": {"type": "always"}}, "thinking.type is 'always'; it must be 'enabled'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            "'web_search_20250305' are not",
        ),
        (
            {"tools": [{**WEATHER, "defer_loading": True}]},
            "tools.0.defer_loading: is not supported",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "no other, needs a name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice names 'x'",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires a call"),
        ({"system": [{"type": "image"}]}, "system.0: blocks of type 'image' are not supported"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    live: Live, more: dict[str, Any], message: str
) -> None:
    response = live.post("/v1/messages", **asked(**more))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["image", "document", "server_tool_use", "search_result"])
@pytest.mark.parametrize("inside", [False, True])
def test_blocks_that_are_no_text_are_refused(live: Live, kind: str, inside: bool) -> None:
    block: dict[str, Any] = {"type": kind, "source": {"type": "base64", "data": ""}}
    if inside:
        block = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    body = asked(messages=[{"role": "user", "content": [block]}])
    message = live.post("/v1/messages", **body).json()["error"]["message"]
    assert message.startswith("messages.0.content.0")
    assert f"blocks of type '{kind}' are not supported" in message


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("assistant", {"type": "tool_result", "tool_use_id": "1"}),
        ("user", {"type": "tool_use", "id": "1", "name": "weather", "input": INPUT}),
        ("user", {"type": "thinking", "thinking": "So"}),
    ],
)
def test_blocks_of_the_other_role_are_refused(live: Live, role: str, block: Any) -> None:
    body = asked(messages=[*HELLO, {"role": role, "content": [block]}])
    message = live.post("/v1/messages", **body).json()["error"]["message"]
    assert message.startswith(f"messages.1: blocks of type '{block['type']}' belong to messages")


def test_the_guide_lists_the_fields_of_both_apis(live: Live) -> None:
    guide = (Path(ggufspec.__file__).parent / "server" / "README.md").read_text(encoding="utf-8")
    own = {*MessagesRequest.model_fields, *CustomTool.model_fields, *OllamaRequest.model_fields}
    names = own - {*GenerationBody.model_fields, "name", "description", "type"}
    for kind in ("messages_api", "custom_tools", "blocks", "thinking", "ollama"):
        names |= {*fields.IGNORED.get(kind, {}), *fields.REFUSED.get(kind, {})}
    for name in names | {*fields.RENAMED["ollama_options"]}:
        assert f"`{name}`" in guide, name


def test_blocks_become_messages_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": INPUT}
    turns = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "So", "signature": ""},
                {"type": "text", "text": "I say"},
                call,
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
    system, first, answer, result, *last = message_of(messages=turns, system="Be brief.")
    assert system == {"role": "system", "content": "Be brief."}
    assert first == {"role": "user", "content": "one\ntwo"}
    assert (answer["content"], answer["reasoning_content"]) == ("I say", "So")
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": INPUT}
    assert result == {"role": "tool", "tool_call_id": "1", "content": "Error: none"}
    assert last == [{"role": "user", "content": "three"}, {"role": "system", "content": "four"}]
    first = [{"role": "system", "content": "one"}, *HELLO]
    assert message_of(messages=first) == first
