"""Requests limit the reasoning of their answers, in each API; calls and schemas follow it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from server.dialects import DIALECTS, HELLO, OPENED, SCHEMA, TOOL
from serving import Live, serving

import ggufspec

THINKING = {"type": "enabled", "budget_tokens": 2}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Random weights, which end no reasoning themselves; by default it has four tokens."""
    path = tmp_path_factory.mktemp("models") / "opened.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=OPENED, n_ctx_train=2048)
    how: Any = {"defaults": {"reasoning_budget": 4, "n_draft": 3}}
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine, **how) as live:
        yield live


def answer(live: Live, **more: Any) -> Any:
    body = {"messages": HELLO, "max_tokens": 400, "seed": 1, **more}
    response = live.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("api", "budget"),
    [
        ("chat", {"reasoning_budget_tokens": 2}),
        ("chat", {"thinking_budget_tokens": 2}),
        ("messages", {"thinking": THINKING}),
        ("messages", {"reasoning_budget_tokens": 2}),
        ("responses", {"reasoning_budget_tokens": 2}),
        ("ollama", {"reasoning_budget_tokens": 2}),
    ],
)
def test_each_api_has_a_field_for_it(caller: Live, api: str, budget: dict[str, Any]) -> None:
    for stream in (False, True):
        said = DIALECTS[api].ask(caller, tools=[TOOL], stream=stream, limit=40, **budget)
        assert said.reasoning == "So"
        assert DIALECTS[api].ask(caller, tools=[TOOL], stream=stream).reasoning == "So é"


def test_the_default_of_the_server_is_replaced_by_a_request(opened: Live) -> None:
    for n, body in (
        (4, {}),
        (0, {"reasoning_budget_tokens": 0}),
        (9, {"reasoning_budget_tokens": 9}),
    ):
        usage = answer(opened, max_tokens=60, **body)["usage"]
        assert n <= usage["completion_tokens_details"]["reasoning_tokens"] <= n + 3
    endless = answer(opened, max_tokens=60, reasoning_budget_tokens=-1)
    assert endless["choices"][0]["message"]["content"] == ""
    prompt = opened.engine.render(HELLO)
    body = {"prompt": prompt, "max_tokens": 30, "seed": 1, "n": 2, "reasoning_budget_tokens": 0}
    texts = opened.post("/v1/completions", **body).json()["choices"]
    assert all(choice["text"].startswith("</think>") for choice in texts)


@pytest.mark.parametrize("n_most", [0, 1, 4])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call_follows_the_reasoning(opened: Live, n_most: int, choice: Any) -> None:
    body = answer(opened, tools=[TOOL], tool_choice=choice, reasoning_budget_tokens=n_most)
    (found,) = body["choices"]
    (call,) = found["message"]["tool_calls"]
    assert found["finish_reason"] == "tool_calls"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
    if n_most:
        assert found["message"]["reasoning_content"]


@pytest.mark.parametrize("n_most", [0, 1, 4])
def test_json_follows_the_reasoning(opened: Live, n_most: int) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for more in ({}, {"tools": [TOOL]}):
        body = answer(opened, response_format=form, reasoning_budget_tokens=n_most, **more)
        (found,) = body["choices"]
        assert found["finish_reason"] in ("stop", "tool_calls")
        if not found["message"].get("tool_calls"):
            assert set(json.loads(found["message"]["content"])) == {"city", "days"}


def test_where_the_whole_text_is_the_answer_nothing_is_forced(opened: Live) -> None:
    body = answer(opened, guided_regex="[a-z<>/]{12}", reasoning_budget_tokens=1)
    assert "</think>" not in body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("wrong", [-2, 1.5, "3", 2**40])
def test_a_wrong_budget_is_refused_by_name(opened: Live, wrong: object) -> None:
    body = {"messages": HELLO, "reasoning_budget_tokens": wrong}
    response = opened.post("/v1/chat/completions", **body)
    assert response.status_code == 400
    assert "reasoning_budget_tokens" in response.json()["error"]["message"]
