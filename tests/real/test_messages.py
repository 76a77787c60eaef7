"""Agents with a real model: loops of tools over Anthropic's and over Ollama's API."""

from __future__ import annotations

from typing import Any

import pytest
from real_models import Load
from serving import serving

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations of the clients' dependencies

SYSTEM = "Call get_city with the name, then get_weather with the city."
QUESTION = "How is the weather where Ada Lovelace lives?"
RESULTS = {"get_city": "Zürich", "get_weather": "heavy rain, 11 degrees"}
TOOLS = {
    "get_city": ("The city in which a person lives.", "person"),
    "get_weather": ("The weather in a city.", "city"),
}
CALLED = [("get_city", {"person": "Ada Lovelace"}), ("get_weather", {"city": "Zürich"})]


def schema(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


def test_an_agent_uses_two_tools_over_messages(load: Load) -> None:
    anthropic = pytest.importorskip("anthropic")
    tools = [
        {"name": name, "description": what, "input_schema": schema(argument)}
        for name, (what, argument) in TOOLS.items()
    ]
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    called, n_cached = [], []
    with (
        serving(load("qwen", "qwen-draft", n_ctx=2048), defaults={"temperature": 0}) as live,
        anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client,
    ):
        for _ in range(4):
            asked: dict[str, Any] = {"model": "any", "system": SYSTEM, "tools": tools}
            asked["messages"] = turns
            kind = "any" if len(called) < 2 else "auto"
            asked["tool_choice"] = {"type": kind, "disable_parallel_tool_use": True}
            with client.messages.stream(max_tokens=200, **asked) as stream:
                message = stream.get_final_message()
            n_prompt = client.messages.count_tokens(**asked).input_tokens
            n_cached.append(message.usage.cache_read_input_tokens)
            assert n_prompt == n_cached[-1] + message.usage.input_tokens
            if message.stop_reason != "tool_use":
                break
            calls = [block for block in message.content if block.type == "tool_use"]
            called += [(call.name, call.input) for call in calls]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.name]}
                for call in calls
            ]
            turns += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
    assert called == CALLED
    assert message.stop_reason == "end_turn"
    assert "rain" in message.content[-1].text
    assert n_cached == sorted(n_cached), "each turn continues the one before"
    assert n_cached[1] > 200


def test_a_tool_is_used_over_ollama(load: Load) -> None:
    ollama = pytest.importorskip("ollama")
    what, argument = TOOLS["get_weather"]
    function = {"name": "get_weather", "description": what, "parameters": schema(argument)}
    asked: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "options": {"temperature": 0},
    }
    turns: list[Any] = [{"role": "user", "content": "How is the weather in Zürich?"}]
    with (
        serving(load("qwen", "qwen-draft", n_ctx=2048)) as live,
        ollama.Client(host=live.url) as client,
    ):
        called = client.chat("any", turns, **asked).message
        (call,) = called.tool_calls
        result = {"role": "tool", "tool_name": "get_weather", "content": RESULTS["get_weather"]}
        del asked["tools"]  # with them, this model calls again
        answer = client.chat("any", [*turns, called, result], **asked).message
    assert (call.function.name, call.function.arguments) == CALLED[1]
    assert "rain" in answer.content
