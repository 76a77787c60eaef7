"""A draft with a draft of its own changes nothing of what the target writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.engine.calibration import settle
from ggufspec.engine.engine import Engine
from ggufspec.errors import GgufspecError, OptionError

GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
PROMPTS = (" hello world, a model", " the end of the world", "say hello", " and say hello")
STAGED: list[dict[str, Any]] = [
    {"drafter": "staged", "n_draft": 6},
    {"drafter": "staged"},
    {"drafter": "staged", "n_draft": 6, "tree": "on"},
    {"drafter": "staged", "n_draft": 6, "draft_temperature": 0.8},
    {},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target; its first layer, which agrees now and then; drafts for that one."""
    folder = tmp_path_factory.mktemp("staged")
    foreign = tiny.bpe_vocab(words=(*tiny.WORDS, " zebra", "tion"))
    return {
        "target": tiny.write_llama(folder / "target.gguf"),
        "draft": tiny.write_llama(folder / "draft.gguf", n_layer=1),
        "foreign": tiny.write_llama(folder / "foreign.gguf", n_layer=1, vocab=foreign),
    }


@pytest.fixture(params=["draft", "foreign", "n-grams", "foreign draft"])
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Engine]:
    draft, below = {
        "draft": ("draft", "draft"),
        "foreign": ("draft", "foreign"),
        "n-grams": ("draft", None),
        "foreign draft": ("foreign", "draft"),
    }[request.param]
    third = None if below is None else models[below]
    with ggufspec.load(
        models["target"], models[draft], draft_of_draft=third, n_threads=1, n_slots=2, n_ctx=512
    ) as made:
        yield made


def test_the_greedy_text_is_the_targets(engine: Engine) -> None:
    for prompt in PROMPTS[:2]:
        plain = engine.generate(prompt, **GREEDY, drafter="none")
        for options in STAGED:
            assert engine.generate(prompt, **GREEDY, **options).tokens == plain.tokens


def test_so_it_is_in_slots_and_conversations(engine: Engine) -> None:
    plain = [engine.generate(prompt, **GREEDY, drafter="none").tokens for prompt in PROMPTS]
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


def test_a_draft_that_drafts_for_itself_halves_its_passes(models: dict[str, Path]) -> None:
    n_passes = {}
    for below in (None, models["draft"]):
        with ggufspec.load(
            models["target"], models["draft"], draft_of_draft=below, n_threads=1
        ) as engine:
            assert engine.pair.draft is not None
            decode, n_decoded = engine.pair.draft.decode, 0

            def counted(*args: Any, decode: Callable[..., None] = decode) -> None:
                nonlocal n_decoded
                n_decoded += 1
                decode(*args)

            engine.pair.draft.decode = counted  # type: ignore[method-assign]
            engine.generate(PROMPTS[0], **GREEDY, n_draft=6)
            n_passes[below] = n_decoded
    assert n_passes[models["draft"]] < 0.5 * n_passes[None]


def test_what_was_drafted_for_the_draft_is_counted(models: dict[str, Path]) -> None:
    names = models["target"], models["draft"]
    with ggufspec.load(*names, draft_of_draft=models["draft"], n_threads=1) as engine:
        notes = engine.generate(PROMPTS[0], **GREEDY, **STAGED[0]).stats.notes
        assert notes["n_staged"] > 0
        assert 0.8 < notes["staged_acceptance"] <= 1
        plain = engine.generate(PROMPTS[0], **GREEDY, drafter="model").stats.notes
        assert "n_staged" not in plain


def test_processes_share_what_texts_begin_from(models: dict[str, Path]) -> None:
    names = models["target"], models["draft"]
    with ggufspec.load(*names, draft_of_draft=models["draft"], n_threads=1) as engine:
        known = settle(engine.pair)
    json.dumps(known)
    with ggufspec.load(*names, draft_of_draft=models["draft"], n_threads=1) as engine:
        settle(engine.pair, known)
        assert engine.pair.profile_of_draft.to_document() == known["of_draft"]


def test_ctrl_c_ends_the_text_and_the_engine_goes_on(models: dict[str, Path]) -> None:
    with ggufspec.load(
        models["target"], models["draft"], draft_of_draft=models["draft"], n_threads=1
    ) as engine:
        plain = engine.generate(PROMPTS[0], **GREEDY, drafter="none")

        def interrupt(what: str, done: int, of: int) -> None:
            if what == "draft of the draft":
                raise KeyboardInterrupt

        for _ in range(2):
            engine.forget()
            with pytest.raises(KeyboardInterrupt):
                engine.generate(
                    PROMPTS[0], **GREEDY, drafter="staged", n_draft=6, progress=interrupt
                )
        stream = engine.stream(PROMPTS[0], **GREEDY, drafter="staged", n_draft=6)
        next(stream)
        stream.close()
        found = engine.generate(PROMPTS[0], **GREEDY, drafter="staged", n_draft=6)
        assert found.tokens == plain.tokens


def test_what_cannot_be_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    target, draft = models["target"], models["draft"]
    with pytest.raises(OptionError, match="no draft is given"):
        ggufspec.load(target, draft_of_draft=draft)
    with pytest.raises(GgufspecError, match=r"missing\.gguf"):
        ggufspec.load(target, draft, draft_of_draft=tmp_path / "missing.gguf")
    with ggufspec.load(target) as engine:
        for n_draft in (3, "auto"):
            with pytest.raises(OptionError, match="'staged' needs a draft model"):
                engine.generate("hi", drafter="staged", n_draft=n_draft)
