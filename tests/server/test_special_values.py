"""Values with a special meaning: limits of 0 and -2, a seed of -1, empty prompts and stops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from serving import Live, serving

from ggufspec.engine.engine import Engine

FULL: dict[str, Any] = {"echo": True, "logprobs": 0}


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/completions", {"max_tokens": 0}),
        ("/v1/completions", {"n_predict": 0, "stream": True}),
        ("/v1/chat/completions", {"max_completion_tokens": 0}),
        ("/v1/messages", {"max_tokens": 0}),
        ("/v1/responses", {"max_output_tokens": 0}),
        ("/api/chat", {"options": {"num_predict": 0}}),
    ],
)
def test_with_a_limit_of_0_the_prompt_is_only_cached(
    live: Live, path: str, limit: dict[str, Any]
) -> None:
    text = f"a prompt that only {path} has seen, with {limit}"
    asked = {
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
    }.get(path, {"messages": [{"role": "user", "content": text}]})
    names = ("prompt_tokens_total", "prompt_tokens_reused_total", "generated_tokens_total")
    found = [[live.metric(name) for name in names]]
    for _ in range(2):
        response = live.post(path, **asked, **limit)
        assert response.status_code == 200, response.text
        found.append([live.metric(name) for name in names])
    (n_prompt, n_first, n_written), (_, n_second, _) = (
        [after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(found)
    )
    assert n_written == 0
    assert n_first < n_second == n_prompt - 1


def test_a_prompt_that_fills_the_context_can_be_scored(live: Live) -> None:
    full = {**FULL, "prompt": [5] * live.engine.n_ctx}
    choice = live.ok("/v1/completions", **full, max_tokens=0)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == live.engine.n_ctx
    assert choice["finish_reason"] == "length"
    for more, n_tokens in (({"max_tokens": 1}, 0), ({"max_tokens": 0}, 1)):
        asked = {**FULL, **more, "prompt": [5] * (live.engine.n_ctx + n_tokens)}
        error = live.post("/v1/completions", **asked).json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_a_limit_of_minus_2_ends_where_the_context_does(chat_pair: Engine) -> None:
    with serving(chat_pair, defaults={"context_shift": True, "n_draft": 3}) as shifting:
        prompt = [5] * (chat_pair.n_ctx - 10)
        asked = {"prompt": prompt, "ignore_eos": True}
        for more in ({"max_tokens": -2}, {"n_predict": -2}):
            body = shifting.ok("/v1/completions", **asked, **more)
            assert body["usage"]["total_tokens"] == chat_pair.n_ctx
        body = shifting.ok("/v1/completions", **asked, max_tokens=15)
        assert body["usage"]["completion_tokens"] == 15


def test_a_seed_of_minus_1_is_a_random_one_whatever_the_servers_is(chat_pair: Engine) -> None:
    asked = {"prompt": "hello", "temperature": 2, "max_tokens": 12, "ignore_eos": True}
    with serving(chat_pair, defaults={"seed": 7, "n_draft": 3}) as live:
        for more, n_texts in (({}, 1), ({"seed": 3}, 1), ({"seed": -1}, 3)):
            texts = {
                live.ok("/v1/completions", **asked, **more)["choices"][0]["text"] for _ in range(3)
            }
            assert len(texts) == n_texts


def test_an_empty_prompt_is_the_token_that_begins_a_text(endless: Engine) -> None:
    with serving(endless) as live:
        for prompt in ("", ["", "hi"]):
            body = live.ok("/v1/completions", prompt=prompt, max_tokens=2, temperature=0)
            assert all(len(choice["text"]) == 2 for choice in body["choices"])
        body = live.ok("/v1/completions", prompt="", max_tokens=0, echo=True, logprobs=0)
        assert body["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/completions", "stop"), ("/v1/messages", "stop_sequences")]
)
@pytest.mark.parametrize("stops", [[], [""], ["", "never seen"]])
def test_empty_stop_strings_are_left_out(
    live: Live, path: str, name: str, stops: list[str]
) -> None:
    prompt = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    own = {key: prompt[key] for key in ("messages" if "messages" in path else "prompt",)}
    assert live.post(path, **own, max_tokens=4, **{name: stops}).status_code == 200
