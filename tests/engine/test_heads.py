"""Engines whose draft is a head write what their targets would, faster where the head is right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import head_pairs
import pytest
import tiny
import tiny_heads
from head_pairs import MARKED, Interrupted, Pair
from patience import ctrl_c_in_a_batch

import ggufspec
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.errors import ModelError, OptionError, VocabError
from ggufspec.llama import hidden_states

GREEDY: Any = {"temperature": 0.0, "drafter": "model", "ignore_eos": True}
PLAIN: Any = {"temperature": 0.0, "drafter": "none", "ignore_eos": True}
SHORT = [40, 77, 90]
LONG = [40 + 7 * i % 200 for i in range(45)]


def load(pair: Pair, **options: Any) -> Engine:
    how = {"n_ctx": 192, "n_batch": 20, "n_threads": 1, "tuned": False, **options}
    return ggufspec.load(pair.target, draft=pair.draft, **how)


@pytest.fixture(scope="module", params=head_pairs.WRITERS)
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A head whose likeliest token is always the target's, if it has that token."""
    return head_pairs.WRITERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(right: Pair) -> Iterator[Engine]:
    with load(right, n_slots=2) as loaded:
        yield loaded


def test_a_head_is_not_staged(engine: Engine) -> None:
    for n_draft in (3, "auto"):
        with pytest.raises(OptionError, match="a draft model that is no head"):
            engine.generate(SHORT, drafter="staged", n_draft=n_draft)


# A head that is right


def assert_right(pair: Pair, written: ggufspec.Completion, prompt: list[int]) -> None:
    tokens, stats = list(written.tokens), written.stats
    assert tokens == pair.table.greedy(prompt, len(tokens))
    assert stats.n_drafted > 0
    if pair.head.n_kept is None:
        assert stats.n_accepted == stats.n_drafted
        needs_two = pair.draft != "mtp" and len(prompt) == 1
        assert stats.n_rounds_without_draft <= 1 + needs_two  # the last has no room


def test_all_that_a_right_head_drafts_is_accepted(right: Pair, engine: Engine) -> None:
    for prompt in (SHORT, LONG):
        for n_draft in (1, 5, 16):
            written = engine.generate(prompt, n_draft=n_draft, max_tokens=40, **GREEDY)
            assert_right(right, written, prompt)
    prompts = [SHORT, LONG, LONG, [*LONG[:30], 5], [*SHORT, 8]]
    engine.forget()
    texts = engine.generate_batch(prompts, n_draft=4, max_tokens=24, **GREEDY)
    for written, prompt in zip(texts, prompts, strict=True):
        assert_right(right, written, prompt)
    alone = engine.generate([40], n_draft=3, max_tokens=20, **GREEDY)
    assert alone.tokens == engine.generate([40], max_tokens=20, **PLAIN).tokens


