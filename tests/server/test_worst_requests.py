"""The worst requests of each route: none of them is an internal error."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from serving import Live, serving

from ggufspec.engine.engine import Engine

NINES = "9" * 5000
PARTS = [NINES, "-1", "²", "\0", "%2e", "..", "[", "\U0001f642", "x" * 10_000, " ", "?#"]
HEADERS: list[tuple[str, bytes]] = [
    *(("Host", b"["), ("Host", b"]:x:99999999"), ("Host", b"\xff"), ("Expect", b"200-ok")),
    ("Accept", b"application/openmetrics-text; version=abc"),
    *(("Accept", b"text/plain; version=" + NINES.encode()), ("Accept", b"\xff;q=x,,;")),
    *(("Authorization", b"Bearer \xff"), ("X-Api-Key", b"\xb2" * 5000), ("Origin", b"\xff")),
    ("Content-Type", b"application/json; charset=nonsense"),
]
VALUES: list[Any] = [
    *(True, 0, -1, 2**63 - 1, 1e308, "", " ", NINES, "\0", "\ufffe", [], {}, [[]], [{}]),
    *([None], ["", 5], {"": {}}, {"type": "object", "x": [0]}, {"a": {"b": {"c": []}}}),
]
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/predict": {"prompt": "hi"},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def open_server(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with all routes, for any Host header and one foreign origin."""
    folder, origins = tmp_path_factory.mktemp("slots"), ("http://good.example",)
    with serving(chat_pair, slot_folder=folder, cors_origins=origins, max_tokens=1) as running:
        yield running


def routes(live: Live) -> Iterator[tuple[str, str, Any]]:
    """Method, path and schema of the body of each route."""
    document = live.client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, facts in methods.items():
            content = facts.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            name = schema.get("$ref", "").rpartition("/")[2]
            yield method.upper(), path, document["components"]["schemas"].get(name, {})


def check(response: httpx.Response, *asked: object) -> None:
    assert response.status_code != 500, asked
    if response.status_code >= 400 and response.request.method != "HEAD":
        assert "error" in response.json(), asked


def test_no_path_is_an_internal_error(open_server: Live) -> None:
    for method, path, _ in routes(open_server):
        if "{" not in path and method == "POST":
            continue
        for part in PARTS:
            sent = f"{path.partition('{')[0]}{quote(part)}?action={quote(part)}&a&=&action=save"
            body = {} if method == "POST" else None
            check(open_server.client.request(method, sent, json=body), sent)


def test_no_header_is_an_internal_error(open_server: Live) -> None:
    headers = itertools.cycle(HEADERS)
    for method, path, _ in routes(open_server):
        for each in [method] * len(HEADERS) + ["HEAD", "OPTIONS", "TRACE"]:
            name, value = next(headers)
            body = {} if each == "POST" else None
            response = open_server.client.request(each, path, json=body, headers={name: value})
            check(response, each, path, name, value)


def test_no_value_is_an_internal_error(open_server: Live) -> None:
    values = itertools.cycle(VALUES)
    for method, path, schema in routes(open_server):
        for field in schema.get("properties", ()) if method == "POST" else ():
            body = {**GOOD.get(path, {}), field: next(values)}
            check(open_server.post(path, **body), path, body)
