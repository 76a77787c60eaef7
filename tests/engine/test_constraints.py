"""Schemas, grammars, regular expressions and choices, through the engine; and the samplers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.decoding.sampling import to_probs
from ggufspec.drafting import strategies as drafters
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions
from ggufspec.errors import DecodeError, OptionError
from ggufspec.standin.embedded import embedded_draft, embedded_target

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "titles": {"type": "array", "items": {"enum": ["prince", "count"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
DAY = "[0-3][0-9] (May|June) 18[0-9][0-9]"
DAYS = f"{DAY}(, {DAY}){{2}}"
GBNF = 'root ::= day (", " day){2}\nday ::= [0-3] [0-9] " " ("May" | "June") " 18" [0-9]{2}'
LARK = 'start: day ", " day ", " day\nday: /[0-3][0-9]/ " " ("May" | "June") " 18" /[0-9]{2}/'
CHOICES = ["yes", "no", "yes, of course", 'a "b"', "é"]
# Each constraint, and what its texts match.
CONSTRAINTS: list[tuple[GenerateOptions, str]] = [
    ({"grammar": GBNF}, DAYS),
    ({"grammar": LARK}, DAYS),
    ({"regex": DAYS}, DAYS),
    ({"choices": CHOICES}, "|".join(map(re.escape, CHOICES))),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Engine]:
    # Not tuned: on a busy machine that chooses other kernels, and so other texts of a seed.
    how: Any = {"n_ctx": 512, "n_threads": 1, "tuned": False}
    with ggufspec.load(embedded_target(), embedded_draft(), **how) as engine:
        yield engine


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) <= {"name", "age", "titles"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 20
    assert 0 <= person["age"] <= 120
    assert set(person.get("titles", [])) <= {"prince", "count"}


def test_a_schema_is_a_dict_a_text_or_a_class_that_describes_itself(pair: Engine) -> None:
    person = type("Person", (), {"model_json_schema": classmethod(lambda cls: PERSON)})
    schemas: list[Any] = [PERSON, json.dumps(PERSON), person]
    how: Any = {"temperature": 1.2, "max_tokens": 200, "n_draft": 3, "seed": 1}
    texts = [pair.generate("The prince is", json_schema=schema, **how) for schema in schemas]
    assert len({done.text for done in texts}) == 1
    assert texts[0].finish_reason == "stop"
    check_person(texts[0].text)


@pytest.mark.parametrize("drafter", drafters.names())
def test_text_matches_its_constraint_with_every_strategy(drafter: str, pair: Engine) -> None:
    for constraint, pattern in CONSTRAINTS:
        how: Any = {"drafter": drafter, "temperature": 1.5, **constraint}
        texts = [pair.generate("It was on", seed=seed, **how) for seed in range(4)]
        assert all(re.fullmatch(pattern, done.text) for done in texts)
        assert {done.finish_reason for done in texts} == {"stop"}
        assert len({done.text for done in texts}) > 1


def test_an_n_gram_that_the_grammar_forbids_is_not_drafted(pair: Engine) -> None:
    """The prompt repeats itself; only the first of its words may follow, and then none."""
    done = pair.generate(
        "no yes no yes no yes no yes",
        regex=r" no( no)*\.",
        drafter="ngram",
        n_draft=8,
        seed=0,
        max_tokens=40,
    )
    assert re.match(r" no( no)*", done.text)
    assert done.stats.n_drafted > 0


@pytest.mark.parametrize("drafter", ["forced", "model"])
def test_forced_text_is_drafted_without_a_model(drafter: str, pair: Engine) -> None:
    done = pair.generate(
        "Then", choices=[" the old prince said to the count"], drafter=drafter, n_draft=8, seed=0
    )
    assert done.text == " the old prince said to the count"
    assert done.stats.n_rounds <= len(done.tokens) / 2
    assert done.stats.notes["n_forced"] >= len(done.tokens) / 2
    assert 0 < done.stats.notes["forced_acceptance"] <= 1


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_complete_text_ends_without_another_pass(drafter: str, pair: Engine) -> None:
    done = pair.generate("A letter:", choices=["ab", "cd"], drafter=drafter, temperature=0)
    assert done.finish_reason == "stop"
    assert done.stats.n_rounds <= len(done.tokens)
    for n_most in (1, len(done.tokens)):  # also where no further token would be allowed
        short = pair.generate(
            "A letter:",
            choices=["ab", "cd"],
            drafter=drafter,
            temperature=0,
            max_tokens=n_most,
        )
        is_complete = n_most == len(done.tokens)
        assert short.finish_reason == ("stop" if is_complete else "length")
        assert short.text == done.text[: len(short.text)]


@pytest.mark.parametrize(("bias", "reason"), [(100.0, "stop"), (-100.0, "length")])
def test_a_text_that_may_go_on_ends_by_the_models_choice(
    bias: float, reason: str, pair: Engine
) -> None:
    biases = dict.fromkeys(pair.vocab.stop_tokens, bias)
    done = pair.generate("It was", regex="( very)*", seed=1, max_tokens=3, logit_bias=biases)
    assert done.finish_reason == reason
    assert (done.text == "") == (reason == "stop")


def test_before_min_tokens_no_text_ends_and_nothing_else_changes(pair: Engine) -> None:
    prompt = pair.tokenize("The")
    text = pair.generate(prompt, temperature=1.0, seed=1, max_tokens=6).tokens
    ends = {*pair.vocab.stop_tokens, 77}
    banned = {token: float("-inf") for token in ends}
    rows = next(scoring.logits(pair, prompt, text, whose="target", n_together=6))
    least, first, later = (
        np.asarray(to_probs(rows, scoring.sampling(pair, prompt, **options), prompt, text[:5]))
        for options in (
            {"min_tokens": 3, "stop_tokens": [77]},
            {"logit_bias": banned},
            {},
        )
    )
    assert np.array_equal(least[:3], first[:3])
    assert np.array_equal(least[3:], later[3:])


def test_a_text_has_min_tokens_with_each_drafter(pair: Engine) -> None:
    likely = dict.fromkeys(pair.vocab.stop_tokens, 100.0)
    for drafter in drafters.names():
        options: GenerateOptions = {"logit_bias": likely, "drafter": drafter, "max_tokens": 40}
        done = pair.generate("The", min_tokens=9, temperature=1.0, **options)
        assert (len(done.tokens), done.finish_reason) == (9, "stop")
    assert pair.generate("The", **options).tokens == ()


def test_a_grammar_that_a_bias_makes_impossible_is_an_error_not_a_wrong_text(pair: Engine) -> None:
    banned = {token: float("-inf") for token in range(2, 4096) if b"b" in pair.vocab.piece(token)}
    for drafter in ("none", "model"):
        with pytest.raises(DecodeError, match="grammar"):
            pair.generate("A", grammar='root ::= "a" "b"', logit_bias=banned, drafter=drafter)
    assert pair.generate("A", grammar='root ::= "a" "b"').text == "ab"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_text_that_needs_what_no_token_has_is_an_error_not_a_complete_one(
    drafter: str, temperature: float, tmp_path: Path
) -> None:
    """Where there is a choice, the draft's may be the one that leads nowhere."""
    words = [word for word in tiny.WORDS if "o" not in word]
    vocab = tiny.bpe_vocab(words=words).with_text(tiny.BPE.id_of("o"), "oo")
    target = tiny.write_llama(tmp_path / "target.gguf", vocab=vocab)
    draft = tiny.write_llama(tmp_path / "draft.gguf", vocab=vocab, seed=1)
    ends = set()
    with ggufspec.load(target, draft, n_ctx=64, n_threads=1) as engine:
        for seed in range(20):
            text = "fails"
            with suppress(DecodeError):
                done = engine.generate(
                    "a",
                    grammar='start: "x" "o" | "y" | "z" "y"',
                    drafter=drafter,
                    seed=seed,
                    temperature=temperature,
                    top_k=0,
                )
                assert done.finish_reason == "stop"
                text = done.text
            ends.add(text)
    assert ends <= {"y", "zy", "fails"}
    assert len(ends) == 1 if temperature == 0 else len(ends) > 1


