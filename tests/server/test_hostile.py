"""Whatever clients send: a clear 4xx, nothing of ours in it, and the next request works."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

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
    "a list": b"[]",
    "NaN": b'{"prompt": "hi", "temperature": NaN}',
    "too large a float": b'{"prompt": "hi", "temperature": 1e999}',
    "too large an int": b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
    "twenty digits": b'{"prompt": "hi", "seed": 99999999999999999999}',
    "deep": DEEP,
    "deep but not broken": b'{"prompt": "hi", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
    "a key twice": b'{"prompt": "hi", "prompt": "ho"}',
    "half a surrogate": rb'{"prompt": "\ud800"}',
    "half a surrogate as key": rb'{"prompt": "hi", "\udfff": 1}',
    "not UTF-8": b'{"prompt": "\xff"}',
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
        ("POST", "/../../etc/passwd", 404),
        ("POST", "/v1/embeddings", 501),
        ("POST", "/v1/rerank", 404),
    ],
)
def test_unknown_paths_are_reported(live: Live, method: str, path: str, status: int) -> None:
    response = live.client.request(method, path, json={} if method == "POST" else None)
    check_refused(live, response, status)
    assert ("no images" in response.text) == ("rerank" in path)


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
)
def test_only_json_is_taken(live: Live, kind: str | None) -> None:
    headers = {"Origin": live.url} if kind is None else {"Content-Type": kind}
    response = live.client.post("/v1/completions", content=b'{"prompt":"hi"}', headers=headers)
    check_refused(live, response, 415)


def test_a_program_may_leave_out_that_it_sends_json(live: Live) -> None:
    body = b'{"prompt":"hi","max_tokens":2}'
    assert live.client.post("/v1/completions", content=body).status_code == 200


# Limits


def test_a_body_may_not_be_larger_than_the_limit(strict: Live) -> None:

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 100

    response = strict.client.post("/v1/completions", content=chunks(), headers=JSON)
    check_refused(strict, response, 413)
    fits = json.dumps({"prompt": "hi", "max_tokens": 1}).encode().ljust(1000)
    assert strict.client.post("/v1/completions", content=fits, headers=JSON).status_code == 200
    response = strict.client.post("/v1/completions", content=fits + b" ", headers=JSON)
    check_refused(strict, response, 413)


def test_without_a_key_requests_are_refused(chat_pair: Engine) -> None:
    with serving(chat_pair, api_keys=("one", "two", "clé")) as live:
        for sent, status in (
            ({"Authorization": b"Bearer two"}, 200),
            ({"Authorization": "Bearer clé".encode()}, 200),
            ({"Authorization": b"Bearer none", "X-Api-Key": b"one"}, 200),
            ({"Authorization": b"", "X-Api-Key": b"one"}, 200),
            ({"Authorization": b"Bearer none", "X-Api-Key": b"none"}, 401),
            ({"Authorization": b"", "X-Api-Key": b"onetwo"}, 401),
            ({"Authorization": b"", "X-Api-Key": b""}, 401),
            ({"Authorization": b"Basic one"}, 401),
            ({"Authorization": b"Bearer"}, 401),
        ):
            assert live.client.get("/v1/models", headers=sent).status_code == status
        for path in ("/metrics", "/tokenize"):
            response = live.client.get(path, headers={"Authorization": "Bearer cle"})
            check_refused(live, response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/health"):
            assert live.client.get(path, headers={"Authorization": ""}).status_code == 200


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
