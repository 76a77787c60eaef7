"""Grammars, schemas and the whole sampler set, through the engine: plain and with a draft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from ggufspec.llama.grammar import Grammar
from ggufspec.structured.json_schema import gbnf_of_schema

import ggufspec
from ggufspec.decoding import verify
from ggufspec.decoding.sampling import to_probs
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions
from ggufspec.errors import DecodeError, OptionError, PromptError
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
DATES = 'root ::= day (", " day){2}\nday ::= [0-3] [0-9] " " ("May" | "June") " 18" [0-9]{2}'


@pytest.fixture(scope="module")
def pair() -> Iterator[Engine]:
    with ggufspec.load(embedded_target(), embedded_draft(), n_ctx=512, n_threads=1) as engine:
        yield engine


@pytest.mark.parametrize("drafter", ["none", "model"])
@pytest.mark.parametrize("rule", verify.names())
def test_what_is_written_under_a_schema_is_json_that_fits(
    rule: str, drafter: str, pair: Engine
) -> None:
    for seed in range(6):
        done = pair.generate(
            "The prince is",
            json_schema=PERSON,
            verify=rule,
            drafter=drafter,
            seed=seed,
            temperature=1.2,
            max_tokens=200,
        )
        assert done.finish_reason == "stop"
        person = json.loads(done.text)
        assert set(person) <= set(PERSON["properties"])  # type: ignore[arg-type]
        assert isinstance(person["name"], str)
        assert len(person["name"]) <= 20
        assert 0 <= person["age"] <= 120
        assert set(person.get("titles", [])) <= {"prince", "count"}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 0}, {"samplers": ("top_p",)}])
def test_a_grammar_holds_with_any_sampling(options: GenerateOptions, pair: Engine) -> None:
    import re

    for seed in range(3):
        done = pair.generate("It was on", grammar=DATES, seed=seed, **options)
        day = "[0-3][0-9] (May|June) 18[0-9][0-9]"
        assert re.fullmatch(f"{day}(, {day}){{2}}", done.text)


def test_a_draft_held_to_the_grammar_is_accepted_more(pair: Engine) -> None:
    stats = pair.generate("It was on", grammar=DATES, seed=1, temperature=1.0).stats
    held = stats.notes["first_token_acceptance"]
    free = stats.notes["first_token_acceptance_without_grammar"]
    assert 0 <= free < held - 0.2 < held <= 1
    assert stats.notes["draft_temperature"] > 0


def test_greedy_text_under_a_grammar_is_that_of_plain_decoding(pair: Engine) -> None:
    options: GenerateOptions = {"temperature": 0.0, "json_schema": PERSON, "max_tokens": 100}
    plain = pair.generate("The count is", drafter="none", **options)
    assert pair.generate("The count is", **options).tokens == plain.tokens


def test_the_next_text_starts_with_a_fresh_grammar(pair: Engine) -> None:
    options: GenerateOptions = {"grammar": 'root ::= "ab" | "cd"', "seed": 0}
    assert pair.generate("A letter:", **options).text in ("ab", "cd")
    assert pair.generate("A longer prompt. A letter:", **options).text in ("ab", "cd")
    assert pair.generate("A letter:", max_tokens=3, seed=0).text not in ("ab", "cd")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"grammar": 'root ::= "a', "json_schema": None}, "grammar|string|quote"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "give one of them"),
        ({"grammar": 'root ::= "a"', "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": "{"}, "JSON"),
        ({"json_schema": {"type": "telepathy"}}, "telepathy"),
        ({"logit_bias": {99999: 1.0}}, "token 99999; the vocabulary has 4,096"),
        ({"draft_temperature": "warm"}, "draft_temperature"),
        ({"temperature": True}, "must be a number"),
        ({"n_draft": True}, "must be a whole number"),
        ({"logit_bias": {5: 1e300}}, "too large"),
        ({"top_p": 1e-60}, "too small"),
        ({"logit_bias": {-1: 1.0}}, "token ids are from 0"),
        ({"ignore_eos": "yes"}, "True or False"),
        ({"draft_temperature": None}, "draft_temperature is None; it must be a number"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ({"logit_bias": {"a": 1.0}}, "a token of logit_bias is 'a'"),
        ({"logit_bias": [(1, 2.0)]}, "must map token ids to numbers"),
        ({"samplers": "top_k"}, "must be a list of texts"),
        ({"grammar": b"root"}, "grammar is b'root'; it must be a text"),
        ({"json_schema": [1]}, "schema"),
        ({"n_draft": 2.0}, "n_draft is 2.0"),
        ({"seed": "1"}, "seed is '1'"),
        ({"stop": [1]}, "an entry of stop is 1"),
        ({"verify": None}, "verify is None"),
        ({"dry_sequence_breakers": ":"}, "dry_sequence_breakers"),
        ({"samplers": ("top_k", "xtc")}, "xtc.*no distribution"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    options: GenerateOptions, complaint: str, pair: Engine
) -> None:
    with pytest.raises(OptionError, match=complaint):
        pair.stream("The", **options)


def test_a_grammar_that_a_bias_makes_impossible_is_an_error_not_a_wrong_text(pair: Engine) -> None:
    banned = {token: float("-inf") for token in range(2, 4096) if b"b" in pair.vocab.piece(token)}
    for drafter in ("none", "model"):
        with pytest.raises(DecodeError, match="grammar"):
            pair.generate("A", grammar='root ::= "a" "b"', logit_bias=banned, drafter=drafter)


def test_a_vocabulary_without_an_end_is_refused_under_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ggufspec.load(tiny.write_llama(tmp_path / "m.gguf"), n_threads=1) as engine:
        monkeypatch.setattr(engine.vocab, "stop_tokens", frozenset())
        with pytest.raises(OptionError, match="no token that ends a text"):
            engine.generate("a", grammar='root ::= "a"')


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_repetitions_are_penalised_in_drafts_too(drafter: str, pair: Engine) -> None:
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
    done = pair.generate(prompt, drafter=drafter, **options)
    text = [*prompt, *done.tokens]
    assert len(set(text)) == len(text)
    assert done.stats.n_accepted > 20 or drafter == "none"


def test_behind_a_text_that_has_left_its_grammar_nothing_can_be_drawn(pair: Engine) -> None:
    grammar = Grammar(pair.vocab, 'root ::= "a" "b"')
    grammar.begin(1)
    (good,) = pair.vocab.tokenize("a", add_special=False, parse_special=False)
    (bad,) = pair.vocab.tokenize("z", add_special=False, parse_special=False)
    row = np.zeros((1, pair.vocab.n_tokens), np.float32)
    for options in ({}, {"top_k": 0}, {"temperature": 0.0}, {"top_k": 0, "top_p": 1, "min_p": 0}):
        sampling = replace(scoring.sampling(pair, [1], **options), grammar=grammar.native)  # type: ignore[arg-type]
        assert np.asarray(to_probs(row, sampling, [1, good])).sum() == pytest.approx(1)
        with pytest.raises(DecodeError, match="grammar"):
            to_probs(row, sampling, [1, bad])
        behind = to_probs(np.vstack([row, row]), sampling, [1], [bad])
        assert np.asarray(behind)[1].sum() == 0
        assert behind.pick(1, 0.5) == -1


@pytest.mark.parametrize("prompt", [b"Once", 5, None, {"a": 1}, ["a"], [1.5], [True]], ids=str)
def test_a_prompt_of_another_type_is_refused(prompt: object, pair: Engine) -> None:
    with pytest.raises(PromptError):
        pair.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"n_ctx": "x"}, {"n_threads": 2.5}, {"n_gpu_layers": None}, {"n_batch": 2.5}, {"draft": 5}],
)
def test_what_loads_is_checked_too(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="must be"):
        ggufspec.load(embedded_target(), **options)  # type: ignore[arg-type]


def test_an_option_that_there_is_not_is_named(pair: Engine) -> None:
    with pytest.raises(TypeError, match="there is no option heat"):
        pair.stream("The", heat=1)  # type: ignore[call-arg]


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
    first, second = (
        pair.generate("The", seed=5, max_tokens=60, draft_temperature=t) for t in ("auto", "auto")
    )
    assert first.text == second.text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 1.0, "min_p": 0.0},
        {"top_k": 100, "min_p": 0.0, "top_p": 0.5},
        {"top_k": 3, "top_p": 1.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_n_sigma": 2.0},
    ],
    ids=str,
)
def test_checking_few_tokens_keeps_the_distribution_under_a_grammar(
    options: GenerateOptions, pair: Engine
) -> None:
    """Against the same rows with -infinity wherever the grammar forbids a token."""
    prompt = pair.tokenize("It was")
    everything = list(range(pair.vocab.n_tokens))
    grammar = Grammar(pair.vocab, gbnf_of_schema(PERSON))
    grammar.begin(len(prompt))
    sampling = scoring.sampling(pair, prompt, **options)
    held = replace(sampling, grammar=grammar.native)
    done = pair.generate(prompt, json_schema=PERSON, seed=4, max_tokens=40, n_draft=3)
    text = [*prompt, *done.tokens]
    n_open = 0
    for n, (row,) in enumerate(
        scoring.logits(pair, prompt, done.tokens, whose="target"), len(prompt)
    ):
        for sharpness in (1.0, 3.0):
            logits = row[None] * np.float32(sharpness)
            allowed = grammar.allowed(text[:n], everything)
            assert allowed is not None
            masked = np.where(allowed, logits, -np.inf).astype(np.float32)
            expected = np.asarray(to_probs(masked, sampling, text[:n]))
            found = np.asarray(to_probs(logits, held, text[:n]))
            np.testing.assert_array_equal(found > 0, expected > 0)
            np.testing.assert_allclose(found, expected, atol=1e-6)
            n_open += int((found > 0).sum() > 1)
    assert n_open > 10 or options.get("temperature") == 0
