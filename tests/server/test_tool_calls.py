"""Tools: into the template as the model knows them, out of its text as OpenAI's clients do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import tiny
from serving import Live, events_of, said, serving

import ggufspec
from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.engine import Engine
from ggufspec.server.requests import plan_answer
from ggufspec.server.schema import ChatRequest

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>.\n{% endif %}"
    + tiny.CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for call in message.tool_calls %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}",
    )
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
TURN: list[Any] = [{"role": "user", "content": "hello"}]
TEXT = 'I say <tool_call>{"name": "add", "arguments": {"x": [1, 2]}}</tool_call>'


@pytest.fixture(scope="module")
def caller(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Calls a tool, whatever it is asked, if the prompt is as long as that of TURN."""
    n_prompt = len(chat_pair.render(TURN, TEMPLATE, tools=TOOLS))
    path: Path = tmp_path_factory.mktemp("models") / "caller.gguf"
    script = [*tiny.BPE.spell(TEXT), tiny.BPE.id_of("<|im_end|>")]
    how: dict[str, Any] = {"n_prompt": n_prompt, "vocab": tiny.BPE, "n_ctx_train": 512}
    tiny.write_timed(path, script, chat_template=TEMPLATE, **how)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


def test_templates_are_shown_the_tools(chat_pair: Engine) -> None:
    tokens = chat_pair.render(TURN, TEMPLATE, tools=TOOLS)
    shown = b"".join(map(chat_pair.vocab.piece, tokens)).decode()
    assert shown.startswith(f"<tools>{json.dumps(TOOLS)}</tools>")


