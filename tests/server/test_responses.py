"""OpenAI's responses API: items in, items and events out, for its client and its agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from server.test_clients import QUESTION, TEMPLATE, TOOL, Weather
from serving import Live, comes_true, serving

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.server.dialects.responses_request import ResponsesRequest, ResponseStore
from ggufspec.server.errors import ApiError

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations of the clients' dependencies

FUNCTION: Any = {"type": "function", **TOOL["function"]}
CALLING: dict[str, Any] = {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 400}
THINKING = "{# <think> </think> #}" + TEMPLATE.replace(
    "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=TEMPLATE, n_ctx_train=4096)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def thinker(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Reasons, says something and calls a function twice, in an answer to QUESTION."""
    n_prompt = len(chat_pair.render(QUESTION, THINKING, tools=[TOOL]))
    path: Path = tmp_path_factory.mktemp("models") / "thinker.gguf"
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    text = f"So I say</think>\n\nYes.\n{call}\n{call}"
    script = [*tiny.BPE.spell(text), tiny.BPE.id_of("<|im_end|>")]
    how: dict[str, Any] = {"n_prompt": n_prompt, "vocab": tiny.BPE, "n_ctx_train": 2048}
    tiny.write_timed(path, script, chat_template=THINKING, **how)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


def events_of(response: httpx.Response) -> list[Any]:
    """The documents of a stream, whose events have the names of their types."""
    frames = [part for part in response.text.split("\n\n") if part and not part.startswith(":")]
    events = []
    for name, data in (frame.split("\n") for frame in frames):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def n_prompt(live: Live, **asked: Any) -> int:
    found: int = live.ok("/v1/responses", max_output_tokens=1, **asked)["usage"]["input_tokens"]
    return found


def test_a_text_is_continued(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="x",
        input="hello",
        instructions="Be brief.",
        temperature=0,
        max_output_tokens=8,
        metadata={"a": "b"},
    )
    assert made.id.startswith("resp_")
    assert made.output[0].type == "message"
    assert made.output_text
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None
    assert made.usage.output_tokens == 8
    assert made.metadata == {"a": "b"}
    again = client.responses.create(
        model="x", input="hello", instructions="Be brief.", temperature=0, max_output_tokens=8
    )
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_has_all_events_in_their_order(thinker: Live) -> None:
    asked = {"input": QUESTION, "tools": [FUNCTION], "temperature": 0, "draft_n": 0}
    events = events_of(thinker.post("/responses", stream=True, **asked))
    kinds: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        *("output_item.added", *call, "output_item.done", "completed"),
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", *2 * ["function_call"]]
    assert output == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert output[0]["content"][0]["text"] == "So I say"
    assert output[1]["content"][0]["text"] == "Yes."
    assert json.loads(output[3]["arguments"]) == {"city": "Rome"}
    for i, item in enumerate(output):
        mine = [e for e in events if e.get("output_index") == i]
        assert {e["item_id"] if "item_id" in e else e["item"]["id"] for e in mine} == {item["id"]}
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(e["delta"] for e in mine if e["type"].endswith(".delta")) == text
    usage = events[-1]["response"]["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    whole = thinker.ok("/v1/responses", **asked)
    for item in (*whole["output"], *output):
        item.pop("id")
        item.pop("call_id", None)
    assert whole["output"] == output


def test_a_text_without_tokens_is_an_empty_message(live: Live) -> None:
    body = live.ok("/v1/responses", input="hello", stop="", grammar='start: ""')
    assert body["status"] == "completed"
    assert [part["text"] for part in body["output"][0]["content"]] == [""]


def test_items_become_the_messages_of_a_chat(server: Live) -> None:
    items = [
        {"type": "message", "role": "developer", "content": "More."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
            ],
        },
        *[
            {"type": "function_call", "call_id": id, "name": "weather", "arguments": '{"city": 1}'}
            for id in "ab"
        ],
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": each} for each in ("rain", "fog")],
        },
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "More."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain\nfog"},
    ]
    wanted = len(server.engine.render(messages, tools=[TOOL]))
    asked = {"instructions": "Be brief.", "tools": [FUNCTION]}
    assert n_prompt(server, input=items, **asked) == wanted


def test_the_client_gets_a_call_and_sends_its_result(client: openai.OpenAI) -> None:
    made = client.responses.create(model="x", input=QUESTION, **CALLING)
    (call,) = made.output
    assert call.type == "function_call"
    assert Weather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "9 degrees"}
    items: Any = [*QUESTION, *(item.to_dict() for item in made.output), result]
    more = client.responses.create(model="x", input=items, tools=[FUNCTION], max_output_tokens=4)
    last = client.responses.create(
        model="x",
        input=[result],
        previous_response_id=made.id,
        tools=[FUNCTION],
        max_output_tokens=4,
    )
    assert more.usage is not None
    assert last.usage is not None
    assert more.usage.input_tokens == last.usage.input_tokens


def test_the_client_streams_and_parses(client: openai.OpenAI) -> None:
    with client.responses.stream(model="x", input=QUESTION, **CALLING) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert "".join(deltas) == call.arguments
    parsed = client.responses.parse(
        model="x", input="hello", text_format=Weather, max_output_tokens=400
    )
    assert isinstance(parsed.output_parsed, Weather)


def test_the_functions_that_may_be_called_are_chosen(server: Live) -> None:
    other = {**FUNCTION, "name": "other"}
    asked: dict[str, Any] = {"input": "hello", "temperature": 0, "max_output_tokens": 400}
    allowed = {"type": "allowed_tools", "mode": "required"}
    choices = (
        {"type": "function", "name": "weather"},
        {**allowed, "tools": [{"type": "function", "name": "weather"}]},
    )
    for choice in choices:
        body = server.ok("/v1/responses", tools=[other, FUNCTION], tool_choice=choice, **asked)
        assert {item["name"] for item in body["output"]} == {"weather"}
    none = n_prompt(server, input="hello", tools=[FUNCTION], tool_choice="none")
    assert none == n_prompt(server, input="hello")