def test_a_vocabulary_without_an_end_is_refused_under_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ggufspec.load(tiny.write_llama(tmp_path / "m.gguf"), n_threads=1) as engine:
        monkeypatch.setattr(engine.vocab, "stop_tokens", frozenset())
        with pytest.raises(OptionError, match="no token that ends a text"):
            engine.generate("a", regex="a")


def test_repetitions_are_penalised_in_drafts_too(pair: Engine) -> None:
    """With every token allowed once only, none comes twice, in any round."""
    options: GenerateOptions = {
        "presence_penalty": 1000.0,
        "repeat_last_n": -1,
        "seed": 3,
        "max_tokens": 100,
        "n_draft": 8,
        "ignore_eos": True,
    }
    prompt = pair.tokenize("It was a")
    done = pair.generate(prompt, drafter="model", **options)
    text = [*prompt, *done.tokens]
    assert len(set(text)) == len(text)
    assert done.stats.n_accepted > 20


def test_numbers_of_numpy_are_numbers(pair: Engine) -> None:
    options: dict[str, object] = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(20),
        "logit_bias": {np.int32(5): np.float64(-1)},
        "seed": np.int64(1),
    }
    done = pair.generate("The", max_tokens=5, **options)  # type: ignore[arg-type]
    plain = pair.generate(
        "The", max_tokens=5, temperature=0.5, top_k=20, logit_bias={5: -1.0}, seed=1
    )
    assert done.text == plain.text


