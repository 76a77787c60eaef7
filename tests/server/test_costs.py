"""No field of a request takes much processor time, whatever its value: others wait meanwhile."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import ValidationError

from ggufspec.engine.engine import Engine
from ggufspec.errors import GgufspecError
from ggufspec.server.requests import parse_request
from ggufspec.server.schema import ChatRequest, CompletionRequest
from ggufspec.server.service import ServerOptions
from ggufspec.server.strict_json import parse_json

MAX_SECONDS = 0.5  # 0.1 on a quiet core
PART = {"type": "text", "text": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "parameters": {"properties": {f"p{j}": {"type": "string"} for j in range(20)}},
        },
    }
    for i in range(128)
]
# About 1 MB each, the largest body by default, unless another limit is lower.
COMPLETIONS: dict[str, dict[str, Any]] = {
    "token ids": {"prompt": [5] * 300_000},
    "wrong token ids": {"prompt": [-1] * 250_000},
    "biases": {"prompt": "hi", "logit_bias": {str(i): 0.5 for i in range(75_000)}},
    "pairs": {"prompt": "hi", "logit_bias": [[i, -1] for i in range(75_000)]},
    "stop strings": {"prompt": "hi", "stop": [f"{i:0999}" for i in range(1000)]},
    "unknown fields": {"prompt": "hi", **{f"x{i}": 1 for i in range(70_000)}},
}
CHATS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "a"}] * 28_000},
    "allowed messages": {"messages": [{"role": "user", "content": ""}] * 5000},
    "parts": {"messages": [{"role": "user", "content": [PART] * 28_000}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [CALL] * 1000}]},
    "tools": {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS},
}


@pytest.mark.parametrize("name", [*COMPLETIONS, *CHATS])
def test_the_largest_value_of_a_field_takes_little_time(name: str, chat_pair: Engine) -> None:
    body = {**COMPLETIONS, **CHATS}[name]
    data, model = json.dumps(body).encode(), ChatRequest if name in CHATS else CompletionRequest
    assert len(data) < 2**20 + 2**17
    for is_last in (False, True):  # the first may prepare something for all requests
        began = time.thread_time()
        try:
            request = model.model_validate(parse_json(data))
            parse_request(request, chat_pair, ServerOptions(alias="x"))
        except ValidationError as error:
            error.errors()
        except GgufspecError:
            pass
        seconds = time.thread_time() - began
        if seconds < MAX_SECONDS:
            break
        assert not is_last, f"{seconds:.2f} s"
