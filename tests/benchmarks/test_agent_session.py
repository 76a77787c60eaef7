"""The recorded session of an agent: what is sent in each dialect, and what is read of answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import tiny
from serving import Live, serving

import ggufspec
from tests.benchmarks import agent_session
from tests.benchmarks.agent_session import Session, Turn

RECORDED = agent_session.load()
TEMPLATE = agent_session.RECORDED.with_name("chatml_with_tools.jinja").read_text()


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


def test_each_turn_is_asked_for_and_finds_the_one_before_in_the_cache(live: Live) -> None:
    port = live.address[1]
    turns = agent_session.replay(RECORDED, port, n_turns=3, n_tokens=5, ignore_eos=True)
    assert [turn.n_tokens for turn in turns] == [5, 5, 5]
    assert turns[0].n_prompt < turns[1].n_prompt < turns[2].n_prompt
    assert all(0 < turn.first_seconds <= turn.seconds for turn in turns)
    for before, turn in pairwise(turns):
        assert turn.n_cached >= before.n_prompt - 1


def test_an_error_of_the_server_ends_the_replay(live: Live) -> None:
    wrong = Session([], [{"role": "nobody", "content": ""}, {"role": "assistant", "content": "a"}])
    with pytest.raises(ValueError, match="status 400"):
        agent_session.replay(wrong, live.address[1], n_turns=1, n_tokens=1, ignore_eos=False)


def test_an_answer_begins_with_its_first_text_or_call() -> None:
    assert not agent_session.has_text({"choices": [{"delta": {"role": "assistant"}}]})
    assert agent_session.has_text({"choices": [{"delta": {"tool_calls": [{}]}}]})
    assert not agent_session.has_text({"choices": [], "usage": {}})


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
