"""Anthropic's Messages API: what its client reads, and what agents send.

Parts with the client are skipped where it is not installed (`pip install 'ggufspec[clients]'`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from serving import Live, comes_true, serving

import ggufspec
from ggufspec.engine.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore")  # of the client's own dependencies

TEMPLATE = (
    "{# <think> </think> #}{% if tools %}<|im_start|>system\nAnswer with <tool_call>{name, "
    "arguments}</tool_call>:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    + tiny.CHATML.replace(
        "{{ message['content'] }}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ message['content'] }}{% for call in message.tool_calls %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}",
    )
)
AT_ZERO: dict[str, Any] = {"temperature": 0.0}  # its client has no temperature
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "weather", "input_schema": SCHEMA}
INPUT = {"city": "Paris", "days": 2}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(INPUT)}}}\n</tool_call>'
MakeLive = Callable[..., Live]
ClientOf = Callable[..., Any]


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "x", "max_tokens": 200, "messages": HELLO, **more}


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    anthropic = pytest.importorskip("anthropic")
    with ExitStack() as stack:

        def make(live: Live, api_key: str = "any") -> Any:
            client = anthropic.Anthropic(base_url=live.url, api_key=api_key, max_retries=0)
            return stack.enter_context(client)

        yield make


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream, each named by its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in filter(None, response.text.split("\n\n")):
        name, _, data = frame.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Random weights, whose calls a grammar forces; a long context."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=TEMPLATE, n_ctx_train=65_536)
    with (
        ggufspec.load(path, n_threads=1, n_ctx=65_536, tuned=False) as engine,
        serving(engine, defaults=AT_ZERO, n_body_bytes=1 << 20) as live,
    ):
        yield live


@pytest.fixture
def writer(chat_pair: Engine, tmp_path: Path) -> Iterator[MakeLive]:
    """Servers that answer HELLO with a text."""
    with ExitStack() as stack:

        def make(text: str, source: str = TEMPLATE, tools: Any = (), **how: Any) -> Live:
            shown = [
                {"type": "function", "function": {"name": t["name"], "parameters": SCHEMA}}
                for t in tools
            ]
            n_prompt = len(chat_pair.render(HELLO, source, tools=shown))
            script = [*tiny.BPE.spell(text), tiny.BPE.id_of("<|im_end|>")]
            facts: dict[str, Any] = {"n_prompt": n_prompt, "vocab": tiny.BPE, "n_ctx_train": 1024}
            path = tiny.write_timed(tmp_path / "m.gguf", script, chat_template=source, **facts)
            engine = stack.enter_context(ggufspec.load(path, n_threads=1, tuned=False))
            return stack.enter_context(serving(engine, **{"defaults": AT_ZERO, **how}))

        yield make


# The client


def test_a_message_is_created_and_streamed(server: Live, client_of: ClientOf) -> None:
    client = client_of(server)
    whole = client.messages.create(**asked(max_tokens=8))
    (block,) = whole.content
    assert (whole.type, whole.role, block.type, whole.model) == (
        "message",
        "assistant",
        "text",
        "tiny",
    )
    assert (whole.stop_reason, whole.stop_sequence, whole.usage.output_tokens) == (
        "max_tokens",
        None,
        8,
    )
    with client.messages.stream(**asked(max_tokens=8)) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 8
    # All but the last token of the prompt is in the cache by now.
    assert (final.usage.cache_read_input_tokens, final.usage.input_tokens) == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens - 1,
        1,
    )


def test_tokens_are_counted_as_they_are_used(server: Live, client_of: ClientOf) -> None:
    client = client_of(server)
    body = asked(system="Be brief.", tools=[WEATHER], tool_choice={"type": "auto"})
    n = client.messages.count_tokens(**{k: v for k, v in body.items() if k != "max_tokens"})
    usage = client.messages.create(**{**body, "max_tokens": 1}).usage
    assert n.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert usage.cache_creation_input_tokens == 0
    beta = client.beta.messages.count_tokens(
        model="x", messages=HELLO, betas=["token-counting-2024-11-01"]
    )
    assert 0 < beta.input_tokens < n.input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_required_tool_is_called(
    server: Live, choice: dict[str, Any], client_of: ClientOf
) -> None:
    client = client_of(server)
    body = asked(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    whole = client.messages.create(**body)
    (call,) = whole.content
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert set(call.input) == {"city", "days"}
    with client.messages.stream(**body) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert json.loads("".join(deltas)) == streamed.input == call.input
    assert len(deltas) > 1


def test_an_agent_calls_tools_and_sends_back_their_results(
    writer: MakeLive, client_of: ClientOf
) -> None:
    live = writer(f"I say\n{CALL}\n{CALL}", tools=[WEATHER])
    client = client_of(live)
    first = client.messages.create(**asked(tools=[WEATHER]))
    text, *calls = first.content
    assert (text.text, first.stop_reason) == ("I say", "tool_use")
    assert [call.input for call in calls] == [INPUT, INPUT]
    assert calls[0].id != calls[1].id
    with client.messages.stream(**asked(tools=[WEATHER])) as stream:
        kinds = [block.type for block in stream.get_final_message().content]
    assert kinds == ["text", "tool_use", "tool_use"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "rain " * 20}],
        }
        for call in calls
    ]
    turns = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(**asked(messages=turns, tools=[WEATHER], max_tokens=4))
    assert second.usage.cache_read_input_tokens > first.usage.input_tokens, (
        "the turn before is kept"
    )
    assert second.usage.output_tokens == 4


def test_reasoning_is_a_block_that_can_be_sent_back(writer: MakeLive, client_of: ClientOf) -> None:
    opened = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    client = client_of(writer("So I say</think>\n\nYes.", opened))
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(**asked(max_tokens=2000, thinking=thinking))
    thought, text = whole.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "So I say", "Yes.")
    assert thought.signature
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    with client.messages.stream(**asked(max_tokens=2000, thinking=thinking)) as stream:
        assert [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert final.content[0].model_dump() == thought.model_dump()
    turns = [*HELLO, {"role": "assistant", "content": whole.content}, *HELLO]
    client.messages.create(**asked(messages=turns, max_tokens=1))


def test_json_of_a_schema_is_written(server: Live, client_of: ClientOf) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    made = client_of(server).messages.create(**asked(output_config=form))
    assert set(json.loads(made.content[0].text)) == {"city", "days"}
    old = server.ok("/v1/messages", **asked(output_format=form["format"]))
    assert old["content"][0]["text"] == made.content[0].text


def test_errors_are_of_the_clients_types(
    server: Live, chat_pair: Engine, client_of: ClientOf
) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = client_of(server)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is -1; it must be") as found:
        client.messages.create(**asked(max_tokens=-1))
    assert found.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": found.value.body["error"]["message"]},
    }
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ max"
    ):
        client.messages.create(**asked(messages=[{"role": "user", "content": "!" * 70_000}]))
    with pytest.raises(anthropic.APIStatusError) as found:
        client.messages.create(**asked(messages=[{"role": "user", "content": "!" * (1 << 20)}]))
    assert (found.value.status_code, found.value.type) == (413, "request_too_large")
    with pytest.raises(anthropic.NotFoundError, match="nothing at this path"):
        client.messages.batches.list()
    with serving(chat_pair, api_keys=("secret",)) as live:
        with pytest.raises(anthropic.AuthenticationError, match="API key") as found:
            client_of(live).messages.create(**asked())
        assert found.value.type == "authentication_error"
        assert client_of(live, api_key="secret").messages.create(**asked(max_tokens=1))


# The form


def test_a_stream_has_its_events_in_order(writer: MakeLive) -> None:
    live = writer(f"<think>So</think>I say\n{CALL}", tools=[WEATHER])
    # One token a round: a draft can be a whole block.
    body = asked(tools=[WEATHER], stream=True, draft_n=0)
    start, *events, delta, stop = events_of(live.post("/v1/messages", **body))
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] > 0
    blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    by_block = [[e for e in events if e["index"] == i] for i in range(3)]
    assert [e for block in by_block for e in block] == events
    for kind, block in zip(("thinking", "text", "input_json"), by_block, strict=True):
        assert block[0]["type"] == "content_block_start"
        assert block[-1] == {"type": "content_block_stop", "index": block[0]["index"]}
        kinds = [e["delta"]["type"] for e in block[1:-1]]
        signs = [f"{kind}_delta"] + ["signature_delta"] * (kind == "thinking")
        assert list(dict.fromkeys(kinds)) == signs
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert stop == {"type": "message_stop"}


def test_the_stop_sequence_that_came_is_named(endless: Engine) -> None:
    with serving(endless, defaults=AT_ZERO) as live:
        body = asked(stop_sequences=["xyz", "fg"])
        whole = live.ok("/v1/messages", **body)
        assert whole["content"] == [{"type": "text", "text": "abcde"}]
        ended = {"stop_reason": "stop_sequence", "stop_sequence": "fg"}
        assert {name: whole[name] for name in ended} == ended
        events = events_of(live.post("/v1/messages", stream=True, **body))
        assert events[-2]["delta"] == ended


def test_a_last_message_of_the_assistant_is_continued(server: Live) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I say"}]
    prompt = server.engine.render(begun, continue_final_message=True)
    wanted = server.engine.generate(prompt, temperature=0, max_tokens=8)
    whole = server.ok("/v1/messages", **asked(messages=begun, max_tokens=8))
    assert whole["content"] == [{"type": "text", "text": wanted.text}]


def test_a_stream_that_waits_gets_pings(endless: Engine) -> None:
    body = asked(max_tokens=100_000, stream=True)
    with (
        serving(endless, defaults=AT_ZERO, timeout=2, keep_alive=0.05) as live,
        ExitStack() as stack,
    ):
        for _ in range(endless.n_slots):
            stack.enter_context(live.client.stream("POST", "/v1/messages", json=body))
        assert comes_true(lambda: live.service.worker.n_running == endless.n_slots)
        first, *_, last = events_of(live.post("/v1/messages", **body))
    assert first == {"type": "ping"}
    assert last["error"]["type"] == "timeout_error"


# What agents send


def test_an_agents_request_is_accepted(server: Live) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools: list[Any] = [
        {"name": f"tool_{i}", "input_schema": {"type": "object"}, "eager_input_streaming": True}
        for i in range(25)
    ]
    tools[-1] |= {**cached, "type": "custom", "strict": False, "input_examples": [INPUT]}
    body = asked(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"},
            {"type": "text", "text": "You are an agent. " * 50, **cached},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello", **cached}]}],
        tools=tools,
        tool_choice={"type": "auto", "disable_parallel_tool_use": False},
        thinking={"type": "adaptive", "display": "summarized"},
        output_config={"effort": "xhigh"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "me"},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        max_tokens=2,
        top_k=40,
        top_p=0.9,
        temperature=1,
        stream=True,
    )
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,x"}
    for _ in range(2):
        response = server.client.post("/v1/messages?beta=true", json=body, headers=headers)
        assert response.status_code == 200, response.text
        usage = events_of(response)[-2]["usage"]
    # Another header, as each request has: nothing of the prompt is read anew.
    body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1; cch=xyz;"
    usage = events_of(server.client.post("/v1/messages?beta=true", json=body))[-2]["usage"]
    assert usage["input_tokens"] == 1
    assert usage["cache_read_input_tokens"] > 1000


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_hundreds_of_tools_are_possible(server: Live, kind: str) -> None:
    """Tokens are counted beyond the context, too: agents shorten a conversation by the count."""
    tools = [{**WEATHER, "name": f"tool_{i}"} for i in range(300)]
    body = {"messages": HELLO, "tools": tools, "tool_choice": {"type": kind}}
    assert server.ok("/v1/messages/count_tokens", **body)["input_tokens"] > 65_536


def test_a_request_that_is_cancelled_while_its_prompt_is_read_frees_its_slot(server: Live) -> None:
    long = asked(messages=[{"role": "user", "content": "hello " * 20_000}], max_tokens=8)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/messages", json=long, timeout=0.2)
    assert server.is_free()
