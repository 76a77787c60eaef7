"""What the libraries of OpenAI's clients read: tools, structured output, log-probabilities.

The model has random weights, and the grammar forces its calls; clients that are not installed
(`pip install 'ggufspec[clients]'`) are skipped.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
import tiny
from pydantic import BaseModel, Field
from serving import Live, serving

import ggufspec
from ggufspec.engine import scoring

# Deprecations of the clients' own dependencies are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nAnswer with <tool_call>{name, arguments}</tool_call>:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    + tiny.CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for call in message.tool_calls %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}",
    )
)
QUESTION: list[Any] = [{"role": "user", "content": "hello"}]
CITIES = ("Paris", "Rome")


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=TEMPLATE, n_ctx_train=4096)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


@pytest.fixture
def url(server: Live) -> str:
    return f"{server.url}/v1"


def client_library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.partition(".")[0], exc_type=ImportError)
        return importlib.import_module(name)


def is_weather(arguments: Any) -> bool:
    return bool(Weather.model_validate(arguments))


# openai


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_openai_gets_the_call_that_it_requires(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice}
    made = client.chat.completions.create(
        model="x", temperature=0, max_tokens=400, parallel_tool_calls=False, **asked
    )
    (call,) = made.choices[0].message.tool_calls or []
    assert made.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name == "weather"
    assert is_weather(json.loads(call.function.arguments))


def test_openai_streams_the_same_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}
    asked |= {"model": "x", "temperature": 0, "max_tokens": 400, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        arguments = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert whole
    assert streamed
    assert [each.function.arguments for each in streamed] == [
        each.function.arguments for each in whole if each.type == "function"
    ]
    assert len(arguments) > 1


def test_openai_parses_structured_output(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="x", messages=QUESTION, response_format=Weather, temperature=0, max_tokens=400
    )
    assert isinstance(made.choices[0].message.parsed, Weather)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_openai_sends_the_results_of_calls(client: openai.OpenAI, is_streamed: bool) -> None:
    asked: dict[str, Any] = {"model": "x", "messages": QUESTION, "tools": [TOOL], "temperature": 0}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    if is_streamed:
        with client.chat.completions.stream(**asked) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    turns = [*QUESTION, message.model_dump(), result]
    answer = client.chat.completions.create(
        **{**asked, "messages": turns, "tool_choice": "none", "max_tokens": 8}
    )
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "length"


# Libraries on top of it


def test_langchain_gets_tools_and_structured_output(url: str) -> None:
    langchain = client_library("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=url, api_key="any", model="x", temperature=0, max_tokens=400, max_retries=0
    )
    for method in ("json_schema", "function_calling"):
        made = model.with_structured_output(Weather, method=method).invoke("hello")
        assert isinstance(made, Weather), method
    answer = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(
        "hello"
    )
    (call,) = answer.tool_calls
    assert is_weather(call["args"])
    tool_message = client_library("langchain_core.messages").ToolMessage
    turns = [("user", "hello"), answer, tool_message("rain", tool_call_id=call["id"])]
    assert model.bind(max_tokens=8).invoke(turns).content
    pieces = [piece.content for piece in model.bind(max_tokens=8).stream("hello")]
    assert "".join(pieces) == model.bind(max_tokens=8).invoke("hello").content


def test_instructor_gets_a_model_by_a_tool(client: openai.OpenAI) -> None:
    instructor = client_library("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        made = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="x",
            messages=QUESTION,
            response_model=Weather,
            temperature=0,
            max_tokens=400,
            max_retries=0,
        )
        assert isinstance(made, Weather)


def test_litellm_gets_texts_and_calls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is downloaded
    litellm = client_library("litellm")
    asked: dict[str, Any] = {
        "model": "openai/x",
        "api_base": url,
        "api_key": "any",
        "temperature": 0,
        "messages": QUESTION,
    }
    whole = litellm.completion(**asked, max_tokens=8).choices[0].message.content
    chunks = litellm.completion(**asked, max_tokens=8, stream=True)
    assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    called = litellm.completion(
        **asked, max_tokens=400, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.choices[0].message.tool_calls
    assert is_weather(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns = [*QUESTION, called.choices[0].message.model_dump(), result]
    assert litellm.completion(**{**asked, "messages": turns}, max_tokens=8, tools=[TOOL])
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "hello " * 9000}]})


def test_llm_gets_texts_schemas_and_calls(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: x\n  model_name: x\n  api_base: {url}\n  api_key_name: x\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    llm = client_library("llm")
    model = llm.get_model("x")
    asked: dict[str, Any] = {"key": "any", "temperature": 0}
    pieces = list(model.prompt("hello", max_tokens=8, **asked))
    assert "".join(pieces) == model.prompt("hello", max_tokens=8, stream=False, **asked).text()
    made = model.prompt("hello", schema=Weather, max_tokens=400, **asked)
    assert is_weather(json.loads(made.text()))


def test_lm_eval_gets_the_likelihood_of_a_continuation(server: Live, url: str) -> None:
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
        rows = scoring.logits(server.engine.pair, prompt, text[len(prompt) :], whose="target")
        wanted = 0.0
        for token, (row,) in zip(text[len(prompt) :], rows, strict=True):
            wanted += float(row[token]) - float(np.logaddexp.reduce(row))
        assert logprob == pytest.approx(wanted, abs=0.01), (context, continuation)
        assert not is_greedy


# OpenAI's agents SDK, over the responses API


def test_an_agent_uses_two_tools(tmp_path: Path) -> None:
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

    path = tmp_path / "model.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=TEMPLATE, n_ctx_train=8192)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:

        async def run() -> Any:
            async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any") as client:
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
