"""OpenAI's API: what its own client, and others, get for what they ask."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from llguidance import LLMatcher
from patience import PATIENCE
from prometheus_client.parser import text_string_to_metric_families
from serving import Live, events_of, said, serving

import ggufspec
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.structured import grammar
from ggufspec.structured.constraint import TokenTable

TURN = [{"role": "user", "content": "hello world"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 24}


def text_of(body: Any) -> str:
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# Texts


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stream_says_what_the_whole_answer_says(live: Live, sampling: dict[str, Any]) -> None:
    asked = {"prompt": "hello world", **sampling}
    live.engine.forget()
    whole = live.ok("/v1/completions", **asked)
    live.engine.forget()
    usage = {"include_usage": True}
    events = events_of(live.post("/v1/completions", **asked, stream=True, stream_options=usage))
    assert said(events) == text_of(whole)
    if sampling is GREEDY:
        assert text_of(whole) == live.engine.generate("hello world", **GREEDY).text
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] == "length"
    assert set(reasons[:-1]) == {None}
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24


def test_usage_adds_up(live: Live) -> None:
    body = live.ok("/v1/completions", prompt=["hello world", "the end"], n=2, **SAMPLED)
    usage = body["usage"]
    n_prompt = sum(len(live.engine.tokenize(prompt)) for prompt in ("hello world", "the end"))
    assert usage["prompt_tokens"] == n_prompt
    assert usage["completion_tokens"] == 4 * 24
    assert usage["total_tokens"] == n_prompt + 4 * 24
    details = usage["completion_tokens_details"]
    assert 0 <= details["accepted_prediction_tokens"] <= usage["completion_tokens"]
    assert details["rejected_prediction_tokens"] >= 0
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]


def test_without_speculation_nothing_is_drafted(live: Live) -> None:
    asked = {"prompt": "hello world", **GREEDY, "report_drafted": True}
    plain = live.ok("/v1/completions", **asked, speculative=False)
    assert plain["ggufspec"][0]["n_drafted"] == 0
    assert plain["ggufspec"][0]["drafted"] == [False] * 24
    assert text_of(plain) == text_of(live.ok("/v1/completions", **asked))


def test_drafted_tokens_are_reported_only_on_request(live: Live) -> None:
    asked = {"prompt": "hello world", **GREEDY, "stream": True}
    assert all(
        "ggufspec" not in event for event in events_of(live.post("/v1/completions", **asked))
    )
    events = events_of(live.post("/v1/completions", **asked, report_drafted=True))
    flags = [flag for event in events for flag in event["ggufspec"]["drafted"]]
    assert len(flags) == 24
    assert sum(flags) == events[-1]["ggufspec"]["n_accepted"]


def test_seeds_repeat_texts_and_choices_differ(live: Live) -> None:
    def ask(seed: int) -> list[str]:
        live.engine.forget()
        body = live.ok("/v1/completions", prompt="hello", n=3, **{**SAMPLED, "seed": seed})
        return [choice["text"] for choice in body["choices"]]

    texts = ask(5)
    assert ask(5) == texts
    assert len({*texts, *ask(100)}) == 6
    assert ask(6)[0] != texts[0]
    live.ok("/v1/completions", prompt="hello", **{**SAMPLED, "seed": -(2**62)})


def test_a_ban_of_all_that_a_grammar_allows_is_the_clients_error(live: Live) -> None:
    ban = [[tiny.BPE.spell("a")[0], False]]
    refused = live.post("/v1/completions", prompt="hi", guided_choice=["a"], logit_bias=ban)
    assert refused.status_code == 400
    assert "the text cannot continue" in refused.json()["error"]["message"]


def test_the_choices_of_a_request_share_what_is_compiled_of_its_grammar(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, compiled = TokenTable.matcher, list[str]()

    def counted(table: TokenTable, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return compile_(table, grammar)

    monkeypatch.setattr(TokenTable, "matcher", counted)
    asked = {"prompt": ["hello world", "the end"], "n": 3, "guided_regex": "[a-d]{3}"}
    texts = [each["text"] for each in live.ok("/v1/completions", **asked, seed=1)["choices"]]
    assert all(re.fullmatch("[a-d]{3}", text) for text in texts)
    assert len(set(texts)) > 1
    assert len(compiled) == 1


def test_a_slow_schema_leaves_other_requests_alone(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.2)
    slow = {"type": "object", "properties": {f"x{i}": {} for i in range(4000)}}
    body = {
        "prompt": "hello world",
        "response_format": {"type": "json_schema", "json_schema": {"schema": slow}},
    }
    n_answered = 0
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=live.url, timeout=PATIENCE) as other:
        refused = pool.submit(other.post, "/v1/completions", json=body)
        while not refused.done():
            live.ok("/v1/completions", prompt="hello world", max_tokens=1)
            n_answered += 1
    assert refused.result().status_code == 400
    assert "takes longer than 0.2 s to compile" in refused.result().text
    assert n_answered > 2


def test_text_parts_and_developers_are_messages_too(live: Live) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    turn = {"role": "user", "content": "hello\nworld"}
    plain = [{"role": "system", "content": "be brief"}, turn]
    richer = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    texts = {
        text_of(live.ok("/v1/chat/completions", messages=messages, **GREEDY))
        for messages in (plain, richer)
    }
    assert len(texts) == 1


def test_a_body_is_parsed_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": "hello world", "max_tokens": 1, "user": "parsed once"})
    parsed: list[object] = []
    loads = json.loads

    def counted(document: Any, **how: Any) -> Any:
        if document in (body, body.encode()):
            parsed.append(document)
        return loads(document, **how)

    monkeypatch.setattr(json, "loads", counted)
    headers = {"Content-Type": "application/json"}
    assert live.client.post("/v1/completions", content=body, headers=headers).status_code == 200
    assert len(parsed) == 1


# Log-probabilities


def test_logprobs_are_those_of_the_target(live: Live) -> None:
    asked = {"prompt": "hello world", **GREEDY, "logprobs": 3}
    body = live.ok("/v1/completions", **asked)
    told = body["choices"][0]["logprobs"]
    prompt = live.engine.tokenize("hello world")
    tokens = live.engine.generate("hello world", **GREEDY).tokens
    assert len(told["token_logprobs"]) == len(told["tokens"]) == 24
    rows = scoring.logits(live.engine, prompt, tokens, whose="target")
    for row, token, logprob, top in zip(
        rows, tokens, told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        logits = row[0].astype(float)
        n_total = math.log(sum(math.exp(logit - logits.max()) for logit in logits))
        assert logprob == pytest.approx(logits[token] - logits.max() - n_total, abs=1e-3)
        assert max(top.values()) == pytest.approx(logprob), "greedy takes the likeliest"
    events = events_of(live.post("/v1/completions", **asked, stream=True))
    found = [
        logprob
        for event in events
        for logprob in (event["choices"][0]["logprobs"] or {}).get("token_logprobs", [])
    ]
    assert found == pytest.approx(told["token_logprobs"], abs=1e-3)


def test_logprobs_of_a_chat_name_bytes(live: Live) -> None:
    body = live.ok("/v1/chat/completions", messages=TURN, **GREEDY, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 24
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace")
    assert text == text_of(body)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


# The rest


def test_predict_gives_the_prompt_back_with_its_continuation(live: Live) -> None:
    wanted = live.engine.generate("hello world", temperature=0, max_tokens=40).text
    assert live.ok("/predict", prompt="hello world", temperature=0) == "hello world" + wanted


def test_tokens_there_and_back(live: Live) -> None:
    text = "héllo 🙂"
    tokens = live.ok("/tokenize", content=text)["tokens"]
    assert live.ok("/detokenize", tokens=tokens) == {"content": text, "prompt": text}
    pieces = live.ok("/tokenize", prompt=text, add_special_tokens=False, with_pieces=True)["tokens"]
    assert [each["id"] for each in pieces] == tokens
    said = [each["piece"] for each in pieces]  # bytes where a token is no text by itself
    assert b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in said).decode() == text


def test_prompts_may_be_tokens(live: Live) -> None:
    tokens = live.engine.tokenize("hello world")
    wanted = live.engine.generate("hello world", **GREEDY).text
    assert text_of(live.ok("/v1/completions", prompt=tokens, **GREEDY)) == wanted
    body = live.ok("/v1/completions", prompt=[tokens, tokens], **GREEDY)
    assert [choice["text"] for choice in body["choices"]] == [wanted, wanted]


def test_paths_work_without_v1_and_with_a_slash_at_their_end(live: Live) -> None:
    asked = {"prompt": "hello world", **GREEDY}
    wanted = text_of(live.ok("/v1/completions/", **asked))
    assert live.ok("/v1/completion/", **asked)["content"] == wanted
    assert live.ok("/completions/", **asked)["content"] == wanted, "llama.cpp's, without /v1"
    chat = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}
    found = [live.ok(path, **chat) for path in ("/chat/completions/", "/v1/chat/completions")]
    assert found[0]["choices"] == found[1]["choices"]
    for read in ("/models", "/models/tiny", "/props", "/health"):
        assert live.client.get(read).json() == live.client.get(f"/v1{read}/").json()
    assert live.ok("/v1/tokenize", content="hello") == live.ok("/tokenize", content="hello")


def test_head_is_answered_as_get_without_a_body(live: Live) -> None:
    for path in ("/health", "/v1/models", "/"):
        response = live.client.head(path)
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-length"] == live.client.get(path).headers["content-length"]
    assert live.client.head("/v1/completions").status_code == 405


def test_props_describe_the_server_without_paths(chat_pair: Engine) -> None:
    given = {"temperature": 0.25, "top_k": 7, "logit_bias": {5: -math.inf}}
    with serving(chat_pair, defaults=given) as live:
        body = live.client.get("/props").json()
    assert body["total_slots"] == chat_pair.n_slots
    assert body["model_path"] == "target.gguf"
    assert body["chat_template"] == chat_pair.pair.target.model.chat_template
    settings = body["default_generation_settings"]
    assert settings["n_ctx"] == chat_pair.n_ctx
    params = settings["params"]
    assert (params["temperature"], params["top_k"], params["draft_n"]) == (0.25, 7, "auto")
    assert params["logit_bias"] == [[5, False]]


def test_defaults_of_the_server_hold_where_a_request_sets_nothing(chat_pair: Engine) -> None:
    defaults = {"temperature": 2.0, "seed": 11, "repeat_penalty": 1.3}
    with serving(chat_pair, defaults=defaults) as live:
        asked = {"prompt": "hello world", "max_tokens": 16, "speculative": False}
        texts = [text_of(live.ok("/v1/completions", **asked)) for _ in range(2)]
        wanted = chat_pair.generate("hello world", max_tokens=16, drafter="none", **defaults)
        assert texts == [wanted.text] * 2
        choices = live.ok("/v1/completions", **asked, n=3)["choices"]
        assert len({choice["text"] for choice in choices}) == 3
        greedy = {**asked, "temperature": 0, "repeat_penalty": 1}
        wanted = chat_pair.generate("hello world", temperature=0, max_tokens=16, drafter="none")
        assert text_of(live.ok("/v1/completions", **greedy)) == wanted.text


def test_health_and_metrics_tell_what_was_done(live: Live, chat_pair: Engine) -> None:
    assert live.client.get("/health").json() == {"status": "ok"}
    before = live.metric("generated_tokens_total")
    live.ok("/v1/completions", prompt="hello world", **GREEDY)
    assert live.metric("generated_tokens_total") == before + 24
    assert live.metric('requests_total{path="/v1/completions",status="200"}') > 0
    response = live.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    guide = (Path(ggufspec.__file__).parent / "server" / "README.md").read_text(encoding="utf-8")
    for name, family in families.items():
        if not name.endswith("_created"):
            suffix = "_total" if family.type == "counter" else ""
            assert f"`{name.removeprefix('ggufspec_')}{suffix}" in guide, name
    for name in ("drafted", "accepted"):
        assert f'ggufspec_{name}_tokens_total{{position="0"}}' in response.text
    n_threads = max(chat_pair.pair.threads["target"])
    assert live.metric(f'decode_seconds_total{{model="target",threads="{n_threads}"}}') > 0
    assert live.metric("drafted_tokens_total") > 0
    n_tried, n_stood = (live.metric(f"{name}_tokens_total") for name in ("drafted", "accepted"))
    assert n_tried >= n_stood


def test_tokens_beside_the_longest_branch_of_a_tree_are_counted(chat_pair: Engine) -> None:
    """So that accepted / drafted tokens, over all positions, is the acceptance rate."""
    with (
        serving(chat_pair, defaults={"tree": "on", "n_draft": 4}) as live,
        serving(chat_pair) as other,
    ):
        body = live.ok("/v1/completions", prompt="hello world", **GREEDY, report_drafted=True)
        (stats,) = body["ggufspec"]
        for name in ("drafted", "accepted"):
            assert live.metric(f"{name}_tokens_total") == stats[f"n_{name}"] > 0
        assert live.metric('drafted_tokens_total{position="branches"}') > 0
        details = body["usage"]["completion_tokens_details"]
        n_rejected = stats["n_drafted"] - stats["n_accepted"]
        assert details["rejected_prediction_tokens"] == n_rejected
        assert other.metric("generated_tokens_total") == 0, "each server counts its own texts"
