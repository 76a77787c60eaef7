"""Text of real models is that of llama.cpp, with and without drafts, and it comes out whole."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llama_cpp
import pytest
from real_models import FILES, Load, MakeLlama, PathOf, greedy

from ggufspec.bench.audit import AuditOptions, audit

STORY = "The old house at the end of the road had been empty for years, until"
CODE = "def fibonacci(n):\n    "
TEXTS = [
    "Grüße aus 東京! مرحبا, नमस्ते; Ωμέγα и Привет.",
    "👩‍👩‍👧‍👦 says: 1️⃣ 🏳️‍🌈 naïve café\u0301 \u200bzero\u00a0width",
    "  two spaces,\ttab\n\n\n    indented()  \r\n trailing  ",
]
GGML_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
SCHEMA = {
    "type": "object",
    "properties": {
        "date": {"type": "string", "format": "date"},
        "guests": {"type": "integer", "minimum": 1, "maximum": 20, "multipleOf": 2},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "note": {"type": ["string", "null"], "maxLength": 20},
    },
    "required": ["date", "guests", "code", "note"],
}


# As llama.cpp writes


@pytest.mark.parametrize(
    ("name", "kind", "flash_attention"),
    [
        ("smollm", "f16", "off"),
        ("smollm", "q8_0", "on"),
        ("gemma", "f16", "off"),
        ("gemma", "q4_0", "on"),
        ("qwen-draft", "f16", "on"),
        ("qwen", "f16", "off"),
    ],
)
def test_plain_text_is_that_of_llama_cpp(
    load: Load,
    llama: MakeLlama,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    flash_attention: str,
) -> None:
    monkeypatch.setenv("GGUFSPEC_KERNELS", "off")  # ours round differently
    engine = load(name, flash_attention=flash_attention, type_k=kind, type_v=kind)
    reference = llama(engine, type_k=GGML_TYPES[kind], type_v=GGML_TYPES[kind])
    for text in (STORY, CODE):
        engine.forget()
        done = engine.generate(text, temperature=0, drafter="none", max_tokens=24)
        assert len(done.tokens) == 24
        assert list(done.tokens) == greedy(reference, engine.tokenize(text), 24)


def test_a_long_prompt_is_read_as_by_llama_cpp_and_then_reused(
    load: Load, llama: MakeLlama
) -> None:
    # One batch has all of it: llama.cpp rounds batches of other sizes differently.
    engine = load("smollm", n_ctx=4096, n_batch=4096, flash_attention="on")
    notes = (f"Note {i}: the {i * 7919 % 1009} boxes are in room {i * i}.\n" for i in range(115))
    prompt = engine.tokenize("".join(notes) + "Summary: the boxes are in")
    assert 2000 < len(prompt) < 4000
    first = engine.generate(prompt, temperature=0, drafter="none", max_tokens=16)
    assert list(first.tokens) == greedy(llama(engine), prompt, 16)
    again = engine.generate([*prompt, *first.tokens], temperature=0, max_tokens=4)
    assert again.stats.n_prompt_reused >= len(prompt) + len(first.tokens) - 1


@pytest.mark.parametrize(("target", "draft"), [("qwen-draft", "smollm"), ("smollm", "gemma")])
def test_a_draft_of_another_vocabulary_reads_and_drafts_text(
    load: Load, target: str, draft: str
) -> None:
    engine = load(target, draft)
    assert engine.pair.vocab_map is not None
    assert engine.pair.draft is not None
    own, other = engine.vocab, engine.pair.draft.model.vocab
    for text in TEXTS:
        tokens = engine.tokenize(text)
        read = [there for token in tokens for there in engine.pair.vocab_map.spelled(token)]
        assert b"".join(map(other.piece, read)) == b"".join(map(own.piece, tokens))
    done = engine.generate(CODE, temperature=0, n_draft=3, max_tokens=32)
    assert done.stats.acceptance > 0.2
    report = audit(engine, [STORY, CODE], AuditOptions(n_runs=4, n_tokens=12, seed=0))
    assert report.differences == ()


def test_a_full_context_ends_the_text(load: Load) -> None:
    engine = load("smollm", "smollm", n_ctx=64)
    for drafter in ("none", "model", "ngram"):
        done = engine.generate(STORY, drafter=drafter, n_draft=5, ignore_eos=True, seed=1)
        assert done.finish_reason == "length"
        assert done.stats.n_prompt + done.stats.n_generated == 64


@pytest.mark.parametrize(
    ("target", "draft", "how"),
    [
        ("qwen", "qwen-draft", {}),
        ("smollm", "smollm", {"flash_attention": "off"}),
        ("smollm", "smollm", {"flash_attention": "on", "type_k": "q4_0", "type_v": "q4_0"}),
        ("gemma", "gemma", {"flash_attention": "on", "type_k": "q8_0", "type_v": "q8_0"}),
    ],
)
def test_drafts_leave_the_greedy_text_alone(
    load: Load, target: str, draft: str, how: dict[str, Any]
) -> None:
    engine = load(target, draft, **how)
    # A model that drafts for itself is wrong now and then, at temperature 1.
    options: Any = {"temperature": 0, "draft_temperature": float(target == draft)}
    settings = AuditOptions(n_runs=2, n_tokens=24, n_draft=3, options=options)
    report = audit(engine, [CODE, STORY], settings)
    assert not report.differences, (report.verdict, report.greedy)
    stats = engine.generate(STORY, n_draft=3, max_tokens=24, **options).stats
    assert 0 < stats.n_accepted < stats.n_drafted


# Text and tokens


@pytest.mark.parametrize("name", FILES)
def test_texts_and_special_tokens_become_the_tokens_of_llama_cpp(
    load: Load, path_of: PathOf, name: str
) -> None:
    engine = load(name)
    vocab = engine.vocab
    judge = llama_cpp.Llama(str(path_of(name)), vocab_only=True, verbose=False)
    mark = "<end_of_turn>" if name == "gemma" else "<|im_end|>"
    for text in (*TEXTS, f"user{mark}\nHi {mark}{mark}", f"< {mark[1:]}"):
        tokens = engine.tokenize(text)
        assert tokens == judge.tokenize(text.encode(), add_bos=name == "gemma", special=True)
        assert b"".join(map(vocab.piece, tokens)).decode() == text.replace(mark, "")
    judge.close()


@pytest.mark.parametrize("name", ["smollm", "gemma", "qwen-draft"])
def test_any_text_can_be_written(load: Load, name: str) -> None:
    engine = load(name, name)
    for text, drafter in zip(TEXTS, ("model", "none", "forced"), strict=True):
        options: Any = {"choices": [text], "drafter": drafter, "n_draft": 3, "seed": 1}
        chunks = [chunk.text for chunk in engine.stream("Repeat:", **options)]
        assert "".join(chunks) == text
        assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_stop_string_may_begin_and_end_inside_tokens(load: Load, drafter: str) -> None:
    engine = load("smollm", "smollm")
    options: Any = {"temperature": 0, "drafter": drafter, "n_draft": 4, "max_tokens": 24}
    whole = engine.generate(STORY, **options)
    pieces = [engine.vocab.piece(token).decode() for token in whole.tokens]
    at = next(i for i in range(8, 20) if min(map(len, pieces[i : i + 3])) >= 3)
    stop = pieces[at][-1] + pieces[at + 1] + pieces[at + 2][:2]
    done = engine.generate(STORY, stop=stop, **options)
    assert done.text == whole.text[: whole.text.index(stop)]
    assert done.finish_reason == "stop"
    assert done.tokens == whole.tokens[: len(done.tokens)]


@pytest.mark.parametrize(
    ("target", "draft", "drafter"),
    [
        ("smollm", None, "auto"),
        ("gemma", None, "auto"),
        ("gemma", "gemma", "model"),
        ("qwen", "qwen-draft", "none"),
        ("qwen", "qwen-draft", "model"),
    ],
)
def test_text_under_a_schema_is_valid(
    load: Load, target: str, draft: str | None, drafter: str
) -> None:
    engine = load(target, draft)
    prompt = "A table for my friends, please, as JSON: "
    options: Any = {"json_schema": SCHEMA, "seed": 1, "max_tokens": 128, "drafter": drafter}
    done = engine.generate(prompt, **options)
    assert done.finish_reason == "stop"
    assert (done.stats.n_drafted > 0) >= (drafter == "model")
    validator = jsonschema.Draft202012Validator
    validator(SCHEMA, format_checker=validator.FORMAT_CHECKER).validate(json.loads(done.text))
