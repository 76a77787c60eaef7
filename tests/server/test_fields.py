"""The fields of requests: those that have an effect, those that have none, and those refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import Live, comes_true, events_of, said, serving

import ggufspec
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.llama.context import Context
from ggufspec.server import fields

REFUSED = fields.REFUSED["everywhere"]
GREEDY: dict[str, Any] = {"prompt": "hello world", "temperature": 0, "max_tokens": 8}
# Kinds of objects whose fields without effect, and refused ones, are in the guide.
GUIDED = ("everywhere", "responses", "messages_api", "custom_tools", "blocks", "thinking", "ollama")
MESSAGES = [{"role": "user", "content": "hello world"}]


def text_of(live: Live, **asked: Any) -> str:
    body = live.ok("/v1/completions", **{**GREEDY, **asked})
    return str(body["choices"][0]["text"])


def test_fields_without_an_effect_are_accepted_with_any_value(live: Live) -> None:
    plain = text_of(live)
    assert text_of(live, **dict.fromkeys(fields.IGNORED["everywhere"], "any")) == plain
    assert text_of(live, **dict.fromkeys(REFUSED), unknown=None, seed=None, n=None) == plain
    harmless = {name: values[0] for name, (values, _) in REFUSED.items() if values}
    assert text_of(live, **harmless) == plain
    message = {**MESSAGES[0], **dict.fromkeys(fields.IGNORED["messages"], "any"), "audio": None}
    chats = [
        live.ok("/v1/chat/completions", messages=[each], temperature=0, max_tokens=8)
        for each in (MESSAGES[0], message)
    ]
    assert chats[0]["choices"] == chats[1]["choices"]


def test_the_guide_lists_all_fields(live: Live) -> None:
    guide = (Path(ggufspec.__file__).parent / "server" / "README.md").read_text(encoding="utf-8")
    schemas = live.client.get("/openapi.json").json()["components"]["schemas"]
    bodies = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "StructuredOutputs")
    bodies = (*bodies, "LlamaCompletion", "InfillRequest")
    names = {name for body in bodies for name in schemas[body]["properties"]}
    bodies = ("MessagesRequest", "CustomTool", "OllamaRequest")
    names |= {name for body in bodies for name in schemas[body]["properties"]}
    for tables in (fields.IGNORED, fields.REFUSED):
        for kind in GUIDED:
            names |= {*tables.get(kind, {})}
    names |= {*fields.RENAMED["everywhere"], *fields.RENAMED["ollama_options"]}
    for name in names - {"name", "description", "type"}:
        assert f"`{name}`" in guide, name


@pytest.mark.parametrize(
    ("asked", "regex"),
    [
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "ab" "c"?'}, "abc?"),
        ({"grammar": 'start: "ab"'}, "ab"),
        ({"json_schema": {"enum": ["x"]}}, '"x"'),
        ({"guided_json": {"enum": ["x"]}}, '"x"'),
        ({"structured_outputs": {"json": {"enum": ["x"]}, "regex": None}}, '"x"'),
        ({"structured_outputs": {"regex": "a|b"}}, "a|b"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"structured_outputs": {"grammar": 'root ::= "q"'}}, "q"),
        ({"response_format": {"type": "json_object", "schema": {"enum": [5]}}}, "5"),
    ],
)
def test_constraints_have_the_names_of_other_servers(
    live: Live, asked: dict[str, Any], regex: str
) -> None:
    assert re.fullmatch(regex, text_of(live, **asked))


def test_a_json_object_may_be_asked_for_as_in_vllm(live: Live) -> None:
    assert text_of(live, structured_outputs={"json_object": True}, max_tokens=2).startswith("{")


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": -1},
        {"top_p": 0, "temperature": 1},
        {"best_of": 1},
        {"n": None, "n_cmpl": 1},
        {"stream_options": {"include_usage": True}},
        {"logit_bias": []},
        {"logit_bias": [[5, 0]]},
        {"seed": -1},
        {"xtc_probability": 0, "mirostat": 0, "samplers": ["top_k", "xtc", "temperature"]},
        {"xtc_probability": 0.5, "dynatemp_range": 1, "mirostat": 2, "temperature": 0},
        {"banned_strings": ["no such text in it"]},
        {"bad_words": []},
        {"speculative.n_max": 0},
        {"draft_n": 2, "drafter": "ngram", "tree": "off", "verify": "match"},
        {"draft_n": "auto"},
        {"typ_p": 1, "dry_multiplier": 0, "repetition_penalty": 1, "top_n_sigma": 0},
        {"min_tokens": 4},
    ],
    ids=str,
)
def test_sloppy_and_foreign_values_mean_what_they_should(live: Live, asked: dict[str, Any]) -> None:
    text = text_of(live, **{"max_tokens": 8, **asked})
    assert text.startswith(text_of(live))


def test_samplers_and_penalties_reach_the_engine(live: Live) -> None:
    engine = live.engine
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "speculative": False}
    plain: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "drafter": "none"}
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in penalties:
        own: dict[str, Any] = {name.replace("repetition", "repeat"): 1.5, "repeat_last_n": -1}
        wanted = engine.generate("hello world", **own, **plain)
        assert text_of(live, **{name: 1.5}, **asked) == wanted.text
    free: dict[str, Any] = {"temperature": 2, "seed": 3, "max_tokens": 30}
    wanted = engine.generate("hello world", top_k=0, drafter="none", **free)
    assert text_of(live, top_k=-1, speculative=False, **free) == wanted.text
    cases: list[dict[str, Any]] = [
        {"xtc_probability": 0.7, "xtc_threshold": 0.01, "dynatemp_range": 1.5},
        {"mirostat": 2, "mirostat_tau": 2, "mirostat_eta": 0.5},
        {"samplers": ["adaptive_p"], "adaptive_target": 0.2, "adaptive_decay": 0.5},
        {"samplers": ["xtc", "adaptive_p"], "adaptive_target": 0.2, "xtc_probability": 0.5},
        {"banned_strings": ["HELL"]},
        {"banned_strings": "HELL"},
    ]
    for own in cases:
        text = engine.generate("hello world", drafter="none", **own, **free).text
        assert text_of(live, speculative=False, **own, **free) == text != wanted.text
    names = ["top_k", "xtc", "temperature"]
    assert text_of(live, samplers="kxt", **free) == text_of(live, samplers=names, **free)
    dry: dict[str, Any] = {"dry_multiplier": 2.0, "dry_allowed_length": 1}
    wanted = engine.generate("hello world", **dry, **plain)
    assert text_of(live, **dry, **asked) == wanted.text
    first = wanted.tokens[0]
    wanted = engine.generate("hello world", logit_bias={first: float("-inf")}, **plain)
    assert text_of(live, logit_bias=[[first, False]], **asked) == wanted.text


def test_stop_tokens_end_a_text_and_are_no_part_of_it(live: Live) -> None:
    seeded = {"prompt": "hello", "seed": 3, "max_tokens": 8, "temperature": 2}
    tokens = live.ok("/v1/completions", **seeded, return_tokens=True)["choices"][0]["tokens"]
    stop = next(i for i, token in enumerate(tokens) if i > 1 and token not in tokens[:i])
    asked = {**seeded, "stop_token_ids": [tokens[stop]], "return_tokens": True}
    choice = live.ok("/v1/completions", **asked)["choices"][0]
    assert (choice["tokens"], choice["finish_reason"]) == (tokens[:stop], "stop")
    later = live.ok("/v1/completions", **asked, min_tokens=8)
    assert later["usage"]["completion_tokens"] == 8
    assert tokens[stop] not in later["choices"][0]["tokens"]


def test_control_tokens_are_shown_on_request(live: Live) -> None:
    (token,) = live.engine.vocab.tokenize("<|im_start|>", add_special=False, parse_special=True)
    asked = {"logit_bias": {token: 100}, "max_tokens": 2}
    assert text_of(live, **asked) == ""
    assert text_of(live, **asked, skip_special_tokens=False) == "<|im_start|>" * 2


def test_tokens_are_streamed_too(live: Live) -> None:
    whole = live.ok("/v1/completions", **GREEDY, return_tokens=True)["choices"][0]["tokens"]
    frames = live.post("/v1/completions", **GREEDY, return_tokens=True, stream=True).text
    events = [json.loads(line[6:]) for line in frames.splitlines() if line.startswith("data: {")]
    assert [t for event in events for t in event["choices"][0].get("tokens", ())] == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_timings(live: Live, stream: bool) -> None:
    asked = {**GREEDY, "prompt": "timings of the prompt", "stream": stream, "n": 2}
    response = live.post("/v1/completions", **asked, stream_options={"include_usage": True})
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if "{" in line]
        assert ["timings" in event for event in events][-2:] == [True, True]
        timings, usage = events[-1]["timings"], events[-1]["usage"]
    else:
        timings, usage = response.json()["timings"], response.json()["usage"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 16
    assert timings["prompt_n"] + timings["cache_n"] == 2 * usage["prompt_tokens"]
    assert timings["predicted_per_second"] > 0
    assert timings["draft_n"] >= timings["draft_n_accepted"] >= 0


WHAT = ("accepted", "rejected")


def test_a_predicted_output_is_drafted_and_does_not_change_the_answer(
    live: Live,
) -> None:
    asked = {
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    plain = live.ok("/v1/chat/completions", **asked, speculative=False)
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    prediction = {"type": "content", "content": parts}
    n_accepted = {}
    for drafter in ("auto", "ngram"):
        for given in (None, prediction):
            found = live.ok("/v1/chat/completions", **asked, prediction=given, drafter=drafter)
            assert found["choices"][0]["message"]["content"] == text
            details = found["usage"]["completion_tokens_details"]
            timings = found["timings"]
            n_accepted[drafter, given is None] = timings["draft_n_accepted"]
            n_counted = sum(details[f"{what}_prediction_tokens"] for what in WHAT)
            if given is None:
                assert n_counted == timings["draft_n"]
            else:  # the text repeats itself in places, too
                assert 0 < n_counted < timings["draft_n"]
                assert 0 < details["accepted_prediction_tokens"] < timings["draft_n_accepted"]
    assert n_accepted["ngram", False] > n_accepted["ngram", True], "the text hardly repeats itself"


def logprobs_of(engine: Engine, tokens: list[int]) -> list[float]:
    """Of all tokens but the first, one pass each."""
    rows = scoring.logits(engine, tokens[:1], tokens[1:], whose="target")
    found = []
    for row, token in zip(rows, tokens[1:], strict=True):
        logits = row[0].astype(float)
        found.append(logits[token] - math.log(sum(math.exp(logit) for logit in logits)))
    return found


def test_a_prompt_is_echoed_with_its_log_probabilities(live: Live) -> None:
    """As lm-eval asks for them: several prompts of tokens, longer than a piece."""
    text = "hello world " * 40
    prompts = [live.engine.tokenize(text + end) for end in ("the end", "a dog", "")]
    asked = {"prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True}
    body = live.ok("/v1/completions", **asked, max_tokens=1)
    for choice, prompt in zip(body["choices"], prompts, strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(prompt) + 1
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        n = len(prompt)
        assert found["token_logprobs"][1:n] == pytest.approx(
            logprobs_of(live.engine, prompt), abs=2e-3
        )
        assert all(len(top) == 1 for top in found["top_logprobs"][1:])
        assert choice["finish_reason"] == "length"
        assert choice["text"].startswith(text)
        at = found["text_offset"][n - 1]
        assert choice["text"][at:].startswith(found["tokens"][n - 1])
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_the_text_with_the_prompt_as_it_was_sent(live: Live, stream: bool) -> None:
    wanted = "hello world" + text_of(live)
    for logprobs in (None, 0, 2):
        asked = {**GREEDY, "echo": True, "logprobs": logprobs, "n": 2, "stream": stream}
        response = live.post("/v1/completions", **asked)
        if stream:
            assert [said(events_of(response), i) for i in (0, 1)] == [wanted] * 2
        else:
            assert [choice["text"] for choice in response.json()["choices"]] == [wanted] * 2
    assert text_of(live, echo=True, max_tokens=0) == "hello world"


def test_prompts_that_begin_alike_are_scored_once(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the choices of a question cost the question once."""
    prompt = live.engine.tokenize("once upon a time there was a dog " * 20)
    asked = {"temperature": 0, "logprobs": 1, "echo": True, "max_tokens": 0}
    real, n_decoded = Context.decode, [0]

    def counted(self: Context, tokens: Sequence[int], *more: Any) -> None:
        n_decoded[-1] += len(tokens)
        real(self, tokens, *more)

    monkeypatch.setattr(Context, "decode", counted)
    live.ok("/v1/completions", prompt=[*prompt, 5], **asked)
    n_decoded.append(0)
    live.ok("/v1/completions", prompt=[*prompt, 6], **asked)
    assert 0 < n_decoded[1] < n_decoded[0] / 2


