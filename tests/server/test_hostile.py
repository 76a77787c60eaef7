"""Whatever clients send: a clear 4xx, nothing of ours in it, and the next request works."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from patience import child_seconds
from serving import Live, serving

from ggufspec.engine.chat_template import ChatTemplate, TemplateProcess
from ggufspec.engine.engine import Engine
from ggufspec.server.errors import ApiError
from ggufspec.server.strict_json import parse_json

JSON = {"Content-Type": "application/json"}
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

RUBBISH = {
    "empty": b"",
    "not JSON": b"{",
    "two documents": b"{} {}",
    "a list": b"[]",
    "null": b"null",
    "NaN": b'{"prompt": "hi", "temperature": NaN}',
    "infinity": b'{"prompt": "hi", "temperature": -Infinity}',
    "too large a float": b'{"prompt": "hi", "temperature": 1e999}',
    "too large an int": b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
    "twenty digits": b'{"prompt": "hi", "seed": 99999999999999999999}',
    "deep": DEEP,
    "deep but not broken": b'{"prompt": "hi", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
    "a key twice": b'{"prompt": "hi", "prompt": "ho"}',
    "half a surrogate": rb'{"prompt": "\ud800"}',
    "half a surrogate as key": rb'{"prompt": "hi", "\udfff": 1}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "hi"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "hi"}',
}

WRONG: dict[str, dict[str, Any]] = {
    "no prompt": {},
    "an empty prompt": {"prompt": ""},
    "a number as prompt": {"prompt": 5},
    "no tokens": {"prompt": []},
    "a negative token": {"prompt": [-1]},
    "a token beyond": {"prompt": [10**6]},
    "tokens and texts": {"prompt": ["hi", 5]},
    "an empty text among prompts": {"prompt": ["hi", ""]},
    "too long a prompt": {"prompt": "x" * 20_000},
    "a text as temperature": {"prompt": "hi", "temperature": "1"},
    "true as temperature": {"prompt": "hi", "temperature": True},
    "a huge temperature": {"prompt": "hi", "temperature": 1e300},
    "min_p of 2": {"prompt": "hi", "min_p": 2},
    "max_tokens of -3": {"prompt": "hi", "max_tokens": -3},
    "max_tokens as text": {"prompt": "hi", "max_tokens": "5"},
    "max_tokens as float": {"prompt": "hi", "max_tokens": 5.5},
    "a million choices": {"prompt": "hi", "n": 10**6},
    "too many stops": {"prompt": "hi", "stop": ["a"] * 1001},
    "a bias that is no token": {"prompt": "hi", "logit_bias": {"hello": 1}},
    "a bias beyond": {"prompt": "hi", "logit_bias": {"999999": 1}},
    "a bias of text": {"prompt": "hi", "logit_bias": {"5": "1"}},
    "a huge penalty": {"prompt": "hi", "presence_penalty": 1e300},
    "an unknown format": {"prompt": "hi", "response_format": {"type": "xml"}},
    "a schema of another type": {
        "prompt": "hi",
        "response_format": {"type": "json_object", "json_schema": {"schema": {"type": "string"}}},
    },
    "no schema": {"prompt": "hi", "response_format": {"type": "json_schema"}},
    "a schema that is none": {
        "prompt": "hi",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "oracle"}}},
    },
    "a schema that cannot be guaranteed": {
        "prompt": "hi",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"not": {"const": 1}}},
        },
    },
    "a schema without any text": {
        "prompt": "hi",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}},
    },
    "too many logprobs": {"prompt": "hi", "logprobs": 1000},
    "a suffix": {"prompt": "hi", "suffix": "ho"},
    "the best of many": {"prompt": "hi", "best_of": 5},
    "an unknown field": {"prompt": "hi", "temperatur": 0.5},
    "an unknown field within another": {"prompt": "hi", "stream_options": {"usage": True}},
    "a field that cannot be had": {"prompt": "hi", "mirostat": 2},
    "two constraints": {"prompt": "hi", "guided_regex": "a", "grammar": "start: /a/"},
    "a limit by two names": {"prompt": "hi", "max_tokens": 3, "n_predict": 4},
    "a longest draft beyond the engine's": {"prompt": "hi", "draft_n": 1000},
    "no such drafter": {"prompt": "hi", "drafter": "../model"},
    "no such rule": {"prompt": "hi", "verify": "_lossy"},
    "a sampler without distribution": {"prompt": "hi", "samplers": ["mirostat"]},
    "too many log-probabilities": {"prompt": [[5] * 900] * 64, "echo": True, "logprobs": 20},
    "too many samplers": {"prompt": "hi", "samplers": ["top_k"] * 17},
    "a stop token beyond": {"prompt": "hi", "stop_token_ids": [10**6]},
    "a bias without its token": {"prompt": "hi", "logit_bias": [[5]]},
    "stream as number": {"prompt": "hi", "stream": 1},
}

WRONG_CHATS: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "no role": {"messages": [{"content": "hi"}]},
    "an unknown role": {"messages": [{"role": "oracle", "content": "hi"}]},
    "null as content": {"messages": [{"role": "user", "content": None}]},
    "no content": {"messages": [{"role": "system"}]},
    "a number as content": {"messages": [{"role": "user", "content": 5}]},
    "an image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    },
    "arguments that are a list": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": []}}],
            }
        ]
    },
    "tools where there are none": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "a tool that must be called": {
        "messages": [{"role": "user", "content": "hi"}],
        "tool_choice": "required",
    },
    "functions of old": {
        "messages": [{"role": "user", "content": "hi"}],
        "functions": [{"name": "f"}],
    },
}


def check_refused(live: Live, response: httpx.Response, *statuses: int) -> None:
    assert response.status_code in (statuses or (400,)), response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    for leaked in ("Traceback", ".py", ".gguf", "site-packages", "/tmp"):
        assert leaked not in response.text
    assert live.post("/v1/completions", prompt="hi", max_tokens=1).status_code == 200


@pytest.mark.parametrize("body", RUBBISH.values(), ids=list(RUBBISH))
def test_invalid_bodies_are_refused(live: Live, body: bytes) -> None:
    response = live.client.post("/v1/completions", content=body, headers=JSON)
    check_refused(live, response)
    if body not in (b"", b"[]", b"null"):
        assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", WRONG.values(), ids=list(WRONG))
def test_wrong_values_are_refused(live: Live, body: dict[str, Any], stream: bool) -> None:
    check_refused(live, live.post("/v1/completions", **{"stream": stream, **body}))


@pytest.mark.parametrize("body", WRONG_CHATS.values(), ids=list(WRONG_CHATS))
def test_wrong_chats_are_refused(live: Live, body: dict[str, Any]) -> None:
    check_refused(live, live.post("/v1/chat/completions", **body))


def test_where_it_is_wrong_is_told(live: Live) -> None:
    error = live.post("/v1/completions", prompt="hi", top_p=7).json()["error"]
    assert error["param"] == "top_p"
    error = live.post("/v1/chat/completions", messages=[{"role": "user", "content": 5}]).json()
    assert error["error"]["param"].startswith("messages.0.content")
    empty = live.post("/v1/chat/completions", messages=[{"role": "user", "content": None}]).json()
    assert empty["error"]["message"].startswith("messages.0.content: only contents of")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [-1]}, "prompt.0 is -1; it must be greater than or equal to 0"),
        ({"prompt": 5}, "prompt is 5; it must be a valid string or a valid list"),
        ({}, "prompt is missing; send it"),
        ({"prompt": "hi", "temperature": "1"}, "temperature is a text; it must be a valid number"),
        ({"prompt": "hi", "stream_options": 1}, "stream_options is 1; it must be an object"),
        ({"prompt": "hi", "logit_bias": {"a b": 1}}, "logit_bias: 'a b' is not a token id; send"),
        ({"prompt": "hi", "n_predict": -3}, "n_predict is -3; it must be greater than or equal to"),
        ({"prompt": "hi", "n_draft": 999}, "n_draft is 999, but this engine was loaded for at"),
        ({"prompt": "hi", "draft_n": 999}, "draft_n is 999, but this engine was loaded for at"),
        ({"prompt": "hi", "draft_n": -1}, "draft_n is -1; it must be at least 1, or 'auto'"),
        ({"prompt": "hi", "stop_token_ids": [10**6]}, "stop_token_ids names token 1000000"),
        ({"prompt": "hi", "repetition_penalty": 1e300}, "repetition_penalty is 1e+300; that is"),
        ({"prompt": "hi", "guided_choice": []}, "guided_choice is empty; give at least one text"),
        (
            {"prompt": "hi", "structured_outputs": {"choice": []}},
            "structured_outputs.choice is empty; give",
        ),
        (
            {"prompt": "hi", "response_format": {"type": "json_object"}, "min_tokens": 1},
            "min_tokens bans the tokens that end a text, but response_format says where it ends",
        ),
        ({"prompt": "hi", "stop": ["a"] * 1001}, "stop: List should have at most 1000 items"),
        ({"prompt": "hi", "topP": 1}, "topP: this field is unknown"),
        ({"prompt": "hi", "suffix": "ho"}, "suffix: is not supported"),
        ({"prompt": "hi", "stream_options": {"x": 1}}, "stream_options.x: this field is unknown"),
    ],
)
def test_an_error_names_the_field_as_it_was_sent_and_what_it_needs(
    live: Live, body: dict[str, Any], told: str
) -> None:
    assert live.post("/v1/completions", **body).json()["error"]["message"].startswith(told)


def test_that_images_are_not_supported_is_told(live: Live) -> None:
    body = WRONG_CHATS["an image"]
    error = live.post("/v1/chat/completions", **body).json()["error"]
    assert error["message"] == "messages.0.content.0.type is 'image_url'; it must be 'text'"


def test_a_model_without_a_template_says_so(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.engine, "chat_template", None)
    response = live.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    check_refused(live, response)
    assert "no chat template" in response.text


def test_unusual_but_valid_bodies_are_accepted(live: Live) -> None:
    for body in (
        rb'{"prompt": "\ud83d\ude42", "max_tokens": 1, "user": "u", "unknown": null}',
        b' {"prompt":"hi","max_tokens":1,"temperature":0,"seed":-9223372036854775808}\n',
    ):
        assert live.client.post("/v1/completions", content=body, headers=JSON).status_code == 200


def test_the_check_of_json_is_quick() -> None:
    began = time.thread_time()
    with pytest.raises(ApiError) as refused:
        parse_json(DEEP)
    assert "nested deeper" in refused.value.detail
    parse_json(json.dumps({"prompt": list(range(150_000))}).encode())
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/predict", 405),
        ("POST", "/../../etc/passwd", 404),
        ("GET", "/v1/model/any", 404),
    ],
)
def test_unknown_paths_are_reported(live: Live, method: str, path: str, status: int) -> None:
    response = live.client.request(method, path, json={} if method == "POST" else None)
    check_refused(live, response, status)


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("POST", "/v1/embeddings", "generates text only"),
    ],
)
def test_apis_that_are_not_served_are_named(live: Live, method: str, path: str, told: str) -> None:
    response = live.client.request(method, path, json={} if method == "POST" else None)
    check_refused(live, response, 404)  # OpenAI's clients would retry a 501
    assert told in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
)
def test_only_json_is_taken(live: Live, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = live.client.post("/v1/completions", content=b'{"prompt":"hi"}', headers=headers)
    check_refused(live, response, 415)


# Limits


@pytest.fixture(scope="module")
def strict(chat_pair: Engine) -> Iterator[Live]:
    """A server with a key, a small body, and little time for it."""
    with serving(chat_pair, api_keys=("s3cret",), n_body_bytes=1000, body_seconds=0.5) as running:
        yield running


def test_a_body_may_not_be_larger_than_the_limit(strict: Live) -> None:
    check_refused(strict, strict.post("/v1/completions", prompt="x" * 2000), 413)

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 100

    response = strict.client.post("/v1/completions", content=chunks(), headers=JSON)
    check_refused(strict, response, 413)
    fits = json.dumps({"prompt": "hi", "max_tokens": 1}).encode().ljust(1000)
    assert strict.client.post("/v1/completions", content=fits, headers=JSON).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("key", [None, "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cretx"])
def test_without_the_key_requests_are_refused(strict: Live, path: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key}
    method = "POST" if path in ("/v1/completions", "/tokenize") else "GET"
    with httpx.Client(base_url=strict.url, trust_env=False) as anybody:
        response = anybody.request(method, path, headers=headers)
    check_refused(strict, response, 401)
    assert response.headers["www-authenticate"] == "Bearer"
    assert "s3cret" not in response.text


def test_with_the_key_it_works_and_health_needs_none(strict: Live) -> None:
    assert strict.client.get("/v1/models").status_code == 200
    with httpx.Client(base_url=strict.url, trust_env=False) as anybody:
        for path in ("/", "/health"):
            assert anybody.get(path).status_code == 200


def test_each_of_several_keys_works_in_either_header(chat_pair: Engine) -> None:
    with serving(chat_pair, api_keys=("one", "two")) as live:
        for headers, status in (
            ({"Authorization": "Bearer two"}, 200),
            ({"Authorization": "Bearer none", "X-Api-Key": "one"}, 200),
            ({"Authorization": "Bearer none", "X-Api-Key": "none"}, 401),
            ({"Authorization": "", "X-Api-Key": "one"}, 200),
            ({"Authorization": "", "X-Api-Key": "onetwo"}, 401),
            ({"Authorization": "", "X-Api-Key": ""}, 401),
        ):
            assert live.client.get("/v1/models", headers=headers).status_code == status


def test_a_key_may_have_any_characters(chat_pair: Engine) -> None:
    with serving(chat_pair, api_keys=("clé",)) as locked:
        for sent, status in (("clé", 200), ("cle", 401)):
            headers = {"Authorization": f"Bearer {sent}".encode()}
            assert locked.client.get("/v1/models", headers=headers).status_code == status


def test_other_origins_are_let_in_only_when_named(live: Live, chat_pair: Engine) -> None:
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in live.client.get("/health", headers=asked).headers
    no_cors = live.client.options("/v1/completions", headers=asked)
    assert (no_cors.status_code, no_cors.content) == (204, b"")
    assert "access-control-allow-origin" not in no_cors.headers
    with serving(chat_pair, cors_origins=("http://good.example",), api_keys=("k",)) as open_to_one:
        for origin, allowed in (("http://evil.example", None), ("http://good.example",) * 2):
            for more in (asked, {}):
                headers = {**more, "Origin": origin, "Authorization": ""}
                response = open_to_one.client.options("/v1/completions/", headers=headers)
                assert (response.status_code, response.content) == (204, b"")
                assert response.headers.get("access-control-allow-origin") == allowed


def test_other_names_than_this_machines_are_refused(chat_pair: Engine) -> None:
    with serving(chat_pair, hosts=("127.0.0.1", "localhost", "[::1]")) as local:
        for host, status in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example:80", 403),
            ("localhost:99", 200),
            ("[::1]:99", 200),
        ):
            assert local.client.get("/v1/models", headers={"Host": host}).status_code == status


def test_a_template_that_loops_holds_no_other_request(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    process, refused = TemplateProcess(seconds=0.5), []
    template = ChatTemplate(loop, bos_text="", eos_text="", process=process)
    monkeypatch.setattr(live.engine, "chat_template", template)
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    thread = threading.Thread(
        target=lambda: refused.append(live.post("/v1/chat/completions", **body))
    )
    began = child_seconds()
    thread.start()
    n_served = 0
    while thread.is_alive():
        assert live.post("/v1/completions", prompt="hi", max_tokens=1).status_code == 200
        n_served += 1
    process.close()
    assert child_seconds() - began < 2
    assert n_served > 1
    check_refused(live, refused[0])
    assert "chat template takes longer than 0.5 s" in refused[0].text