def test_a_call_is_read(caller: Live) -> None:
    with openai.OpenAI(base_url=f"{caller.url}/v1", api_key="x", max_retries=0) as client:
        choice = client.chat.completions.create(
            model="x", messages=TURN, tools=TOOLS, temperature=0
        ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I say"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"x": [1, 2]}


def test_a_call_is_read_from_a_stream(caller: Live) -> None:
    # One token a round: a long draft, as measured costs may allow, can be all of the arguments.
    plain = {"temperature": 0, "draft_n": 0}
    asked = {"messages": TURN, "tools": TOOLS, "stream": True, **plain}
    events = events_of(caller.post("/v1/chat/completions", **asked))
    assert said(events) == "I say"
    first, *others = [
        call
        for event in events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "add")
    assert first["id"]
    assert {call["index"] for call in others} == {0}
    arguments = "".join(call["function"]["arguments"] for call in [first, *others])
    assert json.loads(arguments) == {"x": [1, 2]}
    assert len(others) > 1
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_what_was_called_goes_back_into_the_template(caller: Live, chat_pair: Engine) -> None:
    called = {"name": "add", "arguments": {"x": 1}}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {**called, "arguments": '{"x": 1}'}}
        ],
    }
    turns = [*TURN, asked, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    rendered = [
        *TURN,
        {"role": "assistant", "content": "", "tool_calls": [{"function": called}]},
        {"role": "tool", "content": "3"},
    ]
    body = caller.ok("/v1/chat/completions", messages=turns, tools=TOOLS, max_tokens=1)
    wanted = chat_pair.render(rendered, TEMPLATE, tools=TOOLS)
    assert body["usage"]["prompt_tokens"] == len(wanted)


def test_tools_that_may_not_be_used_are_not_shown(caller: Live, chat_pair: Engine) -> None:
    asked = {"messages": TURN, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
    body = caller.ok("/v1/chat/completions", **asked)
    assert body["usage"]["prompt_tokens"] == len(chat_pair.render(TURN, TEMPLATE))


def test_a_choice_of_no_tool_is_refused(caller: Live) -> None:
    named = {"type": "function", "function": {"name": "sub"}}
    for choice, tools, message in (
        (named, TOOLS, "tool_choice names 'sub', but 'tools' has only add"),
        ("required", [], "tool_choice requires a call, but there are no 'tools'"),
    ):
        body = {"messages": TURN, "tools": tools, "tool_choice": choice}
        response = caller.post("/v1/chat/completions", **body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_a_schema_that_cannot_be_guaranteed_is_named_by_its_tool(caller: Live) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema, "strict": True}}
    asked = {"messages": TURN, "tools": [*TOOLS, bad], "tool_choice": "required"}
    error = caller.post("/v1/chat/completions", **asked).json()["error"]
    assert error["message"].startswith("the schema of the tool 'bad': ")


def test_a_required_call_is_one_unless_several_are_asked_for(chat_pair: Engine) -> None:
    source = TEMPLATE.replace("<tool_call>{{", "\n<tool_call>\n{{").replace("}}</", "}}\n</")
    template = ChatTemplate(source, bos_text="", eos_text="")
    engine: Any = SimpleNamespace(chat_template=template, vocab=chat_pair.vocab)

    def grammar(**asked: Any) -> Any:
        body = ChatRequest.model_validate({"messages": TURN, "tools": TOOLS, **asked})
        return plan_answer(body, TOOLS, [], {}, engine).options.get("grammar")

    one = grammar(tool_choice="required", parallel_tool_calls=False)
    assert grammar(tool_choice="required") == one
    assert grammar(tool_choice="required", parallel_tool_calls=True) != one
    assert grammar() is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_says_which_parts_of_a_schema_a_required_call_may_violate(
    caller: Live, stream: bool
) -> None:
    ones = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    properties = {
        "x": {**ones, "uniqueItems": True},
        "\n\u00e9": {**ones, "contains": {"type": "null"}},
        "never": {"not": {}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["x"]}
    function = {"name": "add", "parameters": parameters}
    asked = {"messages": TURN, "tool_choice": "required", "temperature": 0, "stream": stream}
    response = caller.post(
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
    refused = caller.post("/v1/chat/completions", tools=[strict], **asked)
    assert refused.status_code == 400
    assert "#/properties/" in refused.text
    plain = caller.post("/v1/chat/completions", messages=TURN, tools=TOOLS, max_tokens=1)
    assert "x-ggufspec-not-enforced" not in plain.headers


def test_a_text_that_was_cut_off_in_a_call_says_so(caller: Live) -> None:
    asked = {"messages": TURN, "tools": TOOLS, "temperature": 0, "max_tokens": len(TEXT) - 20}
    (choice,) = caller.ok("/v1/chat/completions", **asked)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert '{"x": [1, 2]'.startswith(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    messages = [*TURN, choice["message"], result]
    caller.ok("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=1)


def test_a_stop_string_within_a_call_leaves_no_call_to_run(caller: Live) -> None:
    asked = {"messages": TURN, "tools": TOOLS, "temperature": 0}
    for stop, reason in (("2", "stop"), ("</tool_call>", "tool_calls")):
        (choice,) = caller.ok("/v1/chat/completions", stop=stop, **asked)["choices"]
        assert choice["message"]["tool_calls"]
        assert choice["finish_reason"] == reason
    message = {
        "messages": TURN,
        "tools": [{"name": "add", "input_schema": {"type": "object", "properties": {}}}],
        "stop_sequences": ["2"],
    }
    ended = caller.ok("/v1/messages", max_tokens=200, temperature=0, **message)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "2")
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    items = caller.ok("/v1/responses", input=TURN, tools=tools, stop="2", temperature=0)["output"]
    assert [item["status"] for item in items] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"x": [1, 2', {"x": [1, 2]}),
        ('{"x": "a, [b', {"x": "a, [b"}),
        (r'{"x": "a\"b\u00', {"x": 'a"b'}),
        (r'{"x": 1, "y": "\ud83d', {"x": 1}),
        ('{"x": {"y": [1, tru', {"x": {"y": [1]}}),
        ('{"x": 1, "y', {"x": 1}),
        ("{", {}),
        ("", {}),
        ("null", {}),
        ("[1]", {"arguments": "[1]"}),
        ("over there", {"arguments": "over there"}),
        ({"x": 1}, {"x": 1}),
    ],
)
def test_arguments_that_come_back_may_be_any_text(
    caller: Live, chat_pair: Engine, sent: object, shown: dict[str, Any]
) -> None:
    def messages(arguments: object, content: str | None) -> list[Any]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [
            *TURN,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": content},
        ]

    asked = {"tools": TOOLS, "max_tokens": 1}
    body = caller.ok("/v1/chat/completions", messages=messages(sent, None), **asked)
    wanted = chat_pair.render(messages(shown, ""), TEMPLATE, tools=TOOLS)
    assert body["usage"]["prompt_tokens"] == len(wanted)


def test_a_function_of_old_is_shown_as_a_tool(caller: Live, chat_pair: Engine) -> None:
    called = {"name": "add", "arguments": '{"x": 1}'}
    old = [
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "add", "content": "3"},
    ]
    new = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "add", "function": called}]},
        {"role": "tool", "tool_call_id": "add", "content": "3"},
    ]
    asked = {"tools": TOOLS, "max_tokens": 1}
    body = caller.ok("/v1/chat/completions", messages=[*TURN, *old], **asked)
    wanted = chat_pair.render([*TURN, *new], TEMPLATE, tools=TOOLS)
    assert body["usage"]["prompt_tokens"] == len(wanted)


THINKING = tiny.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")


@pytest.fixture(scope="module")
def thinker(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Reasons before it answers."""
    n_prompt = len(chat_pair.render(TURN, THINKING))
    path: Path = tmp_path_factory.mktemp("models") / "thinker.gguf"
    script = [*tiny.BPE.spell("So I say</think>\n\nYes."), tiny.BPE.id_of("<|im_end|>")]
    how: dict[str, Any] = {"n_prompt": n_prompt, "vocab": tiny.BPE, "n_ctx_train": 512}
    source = "{# <think> </think> #}" + THINKING
    tiny.write_timed(path, script, chat_template=source, **how)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


def test_reasoning_is_reported(thinker: Live) -> None:
    asked = {"messages": TURN, "temperature": 0}
    body = thinker.ok("/v1/chat/completions", **asked)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == "So I say"
    assert message["content"] == "Yes."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    events = events_of(thinker.post("/v1/chat/completions", stream=True, **asked))
    assert said(events) == "Yes."
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "So I say"
