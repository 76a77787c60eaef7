"""Ollama's API: what its client reads; parts with the client are skipped where it is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny
from serving import Live, serving

import ggufspec
from ggufspec.engine.engine import Engine

TEMPLATE = (
    "{# <think> </think> #}{% if tools %}<tools>{{ tools | tojson }}</tools> Use "
    "<tool_call>.\n{% endif %}"
    + tiny.CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for call in message.tool_calls %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}",
    )
)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# In the order and with the keys that its client sends.
PARAMETERS = {name: SCHEMA[name] for name in ("type", "required", "properties")}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
ClientOf = Callable[[Live], Any]
GREEDY = {"temperature": 0, "num_predict": 8, "num_ctx": 4096}


@pytest.fixture(scope="module")
def caller(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Reasons, says something and calls a tool, if it is asked HELLO with TOOLS."""
    n_prompt = len(chat_pair.render(HELLO, TEMPLATE, tools=TOOLS))
    text = f"<think>So</think>I say {CALL}"
    script = [*tiny.BPE.spell(text), tiny.BPE.id_of("<|im_end|>")]
    how: dict[str, Any] = {"n_prompt": n_prompt, "vocab": tiny.BPE, "n_ctx_train": 1024}
    path: Path = tmp_path_factory.mktemp("models") / "caller.gguf"
    tiny.write_timed(path, script, chat_template=TEMPLATE, **how)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    library = pytest.importorskip("ollama")
    with ExitStack() as stack:
        yield lambda live: stack.enter_context(library.Client(host=live.url))


def lines_of(live: Live, path: str, **body: Any) -> list[Any]:
    response = live.post(path, **body)
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_answered_and_streamed(live: Live, client_of: ClientOf) -> None:
    client = client_of(live)
    whole = client.chat("x", HELLO, options=GREEDY)
    assert (whole.model, whole.done, whole.done_reason, whole.eval_count) == (
        "tiny",
        True,
        "length",
        8,
    )
    assert whole.message.role == "assistant"
    wanted = live.ok("/v1/chat/completions", messages=HELLO, temperature=0, max_tokens=8)
    assert whole.message.content == wanted["choices"][0]["message"]["content"]
    assert whole.prompt_eval_count == wanted["usage"]["prompt_tokens"]
    assert whole.total_duration == whole.prompt_eval_duration + whole.eval_duration
    parts = list(client.chat("x", HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_prompt_is_answered_with_or_without_the_template(live: Live, client_of: ClientOf) -> None:
    client = client_of(live)
    shown = client.generate("x", "hello", system="Be brief.", options=GREEDY)
    turns = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert shown.response == client.chat("x", turns, options=GREEDY).message.content
    raw = client.generate("x", "hello", raw=True, options=GREEDY)
    plain = live.ok("/v1/completions", prompt="hello", temperature=0, max_tokens=8)
    assert raw.response == plain["choices"][0]["text"]
    parts = client.generate("x", "hello", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == raw.response


def test_a_model_without_chat_template_continues_prompts(tmp_path: Path) -> None:
    path = tiny.write_scripted(tmp_path / "m.gguf", tiny.SPM.spell("abcdefgh"))
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        body = {"prompt": "hi", "options": {"num_predict": 3}, "stream": False}
        assert live.ok("/api/generate", **body)["response"] == "abc"
        refused = live.post("/api/chat", messages=HELLO)
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]


def test_tools_are_called_and_their_results_sent_back(caller: Live, client_of: ClientOf) -> None:
    client = client_of(caller)
    options = {"temperature": 0}
    whole = client.chat("x", HELLO, tools=TOOLS, options=options, think=True)
    message = whole.message
    assert (message.thinking, message.content, whole.done_reason) == ("So", "I say", "stop")
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    parts = list(client.chat("x", HELLO, tools=TOOLS, options=options, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "So"
    assert "".join(part.message.content for part in parts) == "I say"
    assert [part.message.tool_calls for part in parts if part.message.tool_calls] == [[call]]
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    turns = [*HELLO, message, result]
    assert client.chat("x", turns, tools=TOOLS, options={"num_predict": 2}).eval_count == 2


def test_json_is_written(live: Live, client_of: ClientOf) -> None:
    client = client_of(live)
    options = {"temperature": 0, "num_predict": 400}
    made = client.chat("x", HELLO, format=SCHEMA, options=options).message.content
    assert set(json.loads(made)) == {"city"}
    raw = client.generate("x", "hello", format=SCHEMA, raw=True, options=options).response
    assert set(json.loads(raw)) == {"city"}


def test_clients_load_list_and_describe_the_model(
    live: Live, client_of: ClientOf, caller: Live
) -> None:
    client = client_of(live)
    for loaded in (client.generate("x"), client.chat("x")):
        assert (loaded.done, loaded.done_reason) == (True, "load")
    (listed,) = client.list().models
    assert listed.model == "tiny"
    assert listed.details.family == "llama"
    n_params = live.engine.pair.target.model.n_params
    assert listed.details.parameter_size == f"{n_params / 1e6:.2f}M"
    shown = client.show("x")
    assert shown.modelinfo["llama.context_length"] == live.engine.n_ctx
    assert shown.template == tiny.CHATML
    assert shown.capabilities == ["completion"]
    assert client_of(caller).show("x").capabilities == ["completion", "tools", "thinking"]
    assert live.client.get("/api/version").json()["version"]


def test_lines_are_streamed_unless_a_client_says_otherwise(live: Live) -> None:
    *lines, last = lines_of(live, "/api/generate", prompt="hello", options=GREEDY)
    assert all(line["done"] is False for line in lines)
    assert last["done"] is True
    assert {"created_at", "eval_duration", "load_duration"} <= last.keys()


def test_a_stream_that_fails_ends_with_an_error(endless: Engine) -> None:
    with serving(endless, timeout=0.5) as live:
        *_, last = lines_of(live, "/api/chat", messages=HELLO)
    assert last.keys() == {"error"}
    assert "took longer than" in last["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "images": ["x"]}, "images: is not supported"),
        ({"messages": [{**HELLO[0], "images": ["x"]}]}, "messages.0.images: is not supported"),
        ({"prompt": "a", "template": "x"}, "template: is not supported"),
        ({"prompt": "a", "options": {"mirostat": 1}}, "options.mirostat: has no distribution"),
        ({"prompt": "a", "options": {"n": 2}}, "options.n is 2"),
        ({"prompt": "a", "options": {"num_predict": -3}}, "options.num_predict is -3; it must be"),
        ({"prompt": "a", "options": {"n_draft": 999}}, "options.n_draft is 999, but this engine"),
        (
            {"prompt": "a", "options": {"temprature": 2}},
            "options.temprature: this field",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    live: Live, body: dict[str, Any], message: str
) -> None:
    response = live.post("/api/chat" if "messages" in body else "/api/generate", **body)
    assert response.status_code == 400
    assert response.json()["error"].startswith(message)
    plain = {"prompt": "a", "images": [], "keep_alive": "5m", "suffix": "", "options": GREEDY}
    assert live.post("/api/generate", **plain).status_code == 200