def test_other_texts_go_on_while_a_prompt_is_scored(endless_file: Path) -> None:
    options: dict[str, Any] = {"n_threads": 1, "n_ctx": 20_000, "n_slots": 2, "tuned": False}
    with (
        ggufspec.load(endless_file, **options) as engine,
        serving(engine) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        long = {"prompt": [5] * 19_000, "max_tokens": 0, "logprobs": 0, "echo": True}
        scored = pool.submit(live.post, "/v1/completions", **long)
        assert comes_true(lambda: live.service.texts.n_running == 1)
        for _ in range(3):
            live.ok("/v1/completions", prompt="hi", max_tokens=1)
        assert not scored.done()
        live.server.should_exit = True  # and it does not hold the server
        assert scored.result().status_code == 503


def chat(live: Live, *messages: tuple[str, str], **asked: Any) -> Any:
    body = {"messages": [{"role": role, "content": text} for role, text in messages], **asked}
    return live.post("/v1/chat/completions", **body, temperature=0, max_tokens=8)


def test_a_last_message_of_the_assistant_is_continued(live: Live) -> None:
    turns = [("user", "hello"), ("assistant", "world the")]
    continued = live.engine.render(
        [{"role": role, "content": text} for role, text in turns], continue_final_message=True
    )
    wanted = live.engine.generate(continued, temperature=0, max_tokens=8).text
    for asked in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        message = chat(live, *turns, **asked).json()["choices"][0]["message"]
        assert message["content"] == wanted
    for asked in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        usage = chat(live, *turns, **asked).json()["usage"]
        assert usage["prompt_tokens"] > len(continued)
