"""N-grams that draft for the draft model change nothing of what the target writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError

GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
PROMPTS = (" hello world, a model", " the end of the world", "say hello", " and say hello")
STAGED: list[dict[str, Any]] = [
    {"drafter": "staged", "n_draft": 6},
    {"drafter": "staged"},
    {"drafter": "staged", "n_draft": 6, "tree": "on"},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("staged") / "target.gguf")


@pytest.fixture(scope="module", params=["draft", "foreign draft"])
def engine(request: pytest.FixtureRequest, target: Path) -> Iterator[Engine]:
    """The target with its first layer as draft, which agrees now and then."""
    words = (*tiny.WORDS, " zebra", "tion") if request.param == "foreign draft" else tiny.WORDS
    draft = target.with_name(f"{request.param}.gguf")
    tiny.write_llama(draft, n_layer=1, vocab=tiny.bpe_vocab(words=words))
    with ggufspec.load(target, draft, n_threads=1, n_slots=2, n_ctx=512) as made:
        yield made


def test_the_greedy_text_is_the_targets_in_slots_and_conversations(engine: Engine) -> None:
    plain = [engine.generate(prompt, **GREEDY, drafter="none").tokens for prompt in PROMPTS]
    for options in STAGED:
        assert engine.generate(PROMPTS[0], **GREEDY, **options).tokens == plain[0]
    found = engine.generate_batch(PROMPTS, **GREEDY, **STAGED[0])
    assert [each.tokens for each in found] == plain
    longer = [*engine.tokenize(PROMPTS[0]), *plain[0], *engine.tokenize(PROMPTS[2])[1:]]
    after = engine.generate(longer, **GREEDY, drafter="none").tokens
    assert engine.generate(longer, **GREEDY, **STAGED[0]).tokens == after


@pytest.mark.parametrize("options", STAGED)
def test_a_seed_repeats_its_text(engine: Engine, options: dict[str, Any]) -> None:
    sampled = {**GREEDY, "temperature": 1.0, "seed": 5, **options}
    first = engine.generate(PROMPTS[0], **sampled)
    engine.generate(PROMPTS[1], **sampled)
    engine.forget()
    assert engine.generate(PROMPTS[0], **sampled).tokens == first.tokens


def test_tokens_drafted_for_the_draft_are_counted(engine: Engine) -> None:
    notes = engine.generate(PROMPTS[0], **GREEDY, **STAGED[0]).stats.notes
    assert notes["n_staged"] > 0
    assert 0 < notes["staged_acceptance"] <= 1
    plain = engine.generate(PROMPTS[0], **GREEDY, drafter="model").stats.notes
    assert "n_staged" not in plain


def test_a_text_that_ends_early_leaves_nothing_behind(engine: Engine) -> None:
    plain = engine.generate(PROMPTS[0], **GREEDY, drafter="none")
    stream = engine.stream(PROMPTS[0], **GREEDY, **STAGED[0])
    next(stream)
    stream.close()
    assert engine.generate(PROMPTS[0], **GREEDY, **STAGED[0]).tokens == plain.tokens


@pytest.mark.parametrize("n_draft", [3, "auto"])
def test_without_a_draft_model_it_is_refused(target: Path, n_draft: int | str) -> None:
    with (
        ggufspec.load(target, n_threads=1) as engine,
        pytest.raises(OptionError, match="'staged' needs a draft model"),
    ):
        engine.generate("hi", drafter="staged", n_draft=n_draft)
