"""Tools of OpenAI's chats: calls that are forced, and earlier calls in the template."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from server.dialects import CALL, HELLO, TEMPLATE, TOOL
from serving import Live

from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.engine import Engine
from ggufspec.server.requests import plan_answer
from ggufspec.server.schema import ChatRequest


def test_a_schema_that_cannot_be_guaranteed_is_named_by_its_tool(forced: Live) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema, "strict": True}}
    asked = {"messages": HELLO, "tools": [TOOL, bad], "tool_choice": "required"}
    error = forced.post("/v1/chat/completions", **asked).json()["error"]
    assert error["message"].startswith("the schema of the tool 'bad': ")


def test_a_required_call_is_one_unless_several_are_asked_for(chat_pair: Engine) -> None:
    template = ChatTemplate(TEMPLATE, bos_text="", eos_text="")
    engine: Any = SimpleNamespace(chat_template=template, vocab=chat_pair.vocab)

    def grammar(**asked: Any) -> Any:
        body = ChatRequest.model_validate({"messages": HELLO, "tools": [TOOL], **asked})
        return plan_answer(body, [TOOL], [], {}, engine).options.get("grammar")

    one = grammar(tool_choice="required", parallel_tool_calls=False)
    assert grammar(tool_choice="required") == one
    assert grammar(tool_choice="required", parallel_tool_calls=True) != one
    assert grammar() is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_says_which_parts_of_a_schema_a_required_call_may_violate(
    forced: Live, stream: bool
) -> None:
    ones = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    properties = {
        "x": {**ones, "uniqueItems": True},
        "\n\u00e9": {**ones, "contains": {"type": "null"}},
        "never": {"not": {}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["x"]}
    function = {"name": "add", "parameters": parameters}
    asked = {"messages": HELLO, "tool_choice": "required", "temperature": 0, "stream": stream}
    response = forced.post(
        "/v1/chat/completions", tools=[{"type": "function", "function": function}], **asked
    )
    assert response.status_code == 200, response.text
    header = response.headers["x-ggufspec-not-enforced"]
    assert header.split("; ") == [
        "add #/properties/x: uniqueItems",
        r"add #/properties/\n\u00e9: contains",
    ]
    if not stream:
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["x"] == [1, 1]
    strict = {"type": "function", "function": {**function, "strict": True}}
    refused = forced.post("/v1/chat/completions", tools=[strict], **asked)
    assert refused.status_code == 400
    assert "#/properties/" in refused.text
    plain = forced.post("/v1/chat/completions", messages=HELLO, tools=[TOOL], max_tokens=1)
    assert "x-ggufspec-not-enforced" not in plain.headers


def test_a_text_that_was_cut_off_in_a_call_says_so(caller: Live) -> None:
    n_tokens = len(tiny.BPE.spell(f"<think>So é</think>I say\n{CALL[:-20]}"))
    asked = {"messages": HELLO, "tools": [TOOL], "temperature": 0, "max_tokens": n_tokens}
    (choice,) = caller.ok("/v1/chat/completions", **asked)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert call["function"]["arguments"].startswith('{"city": "Paris"')
    assert not call["function"]["arguments"].endswith("}")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    messages = [*HELLO, choice["message"], result]
    caller.ok("/v1/chat/completions", messages=messages, tools=[TOOL], max_tokens=1)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"x": [1, 2', {"x": [1, 2]}),
        (r'{"x": "a\"b\u00', {"x": 'a"b'}),
        (r'{"x": 1, "y": "\ud83d', {"x": 1}),
        ('{"x": {"y": [1, tru', {"x": {"y": [1]}}),
        ("", {}),
        ("null", {}),
        ("[1]", {"arguments": "[1]"}),
        ("over there", {"arguments": "over there"}),
        ({"x": 1}, {"x": 1}),
    ],
)
def test_arguments_that_come_back_may_be_any_text(
    forced: Live, sent: object, shown: dict[str, Any]
) -> None:
    def messages(arguments: object, content: str | None) -> list[Any]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": content},
        ]

    body = forced.ok("/v1/chat/completions", messages=messages(sent, None), max_tokens=1)
    wanted = forced.engine.render(messages(shown, ""))
    assert body["usage"]["prompt_tokens"] == len(wanted)


def test_a_function_of_old_is_shown_as_a_tool(forced: Live) -> None:
    called = {"name": "add", "arguments": '{"x": 1}'}
    old = [
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "add", "content": "3"},
    ]
    new = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "add", "function": called}]},
        {"role": "tool", "tool_call_id": "add", "content": "3"},
    ]
    body = forced.ok("/v1/chat/completions", messages=[*HELLO, *old], max_tokens=1)
    assert body["usage"]["prompt_tokens"] == len(forced.engine.render([*HELLO, *new]))


def test_tools_that_may_not_be_used_are_not_shown(forced: Live) -> None:
    asked = {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", "max_tokens": 1}
    body = forced.ok("/v1/chat/completions", **asked)
    assert body["usage"]["prompt_tokens"] == len(forced.engine.render(HELLO))
