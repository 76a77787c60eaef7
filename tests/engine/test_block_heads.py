"""Engines whose draft predicts blocks (DFlash, DSpark, DFlash2); see also test_heads.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import head_pairs
import pytest
import tiny_blocks
import tiny_heads
from head_pairs import Pair
from tiny_blocks import SMALL_WITH_MASK, BlockHead
from tiny_heads import Table

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.stream import Stream

GREEDY: Any = {"temperature": 0.0, "drafter": "model", "ignore_eos": True}
KINDS: tuple[tiny_blocks.Kind, ...] = ("dflash", "dspark", "dflash2")
PROMPT = [3, 5, 7, 2, 9, 11, 8, 14, 20, 1, 6]


def written(folder: Path, kind: tiny_blocks.Kind, right: float, n_classes: int = 2) -> Pair:
    """More classes leave room for fewer places of a block."""
    table = Table(vocab=SMALL_WITH_MASK, n_classes=n_classes)
    head = BlockHead(
        table=table, kind=kind, block_size=14 if n_classes == 1 else 11, right=right, noise=0.3
    )
    target = tiny_heads.write_llama_table(folder / "llama.gguf", table)
    draft = tiny_blocks.write_dflash(folder / f"{kind}.gguf", head)
    return Pair(target, draft, table, head)


def load(pair: Pair, **options: Any) -> Engine:
    how = {"n_ctx": 192, "n_batch": 20, "n_threads": 1, "tuned": False, **options}
    return ggufspec.load(pair.target, draft=pair.draft, **how)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Right for 70 % of the tokens."""
    return written(tmp_path_factory.mktemp(request.param), request.param, 0.7)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with load(pair, n_slots=3) as loaded:
        yield loaded


def assert_greedy(pair: Pair, done: ggufspec.Completion, prompt: Sequence[int]) -> None:
    tokens, stats = list(done.tokens), done.stats
    assert tokens == pair.table.greedy(prompt, len(tokens))
    assert 0 < stats.n_accepted < stats.n_drafted


def test_drafts_end_with_their_block_and_are_used(pair: Pair, engine: Engine) -> None:
    assert pair.n_at_once is not None
    for n_draft in (1, 4, 16):
        done = engine.generate(PROMPT, n_draft=n_draft, max_tokens=60, **GREEDY)
        assert list(done.tokens) == pair.table.greedy(PROMPT, 60)
        assert done.stats.n_accepted > 0
        assert len(done.stats.drafted_by_position) == min(n_draft, pair.n_at_once)
        assert done.stats.n_rounds_without_draft <= 1
    for options in ({"tree": "on", "n_draft": 4}, {"drafter": "auto", "n_draft": "auto"}):
        found = engine.generate(PROMPT, **{**GREEDY, "max_tokens": 60, **options})
        assert list(found.tokens) == pair.table.greedy(PROMPT, 60)
    drawn = engine.generate(PROMPT, n_draft=4, max_tokens=60, drafter="model", seed=1)
    assert 0 < drawn.stats.n_accepted < drawn.stats.n_drafted


def test_a_second_turn_reads_what_is_new(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the target nor the draft reads a token twice."""
    with load(pair) as engine:
        context, read = engine.pair.draft, list[int]()
        assert context is not None
        decode_hidden = context.decode_hidden

        def spied(tokens: Sequence[int], *args: Any) -> None:
            read.append(len(tokens))
            decode_hidden(tokens, *args)

        monkeypatch.setattr(context, "decode_hidden", spied)
        prompt = PROMPT * 3
        for _ in range(4):
            done = engine.generate(prompt, n_draft=5, max_tokens=15, **GREEDY)
            assert_greedy(pair, done, prompt)
            assert sum(read) <= len(prompt) + 15
            assert done.stats.n_prompt_reused >= len(prompt) - 5 or prompt == PROMPT * 3
            prompt = [*prompt, *done.tokens, 4, 4, 6]


def test_log_probabilities_are_those_without_drafts(engine: Engine) -> None:
    found = []
    for drafter in ("none", "model"):
        how = {**GREEDY, "drafter": drafter, "n_draft": 4, "max_tokens": 20}
        text = engine.prepare(PROMPT, CheckedOptions.of(how), n_top=2)
        chunks = Stream(engine.scheduler, text)
        each = [entry for chunk in chunks for entry in chunk.logprobs or ()]
        found.append([entry.chosen.logprob or 0.0 for entry in each])
    assert len(found[0]) == 20
    assert found[1] == pytest.approx(found[0], abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_constrained_texts_with_n_grams_and_forced_tokens(kind: str, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}
    rules: list[dict[str, Any]] = [
        {"json_schema": {**schema, "required": ["name"]}},
        {"regex": "(some words, which are forced|others)( [a-z]{1,9}){3}"},
    ]
    with load(head_pairs.WRITERS[kind](tmp_path, right=0.7)) as engine:
        for rule in rules:
            how: Any = {"temperature": 0.0, "max_tokens": 60, **rule}
            plain = engine.generate("the", drafter="none", **how)
            for drafter in ("model", "auto", "ngram"):
                done = engine.generate("the", drafter=drafter, n_draft=4, **how)
                assert done.text == plain.text
                assert done.stats.n_drafted > 0 or drafter == "auto"
