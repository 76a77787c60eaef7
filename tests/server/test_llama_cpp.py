"""llama.cpp's own API: completion, infill, templates, slots and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from server.dialects import HELLO
from serving import Live, serving

import ggufspec
from ggufspec.engine.engine import Engine

GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 24}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("models") / "coder.gguf"
    tiny.write_llama(path, vocab=tiny.CODE, n_ctx_train=1024)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


def documents(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = live.post(path, stream=True, **body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_completion_has_llama_cpps_fields(live: Live) -> None:
    wanted = live.engine.generate("hello world", temperature=0, max_tokens=24)
    body = live.ok("/completion", prompt="hello world", **GREEDY)
    assert (body["content"], body["stop"], body["stop_type"]) == (wanted.text, True, "limit")
    assert body["tokens_predicted"] == 24
    assert body["tokens_evaluated"] == len(live.engine.tokenize("hello world"))
    assert body["tokens_cached"] == body["tokens_evaluated"] + 24
    assert body["prompt"].endswith("hello world")
    assert body["tokens"] == []
    assert body["generation_settings"]["n_predict"] == 24
    assert body["timings"]["predicted_n"] == 24
    found = live.ok("/completion", prompt="hello world", return_tokens=True, **GREEDY)
    assert found["tokens"] == list(wanted.tokens)
    stop = wanted.text[5:8]
    found = live.ok("/completion", prompt="hello world", stop=[stop], **GREEDY)
    assert (found["stop_type"], found["stopping_word"]) == ("word", stop)
    assert found["content"] == wanted.text[: wanted.text.index(stop)]


def test_a_stream_has_the_same_text_in_parts(live: Live) -> None:
    asked = {"prompt": "hello world", **GREEDY}
    *parts, last = documents(live, "/completion", **asked)
    whole = live.ok("/completion", **asked)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert all(part["stop"] is False for part in parts)
    assert parts[-1]["tokens_predicted"] == 24
    assert (last["stop"], last["content"]) == (True, "")
    assert last["stop_type"] == whole["stop_type"]


def test_prompts_may_be_lists_and_mixtures(live: Live) -> None:
    engine, asked = live.engine, {**GREEDY}
    first, second = (live.ok("/completion", prompt=each, **asked) for each in ("hello", "world"))
    both = live.ok("/completion", prompt=["hello", "world"], **asked)
    contents = [each["content"] for each in both]
    assert contents == [first["content"], second["content"]]
    assert [each["index"] for each in both] == [0, 1]
    tokens = engine.tokenize("hello")
    found = live.ok("/completion", prompt=tokens, **asked)
    assert found["content"] == first["content"]
    more = engine.vocab.tokenize(" world", add_special=False, parse_special=True)
    wanted = engine.generate([*tokens, *more], temperature=0, max_tokens=24).text
    assert live.ok("/completion", prompt=[*tokens, " world"], **asked)["content"] == wanted
    assert live.ok("/completion", prompt=["hello", *more], **asked)["content"] == wanted
    found = live.ok("/completion", prompt={"prompt_string": "hello"}, **asked)
    assert found["content"] == first["content"]


def test_response_fields_choose_and_unnest(live: Live) -> None:
    wanted = ["content", "generation_settings/n_predict", "no_such/field"]
    found = live.ok("/completion", prompt="hello", response_fields=wanted, **GREEDY)
    assert found.keys() == {"content", "generation_settings/n_predict"}
    assert found["generation_settings/n_predict"] == 24


def test_the_servers_number_of_tokens_is_for_requests_without_one(chat_pair: Engine) -> None:
    with serving(chat_pair, defaults={"max_tokens": 3, "ignore_eos": True}, max_tokens=6) as live:
        for asked, n in (
            ({}, 3),
            ({"n_predict": 5}, 5),
            ({"n_predict": 9}, 6),
            ({"n_predict": -1}, 6),
        ):
            assert live.ok("/completion", prompt="hello", **asked)["tokens_predicted"] == n


def test_probabilities_are_of_the_model_or_of_the_samplers(live: Live) -> None:
    asked = {"prompt": "hello", "n_predict": 6, "seed": 3, "temperature": 0.7, "top_k": 3}
    asked |= {"min_p": 0, "top_p": 1}
    of_model = live.ok("/completion", n_probs=5, **asked)
    listed = of_model["completion_probabilities"]
    assert len(listed) == 6
    for each in listed:
        assert each["logprob"] <= each["top_logprobs"][0]["logprob"] <= 0
        assert len(each["top_logprobs"]) == 5
    sampled = live.ok("/completion", n_probs=5, post_sampling_probs=True, **asked)
    assert sampled["content"] == of_model["content"]
    for each, of_raw in zip(sampled["completion_probabilities"], listed, strict=True):
        probs = [top["prob"] for top in each["top_probs"]]
        assert sum(probs) == pytest.approx(1, abs=1e-5)
        assert len(probs) == 3, "top_k is 3"
        raw = [top["logprob"] / 0.7 for top in of_raw["top_logprobs"][:3]]
        total = sum(map(math.exp, raw))
        assert probs == pytest.approx([math.exp(value) / total for value in raw], abs=1e-4)
        assert each["id"] in [top["id"] for top in each["top_probs"]]
    streamed = documents(live, "/completion", n_probs=2, **asked)
    assert sum(len(part.get("completion_probabilities", ())) for part in streamed) == 6


def test_a_bias_of_a_text_is_that_of_its_tokens(live: Live) -> None:
    tokens = live.engine.vocab.tokenize(" world", add_special=False, parse_special=True)
    asked = {"prompt": "hello", **GREEDY, "n_predict": 8}
    by_text = live.ok("/completion", logit_bias=[[" world", 50]], **asked)
    by_ids = live.ok("/completion", logit_bias=[[token, 50] for token in tokens], **asked)
    assert by_text["content"] == by_ids["content"] != live.ok("/completion", **asked)["content"]
    assert (
        live.ok("/completion", logit_bias={" world": 50}, **asked)["content"]
        == (by_text["content"])
    )


def test_no_tokens_are_predicted_but_the_prompt_is_read(coder: Live) -> None:
    prompt = "some text that no test before has read " * 3
    body = coder.ok("/completion", prompt=prompt, n_predict=0)
    assert (body["content"], body["tokens_predicted"]) == ("", 0)
    again = coder.ok("/completion", prompt=prompt, n_predict=1)
    assert again["timings"]["cache_n"] >= body["tokens_evaluated"] - 1
    full = coder.ok("/completion", prompt=prompt, n_predict=-2, ignore_eos=True)
    assert full["tokens_cached"] == coder.engine.n_ctx
    assert full["truncated"]


def test_infill_writes_between_two_texts(coder: Live) -> None:
    asked = {"input_prefix": "a = ", "input_suffix": "\nb", **GREEDY}
    body = coder.ok("/infill", **asked)
    shown = "<|repo_name|>myproject\n<|file_sep|>filename\n"
    around = "<|fim_prefix|>a = <|fim_suffix|>\nb<|fim_middle|>"
    assert body["prompt"].startswith(shown)
    assert body["prompt"].endswith(around)
    files = [{"text": "x = 1\n", "filename": "x.py"}, {"text": "y = 2\n"}]
    more = coder.ok("/infill", **asked, input_extra=files, prompt="5")
    assert "<|file_sep|>x.py\nx = 1\n<|file_sep|>tmp\ny = 2\n<|file_sep|>" in more["prompt"]
    assert "a = 5<|fim_suffix|>" in more["prompt"]
    typed = coder.ok("/infill", **{**asked, "input_prefix": "a = 1"})
    assert typed["timings"]["cache_n"] > 0
    assert [each["stop"] for each in documents(coder, "/infill", **asked)][-1] is True
    for missing in ("input_prefix", "input_suffix"):
        given = {name: value for name, value in asked.items() if name != missing}
        response = coder.post("/infill", **given)
        assert response.status_code == 400
        assert missing in response.text


def test_a_suffix_makes_the_same_prompt_in_other_apis(coder: Live) -> None:
    around = {"prompt": "a = ", "suffix": "\nb"}
    wanted = coder.ok("/infill", input_prefix="a = ", input_suffix="\nb", **GREEDY)["content"]
    found = coder.ok("/v1/completions", **around, temperature=0, max_tokens=24)
    assert found["choices"][0]["text"] == wanted
    options = {"temperature": 0, "num_predict": 24}
    assert coder.ok("/api/generate", **around, options=options, stream=False)["response"] == wanted


def test_a_model_without_infill_says_so(live: Live) -> None:
    response = live.post("/infill", input_prefix="a", input_suffix="b")
    assert response.status_code == 400
    assert "fill-in-the-middle" in response.json()["error"]["message"]


def test_the_template_is_applied_without_generating(live: Live) -> None:
    before = live.metric("generated_tokens_total")
    prompt = live.ok("/apply-template", messages=HELLO)["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n")
    assert live.engine.tokenize(prompt) == live.engine.render(HELLO)
    whole = live.ok("/apply-template", messages=HELLO, add_generation_prompt=False)["prompt"]
    assert prompt == whole + "<|im_start|>assistant\n"
    assert live.metric("generated_tokens_total") == before
    assert live.post("/apply-template", messages=[]).status_code == 400


def test_the_template_is_given_the_servers_variables(chat_files: tuple[Path, Path]) -> None:
    template = "{% if thinks %}<think>{% endif %}{{ messages[0].content }}"
    options: Any = {"chat_template": template, "template_variables": {"thinks": True}}
    with ggufspec.load(chat_files[0], n_threads=1, **options) as engine, serving(engine) as live:
        assert live.ok("/apply-template", messages=HELLO)["prompt"].startswith("<think>")
        asked = {"messages": HELLO, "chat_template_kwargs": {"thinks": False}}
        assert not live.ok("/apply-template", **asked)["prompt"].startswith("<think>")


def test_slots_are_listed(live: Live) -> None:
    live.ok("/completion", prompt="hello world", **GREEDY)
    slots = live.client.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(live.engine.n_slots))
    assert not any(slot["is_processing"] for slot in slots)
    assert slots[0]["n_ctx"] == live.engine.n_ctx
    assert max(slot["n_prompt_tokens"] for slot in slots) > 0
    assert live.client.get("/slots?fail_on_no_slot=1").status_code == 200


def test_metrics_have_llama_cpps_names_beside_ours(live: Live) -> None:
    assert float(live.client.get("/metrics").headers["process-start-time-unix"]) > 0

    def read() -> dict[str, float]:
        lines = live.client.get("/metrics").text.splitlines()
        found = [line.split() for line in lines if line.startswith("llamacpp:")]
        return {name: float(value) for name, value in found}

    before = read()
    body = live.ok("/completion", prompt="a prompt for the metrics", **GREEDY)
    after = read()
    added = {name: after[name] - before[name] for name in before}
    assert added["llamacpp:tokens_predicted_total"] == 24
    n_read = body["tokens_evaluated"] - body["timings"]["cache_n"]
    assert added["llamacpp:prompt_tokens_total"] == n_read
    assert after["llamacpp:predicted_tokens_seconds"] > 0
    assert after["llamacpp:requests_processing"] == 0


def test_hostile_bodies_are_refused(live: Live, tmp_path: Path) -> None:
    for asked, status in (
        ({"prompt": []}, 400),
        ({"prompt": [[]]}, 400),
        ({"prompt": {"prompt_string": 5}}, 400),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, 400),
        ({"prompt": {"prompt_string": "<__media__>a", "multimodal_data": ["eA=="]}}, 400),
        ({"prompt": [1.5]}, 400),
        ({"prompt": [10**8]}, 400),
        ({"prompt": "a", "n_probs": 10**6}, 400),
        ({"prompt": "a", "t_max_predict_ms": -5}, 400),
        ({"prompt": "a", "response_fields": [5]}, 400),
        ({"prompt": "a", "response_fields": ["/", ""], "n_predict": 1}, 200),
    ):
        assert live.post("/completion", **asked).status_code == status, asked
