"""Tools: into the template as the model knows them, out of its text as OpenAI's clients do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from serving import Live, events_of, said, serving

import ggufspec
from ggufspec.engine.engine import Engine

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
    asked = {"messages": TURN, "tools": TOOLS, "temperature": 0, "stream": True}
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
