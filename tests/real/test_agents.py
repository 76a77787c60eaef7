"""Agents with a real model: a loop of two tools over OpenAI's responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from real_models import Load
from serving import serving

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations of the client's dependencies


def test_an_agent_uses_two_tools(load: Load) -> None:
    agents: Any = pytest.importorskip("agents")
    openai: Any = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    called: list[tuple[str, str]] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        called.append(("get_weather", city))
        return "heavy rain, 11 degrees"

    @agents.function_tool
    def get_time(city: str) -> str:
        """The local time in a city."""
        called.append(("get_time", city))
        return "14:35"

    async def run(url: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", timeout=300) as client:
            agent = agents.Agent(
                name="weather",
                instructions="Answer questions with the help of your tools, in one sentence.",
                model=agents.OpenAIResponsesModel("any", client),
                tools=[get_weather, get_time],
                model_settings=agents.ModelSettings(temperature=0, max_tokens=150),
            )
            question = "How is the weather in Oslo, and what is the local time in Rome?"
            streamed = agents.Runner.run_streamed(agent, question, max_turns=6)
            async for _ in streamed.stream_events():
                pass
            return str(streamed.final_output)

    with serving(load("qwen", "qwen-draft", n_ctx=2048)) as live:
        answer = asyncio.run(run(live.url))
    assert set(called) == {("get_weather", "Oslo"), ("get_time", "Rome")}
    assert "rain" in answer
    assert "14:35" in answer
