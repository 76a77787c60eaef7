"""The recorded session of an agent: what is sent in each dialect, and what is read of answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
from serving import Live, serving

import ggufspec
from tests.benchmarks import agent_session, dialects
from tests.benchmarks.agent_session import Turn
from tests.benchmarks.dialects import Session

RECORDED = agent_session.load()
TEMPLATE = agent_session.RECORDED.with_name("chatml_with_tools.jinja").read_text()
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
SHORT = Session(
    [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ],
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tiny.write_llama(
        tmp_path_factory.mktemp("models") / "target.gguf", vocab=tiny.BPE, n_ctx_train=32768
    )
    with (
        ggufspec.load(
            path, n_ctx=16384, n_threads=1, tuned=False, chat_template=TEMPLATE
        ) as engine,
        serving(engine) as running,
    ):
        yield running


def test_the_recorded_session_has_20_answers_and_a_result_for_each_call() -> None:
    assert len(RECORDED.answers) == 20
    for at in RECORDED.answers[:-1]:
        call, result = RECORDED.messages[at]["tool_calls"][0], RECORDED.messages[at + 1]
        assert result["tool_call_id"] == call["id"]
        assert call["function"]["name"] in {tool["function"]["name"] for tool in RECORDED.tools}


@pytest.mark.parametrize("dialect", dialects.ALL)
def test_each_turn_is_asked_for_and_finds_the_one_before_in_the_cache(
    live: Live, dialect: str
) -> None:
    live.engine.forget()
    chosen, port = dialects.ALL[dialect], live.address[1]
    turns = agent_session.replay(RECORDED, port, chosen, n_turns=3, n_tokens=5, ignore_eos=True)
    assert [turn.n_tokens for turn in turns] == [5, 5, 5]
    assert turns[0].n_prompt < turns[1].n_prompt < turns[2].n_prompt
    assert all(0 < turn.first_seconds <= turn.seconds for turn in turns)
    for before, turn in pairwise(turns):
        assert turn.n_cached >= before.n_prompt - 1


def test_an_error_of_the_server_ends_the_replay(live: Live) -> None:
    chat = dialects.ALL["chat"]
    with pytest.raises(ValueError, match="status 400"):
        agent_session.replay(
            Session([], [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]),
            live.address[1],
            dialects.Dialect(chat.path, lambda *_: {}, chat.has_text, chat.counts),
            n_turns=1,
            n_tokens=1,
            ignore_eos=False,
        )


def test_the_messages_of_anthropic() -> None:
    body = dialects.ALL["messages"].body(SHORT, 7)
    assert (body["system"], body["max_tokens"]) == ("s", 7)
    assert body["tools"] == [{"name": "f", "description": "d", "input_schema": {}}]
    used = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]


def test_the_items_of_responses() -> None:
    body = dialects.ALL["responses"].body(SHORT, 7)
    assert (body["instructions"], body["max_output_tokens"]) == ("s", 7)
    assert body["input"] == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
    ]


@pytest.mark.parametrize(
    ("dialect", "silent", "first", "last"),
    [
        (
            "chat",
            {"choices": [{"delta": {"role": "assistant", "content": None}}]},
            {"choices": [{"delta": {"content": "a"}}]},
            {
                "choices": [],
                "usage": {
                    "completion_tokens": 3,
                    "prompt_tokens": 9,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        ),
        (
            "messages",
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}},
            },
            {"type": "content_block_start", "content_block": {"type": "tool_use"}},
            {"type": "message_delta", "usage": {"output_tokens": 3}},
        ),
        (
            "responses",
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": "a"},
            {
                "type": "response.completed",
                "response": {
                    "usage": {
                        "output_tokens": 3,
                        "input_tokens": 9,
                        "input_tokens_details": {"cached_tokens": 4},
                    }
                },
            },
        ),
    ],
)
def test_the_events_of_an_answer(
    dialect: str, silent: dict[str, Any], first: dict[str, Any], last: dict[str, Any]
) -> None:
    found = dialects.ALL[dialect]
    assert not found.has_text(silent)
    assert found.has_text(first)
    assert found.counts([silent, first, last]) == (3, 9, 4)


def test_the_report_compares_sessions_of_the_same_run_and_models() -> None:
    def run(seconds: float) -> list[Turn]:
        return [Turn(seconds / 4, seconds, 10, 100, 50)] * 2

    text = agent_session.report(
        {
            "llama-server": [run(1.0), run(2.0)],
            "ggufspec": [run(0.5), run(1.6)],
            "ggufspec with draft": [run(0.4), run(1.8)],
        }
    )
    assert "| llama-server | 3.0 (2.0-4.0) | 1.00 |" in text
    assert "| ggufspec | 2.1 (1.0-3.2) | 0.65 (0.50-0.80) |" in text
    assert "| ggufspec with draft | 2.2 (0.8-3.6) |  |" in text
    assert "Best of ours over the best of llama-server: 0.60 (0.40-0.80)" in text


def test_contenders_have_the_same_models_context_and_attention(tmp_path: Path) -> None:
    line = ["large.gguf", "--draft", "small.gguf", "--threads", "3", "--ctx-size", "999"]
    made = agent_session.commands(agent_session.parser().parse_args(line), 80)
    assert len(made) == 4
    for name, command in made.items():
        text = " ".join(command)
        assert "-m large.gguf -c 999 --port 80 -t 3 -fa on" in text
        assert ("-md small.gguf" in text) == name.endswith("with draft")
