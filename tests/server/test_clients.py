"""What clients and their libraries read of all APIs: texts, tools, structured output.

The model has random weights, and the grammar forces its calls; clients that are not installed
(`pip install 'ggufspec[clients]'`) are skipped.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field
from server.dialects import HELLO, INPUT, SCHEMA
from server.dialects import TOOL as ADDING
from serving import Live

from ggufspec.engine import scoring

if TYPE_CHECKING:
    from openai import OpenAI

# Deprecations of the clients' own dependencies are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {**Weather.model_json_schema(), "additionalProperties": False},
    },
}


@pytest.fixture
def url(forced: Live) -> str:
    return f"{forced.url}/v1"


def client_library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.partition(".")[0], exc_type=ImportError)
        return importlib.import_module(name)


def is_weather(arguments: Any) -> bool:
    return bool(Weather.model_validate(arguments))


# openai


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    from openai import OpenAI  # here, since it takes a second in each process

    with OpenAI(base_url=url, api_key="any", max_retries=0) as made:
        yield made


CALLING: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
CALLING |= {"temperature": 0, "max_tokens": 400}


def test_openai_gets_texts_and_errors(client: OpenAI) -> None:
    from openai import BadRequestError, InternalServerError

    asked: dict[str, Any] = {"model": "x", "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(messages=HELLO, **asked)
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    stream = client.chat.completions.create(messages=HELLO, stream=True, **asked)
    chunks = [chunk.choices[0] for chunk in stream]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text != ""
    assert client.completions.create(prompt="hello", **asked).choices[0].text
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("any").id == "tiny"
    with pytest.raises(InternalServerError, match="--embeddings"):
        client.embeddings.create(model="x", input="hello")
    with pytest.raises(BadRequestError, match="temperature"):
        client.completions.create(model="x", prompt="hello", temperature=-1)


def test_openai_gets_calls_and_sends_their_results(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "x", "messages": HELLO, "tools": [TOOL], **CALLING}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        made = client.chat.completions.create(**{**asked, "tool_choice": choice})
        (call,) = made.choices[0].message.tool_calls or []
        assert made.choices[0].finish_reason == "tool_calls"
        assert call.type == "function"
        assert is_weather(json.loads(call.function.arguments))
    with client.chat.completions.stream(**asked) as stream:
        arguments = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        message: Any = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.arguments == call.function.arguments
    assert len(arguments) > 1
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    turns = [*HELLO, message.model_dump(), result]
    more = {**asked, "messages": turns, "tool_choice": "none", "max_tokens": 8}
    answer = client.chat.completions.create(**more).choices[0]
    assert answer.message.content
    assert not answer.message.tool_calls


def test_openai_parses_structured_output(client: OpenAI) -> None:
    made = client.chat.completions.parse(
        model="x", messages=HELLO, response_format=Weather, temperature=0, max_tokens=400
    )
    assert isinstance(made.choices[0].message.parsed, Weather)


def test_openai_continues_and_stores_responses(client: OpenAI) -> None:
    create, function = client.responses.create, {"type": "function", **TOOL["function"]}
    asked: dict[str, Any] = {"model": "x", "tools": [function]}
    calling = {**asked, "tool_choice": "required", "max_output_tokens": 400}
    made = create(input=HELLO, **calling)
    (call,) = made.output
    assert call.type == "function_call"
    assert is_weather(json.loads(call.arguments))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "9 degrees"}
    items: Any = [*HELLO, *(item.to_dict() for item in made.output), result]
    more = create(input=items, max_output_tokens=4, **asked)
    last = create(input=[result], previous_response_id=made.id, max_output_tokens=4, **asked)
    assert more.usage is not None
    assert last.usage is not None
    assert more.usage.input_tokens == last.usage.input_tokens
    assert last.incomplete_details is not None
    assert last.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(input=HELLO, **calling) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert "".join(deltas) == call.arguments
    parsed = client.responses.parse(
        model="x", input="hello", text_format=Weather, max_output_tokens=400
    )
    assert isinstance(parsed.output_parsed, Weather)
    assert client.responses.retrieve(made.id).output == made.output
    reference: Any = {"type": "item_reference", "id": made.output[0].id}
    create(model="x", input=[reference, *HELLO], max_output_tokens=1)
    client.responses.delete(made.id)
    with pytest.raises(client_library("openai").NotFoundError):
        client.responses.retrieve(made.id)


# Libraries that use its API


def test_lm_eval_gets_the_likelihood_of_a_continuation(forced: Live, url: str) -> None:
    instance = client_library("lm_eval.api.instance").Instance
    completions = client_library("lm_eval.models.openai_completions").LocalCompletionsAPI
    # Its tokens are those of the server, at /tokenizer_info and /tokenize.
    model = completions(base_url=f"{url}/completions", model="x", max_retries=1)
    encode = model.tokenizer.encode
    pairs = [("hello", " world"), ("hello", " model")]
    requests = [instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = model.loglikelihood(requests)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        prompt, text = encode(context), encode(context + continuation)
        rows = scoring.logits(forced.engine, prompt, text[len(prompt) :], whose="target")
        wanted = 0.0
        for token, (row,) in zip(text[len(prompt) :], rows, strict=True):
            wanted += float(row[token]) - float(np.logaddexp.reduce(row))
        assert logprob == pytest.approx(wanted, abs=0.01), (context, continuation)
        assert not is_greedy


# OpenAI's agents SDK, over the responses API


def test_an_agent_uses_two_tools(url: str) -> None:
    agents = client_library("agents")
    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sun"

    @agents.function_tool
    def finish(n: int) -> str:
        """Finish."""
        called.append(str(n))
        return "done"

    async def run() -> Any:
        async with client_library("openai").AsyncOpenAI(base_url=url, api_key="any") as client:
            agent = agents.Agent(
                name="a",
                instructions="Use the tools.",
                model=agents.OpenAIResponsesModel("x", client),
                tools=[weather, finish],
                tool_use_behavior=agents.StopAtTools(stop_at_tool_names=["finish"]),
                model_settings=agents.ModelSettings(
                    tool_choice="required", max_tokens=400, extra_body={"seed": 1}
                ),
                reset_tool_choice=False,
            )
            return await agents.Runner.run(agent, "hello", max_turns=30)

    result = asyncio.run(run())
    assert result.final_output == "done"
    assert called


# Anthropic's and Ollama's own


def test_anthropic_gets_texts_reasoning_and_calls(caller: Live) -> None:
    anthropic = client_library("anthropic")
    asked: dict[str, Any] = {"model": "x", "max_tokens": 200, "messages": HELLO}
    asked["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    asked["extra_body"] = {"temperature": 0}  # it has no temperature of its own
    with anthropic.Anthropic(base_url=caller.url, api_key="any", max_retries=0) as client:
        whole = client.messages.create(**asked)
        thought, text, *calls = whole.content
        assert (thought.thinking, text.text, whole.stop_reason) == ("So é", "I say", "tool_use")
        assert [call.input for call in calls] == [INPUT] * 2
        with client.messages.stream(**asked) as stream:
            deltas = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        assert len(deltas) > 1
        assert [block.type for block in final.content] == [block.type for block in whole.content]
        assert final.content[0].model_dump() == thought.model_dump()
        assert final.usage.output_tokens == whole.usage.output_tokens
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls
        ]
        turns = [
            *HELLO,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": results},
        ]
        second = client.messages.create(**{**asked, "messages": turns, "max_tokens": 4})
        assert second.usage.cache_read_input_tokens > whole.usage.input_tokens
        count = client.messages.count_tokens(model="x", messages=HELLO, tools=asked["tools"])
        assert 0 < count.input_tokens == len(caller.engine.render(HELLO, tools=[ADDING]))
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is -1; it must be"):
            client.messages.create(**{**asked, "max_tokens": -1})
        long = [{"role": "user", "content": "!" * 70_000}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
            client.messages.create(**{**asked, "messages": long})
        with pytest.raises(anthropic.NotFoundError, match="nothing at this path"):
            client.messages.batches.list()


def test_ollama_gets_texts_reasoning_calls_and_the_model(caller: Live) -> None:
    client = client_library("ollama").Client(host=caller.url)
    tools = [ADDING]
    options = {"temperature": 0, "num_ctx": 4096}
    whole = client.chat("x", HELLO, tools=tools, options=options, think=True)
    message = whole.message
    assert (message.thinking, message.content, whole.done_reason) == ("So é", "I say", "stop")
    assert [dict(call.function.arguments) for call in message.tool_calls] == [INPUT] * 2
    parts = list(client.chat("x", HELLO, tools=tools, options=options, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "So é"
    assert "".join(part.message.content for part in parts) == "I say"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    turns = [*HELLO, message, result]
    assert client.chat("x", turns, tools=tools, options={"num_predict": 2}).eval_count == 2
    raw = client.generate("x", "hello", raw=True, options={**options, "num_predict": 8})
    stream = client.generate(
        "x", "hello", raw=True, options={**options, "num_predict": 8}, stream=True
    )
    assert "".join(part.response for part in stream) == raw.response
    assert client.generate("x").done_reason == client.chat("x").done_reason == "load"
    (listed,) = client.list().models
    assert listed.model == "tiny"
    shown = client.show("x")
    assert shown.modelinfo["gpt2.context_length"] == caller.engine.n_ctx
    assert shown.capabilities == ["completion", "tools", "thinking"]
    client.close()