def test_three_hundred_functions_may_be_sent(tmp_path: Path) -> None:
    template = TEMPLATE.replace("tool | tojson", "tool.function.name")  # a short prompt
    path = tmp_path / "model.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=template, n_ctx_train=4096)
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "name": f"f{i}", "parameters": parameters} for i in range(300)]
    asked = {"input": "hello", "tools": tools, "tool_choice": "required", "max_output_tokens": 200}
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        bodies = [live.ok("/v1/responses", **asked) for _ in range(2)]
    assert all(body["output"][-1]["name"] in {tool["name"] for tool in tools} for body in bodies)
    usage = bodies[1]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= usage["input_tokens"] - 1


def test_log_probabilities_and_own_fields(server: Live) -> None:
    body = server.ok(
        "/v1/responses",
        input="hello",
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        temperature=0,
        max_output_tokens=3,
        top_k=5,
        draft_n=0,
        report_drafted=True,
        store=False,
    )
    found = body["output"][0]["content"][0]["logprobs"]
    assert [len(each["top_logprobs"]) for each in found] == [2, 2, 2]
    assert body["ggufspec"][0]["n_drafted"] == 0
    assert server.client.get(f"/v1/responses/{body['id']}").status_code == 404


def test_a_response_is_stored(client: openai.OpenAI) -> None:
    made = client.responses.create(model="x", input="hello", max_output_tokens=2)
    assert client.responses.retrieve(made.id).output == made.output
    reference: Any = {"type": "item_reference", "id": made.output[0].id}
    client.responses.create(model="x", input=[reference, *QUESTION], max_output_tokens=1)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        client.responses.create(model="x", input="more", previous_response_id=made.id)
    with pytest.raises(openai.BadRequestError, match="item_reference names"):
        client.responses.create(model="x", input=[reference])


def test_a_store_drops_the_oldest() -> None:
    def ids_kept(**limits: int) -> list[bool]:
        store = ResponseStore(**limits)
        for i in range(3):
            store.add({"id": f"resp_{i}", "output": [], "text": "x" * 100}, [])
        kept = []
        for i in range(3):
            body = ResponsesRequest(input="more", previous_response_id=f"resp_{i}")
            try:
                kept.append(bool(store.items(body)))
            except ApiError:
                kept.append(False)
        return kept

    assert ids_kept() == [True, True, True]
    assert ids_kept(n_max=2) == [False, True, True]
    assert ids_kept(n_bytes_max=200) == [False, False, True]


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        (
            {"input": [{"type": "mcp_call"}]},
            "input.0",
            "items of type 'mcp_call' are not supported",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            "tools.0",
            "tools of type 'web_search' are not supported",
        ),
        (
            {"tool_choice": {"type": "mcp"}},
            "tool_choice",
            "tool choices of type 'mcp' are not supported",
        ),
        ({"background": True}, "background", "is not supported"),
        ({"conversation": "conv_1"}, "conversation", "is not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
        ({"truncation": "auto"}, "truncation", "is not supported with this value"),
        ({"inputs": "x"}, "inputs", "send 'input'"),
        ({"n": 2}, "n", "one answer"),
        ({"max_tokens": 1, "max_output_tokens": 2}, "max_tokens", "is given twice"),
        ({"max_output_tokens": -3}, "max_output_tokens", "max_output_tokens is -3"),
        ({"input": []}, "input", "is empty"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.message.content.0",
            "parts of type 'input_image' are not supported",
        ),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "other"}],
                },
            },
            "tool_choice.tools",
            "does not have",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    server: Live, asked: dict[str, Any], param: str, told: str
) -> None:
    response = server.post("/v1/responses", **{"input": "hello", **asked})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert told in error["message"]


def test_fields_without_an_effect_are_accepted(server: Live) -> None:
    asked = {
        "truncation": "disabled",
        "background": False,
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "stream_options": {"include_obfuscation": False},
    }
    server.ok("/v1/responses", input="hello", max_output_tokens=1, **asked)


def test_a_client_that_leaves_frees_the_slot(endless: Engine) -> None:
    with serving(endless) as live:
        long = {"input": "x" * 60_000, "max_output_tokens": 1}  # the prompt takes a while
        with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=0.3, trust_env=False) as hasty:
            left = pool.submit(hasty.post, f"{live.url}/v1/responses", json=long)
            assert comes_true(lambda: left.done())
            assert isinstance(left.exception(), httpx.TimeoutException)
            assert live.is_free()
        assert live.metric('generations_total{outcome="completed"}') == 0


def test_a_stream_that_fails_says_so(endless: Engine) -> None:
    with serving(endless, timeout=0.5) as live:
        events = events_of(live.post("/v1/responses", input="hello", stream=True))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "--timeout" in last["response"]["error"]["message"]
    (item,) = last["response"]["output"]
    text = "".join(event.get("delta", "") for event in events)
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"] == text != ""


def test_a_stream_that_fails_while_it_waits_has_its_first_events(endless: Engine) -> None:
    body: dict[str, Any] = {"input": "hello", "stream": True}
    with (
        serving(endless, timeout=0.5, keep_alive=0.05) as live,
        endless.pair.lock.held(),  # the worker cannot begin the text before the timeout
    ):
        events = events_of(live.post("/v1/responses", **body))
    kinds = [event["type"] for event in events]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