def test_the_draft_has_its_own_random_numbers(pair: Engine) -> None:
    """Another draft temperature changes nothing in what plain decoding would draw."""
    plain = pair.generate("The", seed=5, max_tokens=40, drafter="none")
    again = pair.generate("The", seed=5, max_tokens=40, drafter="none", draft_temperature=0.3)
    assert plain.text == again.text


def test_the_distributions_of_a_text_are_the_targets_renormalised(pair: Engine) -> None:
    """Of all that its constraint allows, at each position; in passes over several tokens, too."""
    prompt = pair.tokenize("It was")
    options: GenerateOptions = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    constrained = scoring.sampling(pair, prompt, json_schema=PERSON, **options)
    free = scoring.sampling(pair, prompt, **options)
    assert constrained.constraint is not None
    done = pair.generate(prompt, json_schema=PERSON, seed=4, max_tokens=40)
    text, n_open, n = [*prompt, *done.tokens], 0, len(prompt)
    for logits in scoring.logits(pair, prompt, done.tokens, whose="target", n_together=3):
        ahead = text[n : n + len(logits) - 1]
        masks = constrained.constraint.masks(text[:n], ahead)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        probs = np.asarray(to_probs(logits, free, text[:n], ahead)).astype(float)
        probs *= bits[:, : pair.vocab.n_tokens]
        found = np.asarray(to_probs(logits, constrained, text[:n], ahead))
        np.testing.assert_allclose(found, probs / probs.sum(axis=1, keepdims=True), atol=1e-5)
        n_open += int(((found > 0).sum(axis=1) > 1).sum())
        n += len(logits)
    assert n == len(text)
    assert n_open > 10


def test_a_limit_that_a_text_reaches_is_named(pair: Engine) -> None:
    stalling: GenerateOptions = {"json_schema": {"type": "string", "pattern": "(a|a)*" * 6000}}
    with pytest.raises(DecodeError, match="too many expressions"):
        pair.generate("A letter:", drafter="forced", n_draft=8, **stalling)