def test_so_it_is_in_later_turns(right: Pair, engine: Engine) -> None:
    prompt = SHORT
    for n_new in (4, 30, 1, 2, 30):
        written = engine.generate(prompt, n_draft=5, max_tokens=8, **GREEDY)
        assert_right(right, written, prompt)
        prompt = [*prompt, *written.tokens, *LONG[:n_new]]
    for cut in (len(prompt) // 2, 3, len(prompt)):
        prompt = prompt[:cut]
        assert_right(right, engine.generate(prompt, n_draft=5, max_tokens=8, **GREEDY), prompt)


def test_so_it_is_after_other_texts_in_the_same_engine(right: Pair, engine: Engine) -> None:
    others: list[dict[str, Any]] = [
        {"drafter": "none"},
        {"drafter": "ngram"},
        {"drafter": "auto", "seed": 3, "temperature": 0.7},  # measures the pair
    ]
    for other in others:
        engine.generate([*LONG, *SHORT], **{"max_tokens": 90, **GREEDY, **other})
        assert_right(right, engine.generate(LONG, n_draft=5, max_tokens=20, **GREEDY), LONG)


def test_so_it_is_to_the_end_of_the_context(right: Pair) -> None:
    with load(right, n_ctx=64) as engine:
        written = engine.generate(LONG, n_draft=7, **GREEDY)
        assert len(written.tokens) == 64 - len(LONG)
        assert_right(right, written, LONG)


@pytest.mark.parametrize("kind", ["sidecar", "eagle3_d2t", "gemma4", "dflash2"])
def test_so_it_is_with_padding_that_only_the_head_has(kind: str, tmp_path: Path) -> None:
    pair = head_pairs.WRITERS[kind](tmp_path)
    vocab = pair.table.vocab
    padded = replace(pair.table, vocab=vocab.with_size(len(vocab) + 20))
    (tmp_path / "padded").mkdir()
    draft = head_pairs.WRITERS[kind](tmp_path / "padded", padded).draft
    with load(pair._replace(draft=draft)) as engine:
        written = engine.generate(LONG, n_draft=3, max_tokens=20, **GREEDY)
        drawn = engine.generate(LONG, n_draft=3, max_tokens=20, **{**GREEDY, "temperature": 1.0})
    assert list(written.tokens) == pair.table.greedy(LONG, 20)
    assert written.stats.n_drafted > 0
    assert drawn.stats.n_drafted > 0


# Heads that are right for a share


@pytest.mark.parametrize("kind", ["glm4moe", "eagle3_d2t", "gemma4", "dflash_d2t", "dflash2"])
def test_greedy_text_is_that_of_the_target(kind: str, tmp_path: Path) -> None:
    pair = head_pairs.WRITERS[kind](tmp_path, right=0.6, noise=0.3)
    with load(pair) as engine:
        found = [
            engine.generate(LONG, n_draft=n_draft, max_tokens=40, **GREEDY) for n_draft in (2, 8)
        ]
    assert all(list(each.tokens) == pair.table.greedy(LONG, 40) for each in found)
    n_drafted, n_accepted = (
        sum(getattr(each.stats, name) for each in found) for name in ("n_drafted", "n_accepted")
    )
    assert 0 < n_accepted < n_drafted


def test_a_recurrent_state_has_no_rejected_tokens(tmp_path: Path) -> None:
    """Drafts are longer than the states that are kept, or shorter."""
    pair = head_pairs.qwen35(tmp_path, MARKED, right=0.6)
    for n_draft_max in (2, 16):
        with load(pair, n_draft_max=n_draft_max) as engine:
            wanted = MARKED.greedy(LONG, 60)
            written = engine.generate(LONG, n_draft=n_draft_max, max_tokens=60, **GREEDY)
            assert list(written.tokens) == wanted
            assert written.stats.n_accepted < written.stats.n_drafted


# Ctrl-C, closing, and errors


@pytest.mark.parametrize("kind", ["glm4moe", "eagle3", "dflash2"])
def test_after_ctrl_c_at_any_moment_the_head_is_right(kind: str, tmp_path: Path) -> None:
    pair = head_pairs.WRITERS[kind](tmp_path)
    text: Any = {"n_draft": 2, "max_tokens": 5, **GREEDY}
    with load(pair) as engine:
        for at in count(1, 37):
            interrupted = Interrupted(at)
            sys.setprofile(interrupted)
            try:
                with suppress(KeyboardInterrupt):
                    engine.generate(LONG[:25], **text)
            finally:
                sys.setprofile(None)
            assert_right(pair, engine.generate(LONG[:25], **text), LONG[:25])
            assert_right(pair, engine.generate(LONG[:23], **text), LONG[:23])
            if interrupted.is_late:
                break
        assert at > 300


def test_ctrl_c_ends_a_prompt_that_takes_long(tmp_path: Path) -> None:
    pair, n = head_pairs.glm4moe(tmp_path), 9_000
    with load(pair, n_ctx=n + 200, n_batch=n) as engine:
        with ctrl_c_in_a_batch():
            engine.generate([*LONG, *[50] * n], max_tokens=2, **GREEDY)
        assert_right(pair, engine.generate(LONG, n_draft=4, max_tokens=20, **GREEDY), LONG)


def test_what_fits_no_head_is_refused(tmp_path: Path) -> None:
    glm, eagle3 = head_pairs.sidecar(tmp_path), head_pairs.eagle3(tmp_path)
    other = tiny.SPM.with_text(300, "other")
    wider = tiny_heads.Table(vocab=tiny.SPM.with_size(len(tiny.SPM) + 100))
    other_words = tiny_heads.write_eagle3(
        tmp_path / "words.gguf", tiny_heads.Head(table=tiny_heads.Table(vocab=other))
    )
    other_width = tiny_heads.write_eagle3(tmp_path / "width.gguf", tiny_heads.Head(table=wider))
    cases: list[tuple[Path, Any, type[Exception], str]] = [
        (glm.target, "mtp", ModelError, "has no MTP head"),
        (eagle3.target, "mtp", ModelError, "has no MTP head"),
        (glm.target, eagle3.draft, ModelError, "does not give for the architecture glm4moe"),
        (eagle3.target, glm.draft, ModelError, "architecture"),
        (eagle3.target, other_words, VocabError, "another vocabulary"),
        (eagle3.target, other_width, ModelError, "width"),
        (Path(eagle3.draft), None, ModelError, "not a model"),
        (Path(glm.draft), None, ModelError, "not a model"),
        (Path(glm.draft), glm.target, ModelError, "not a model"),
    ]
    for target, draft, error, match in cases:
        with pytest.raises(error, match=match):
            ggufspec.load(target, draft=draft, n_ctx=64, n_threads=1)


def test_a_llama_cpp_without_the_functions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = head_pairs.glm4moe(tmp_path)
    monkeypatch.setattr(hidden_states, "library", object)
    with pytest.raises(
        ModelError, match=r"has no function llama_\w+nextn, which draft heads"
    ) as caught:
        load(pair)
    assert "install 0.3.36" in str(caught.value)
    with ggufspec.load(pair.target, n_ctx=64, n_threads=1) as engine:
        assert engine.generate(SHORT, max_tokens=3, **PLAIN).tokens


def test_logits_of_a_head_for_a_given_text(right: Pair, engine: Engine) -> None:
    for _ in range(2):
        rows = [
            row for piece in scoring.logits(engine, LONG, LONG[:5], whose="draft") for row in piece
        ]
        for i, row in enumerate(rows):
            text = [*LONG, *LONG[:i]]
            assert row.argmax() == right.logits(text).argmax()
    with pytest.raises(OptionError, match="writes no text without its target"):
        scoring.draft_alone(engine)
