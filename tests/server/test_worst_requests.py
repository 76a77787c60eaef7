"""The worst values of each field: none of them is an internal error; tests/fuzz has the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from server.dialects import HELLO
from server.test_refusals import GOOD
from serving import Live, serving

from ggufspec.engine.engine import Engine

VALUES: list[Any] = [
    *(True, 0, -1, 2**63 - 1, 1e308, "", " ", "9" * 5000, "\0", "\ufffe", [], {}, [[]], [{}]),
    *([None], ["", 5], {"": {}}, {"type": "object", "x": [0]}, {"a": {"b": {"c": []}}}),
]
BODIES = {
    **GOOD,
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/predict": {"prompt": "hi"},
    "/tokenize": {"content": "hi"},
}


@pytest.fixture(scope="module")
def open_server(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with all routes, for any Host header and one foreign origin."""
    folder, origins = tmp_path_factory.mktemp("slots"), ("http://good.example",)
    with serving(chat_pair, slot_folder=folder, cors_origins=origins, max_tokens=1) as running:
        yield running


def test_no_value_is_an_internal_error(open_server: Live) -> None:
    values, document = itertools.cycle(VALUES), open_server.client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        schema = document["components"]["schemas"].get(name.rpartition("/")[2], {})
        for field in schema.get("properties", ()):
            body = {**BODIES.get(path, {}), field: next(values)}
            response = open_server.post(path, **body)
            assert response.status_code != 500, (path, body)
            assert response.status_code < 400 or "error" in response.json(), (path, body)
