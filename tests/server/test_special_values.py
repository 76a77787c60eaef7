"""Values with a special meaning: limits of 0 and -2, a seed of -1, empty prompts and stops."""

from __future__ import annotations

from typing import Any

from serving import Live, serving

from ggufspec.engine.engine import Engine

FULL: dict[str, Any] = {"echo": True, "logprobs": 0}


def test_a_prompt_that_fills_the_context_can_be_scored(live: Live) -> None:
    full = {**FULL, "prompt": [5] * live.engine.n_ctx}
    choice = live.ok("/v1/completions", **full, max_tokens=0)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == live.engine.n_ctx
    assert choice["finish_reason"] == "length"
    for more, n_tokens in (({"max_tokens": 1}, 0), ({"max_tokens": 0}, 1)):
        asked = {**FULL, **more, "prompt": [5] * (live.engine.n_ctx + n_tokens)}
        error = live.post("/v1/completions", **asked).json()["error"]
        assert error["code"] == "context_length_exceeded"
    asked = {"prompt": full["prompt"][10:], "max_tokens": -1, "ignore_eos": True}
    assert live.ok("/v1/completions", **asked)["usage"]["completion_tokens"] == 10


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
