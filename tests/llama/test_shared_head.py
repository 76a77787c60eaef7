"""Gemma 4 assistants: heads that read the target's KV cache and have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import head_pairs
import numpy as np
import pytest
from head_pairs import TABLE, Contexts
from tiny_heads import SMALL, Table

import ggufspec
from ggufspec.decoding.types import Logits
from ggufspec.engine.engine import Engine
from ggufspec.errors import NoRoomError

N_CTX = 192


def loaded(folder: Path, **how: Any) -> Engine:
    pair = head_pairs.gemma4(folder, **how)
    return ggufspec.load(pair.target, pair.draft, n_ctx=N_CTX, n_slots=2, n_threads=1, tuned=False)


@pytest.fixture(scope="module", params=["hidden", "attention"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("pair")
    with loaded(folder, right=0.75, sees=request.param) as engine:
        yield engine


def prompt_of(n_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).choice(TABLE.spoken, n_tokens).tolist()


@pytest.mark.parametrize("n_draft", range(1, 9))
def test_greedy_text_is_the_targets(engine: Engine, n_draft: int) -> None:
    prompt = prompt_of(5, n_draft)
    found = engine.generate(prompt, max_tokens=80, temperature=0, n_draft=n_draft)
    assert list(found.tokens) == TABLE.greedy(prompt, 80)
    assert 0 < found.stats.n_accepted < found.stats.n_drafted


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 1.0), (1.0, 0.9)])
def test_an_exact_head_is_right(temperature: float, least: float, tmp_path: Path) -> None:
    with loaded(tmp_path) as engine:
        stats = engine.generate(
            prompt_of(40), max_tokens=60, temperature=temperature, n_draft=4, seed=1
        ).stats
    assert stats.n_drafted > 40
    assert stats.acceptance >= least


def test_a_conversation_goes_on(engine: Engine) -> None:
    text = prompt_of(30)
    for turn in range(3):
        found = engine.generate(text, max_tokens=30, temperature=0, n_draft=3)
        assert list(found.tokens) == TABLE.greedy(text, 30)
        assert found.stats.n_accepted > 0
        text = [*text, *found.tokens[: 30 - 10 * turn], *prompt_of(4, turn)]


def test_two_slots_draft_side_by_side(engine: Engine) -> None:
    prompts = [prompt_of(n, n) for n in (3, 60, 20)]
    found = engine.generate_batch(prompts, max_tokens=60, temperature=0, n_draft=4)
    assert [list(each.tokens) for each in found] == [TABLE.greedy(prompt, 60) for prompt in prompts]
    assert all(0 < each.stats.n_accepted < each.stats.n_drafted for each in found)


def test_a_text_fills_the_context(engine: Engine) -> None:
    prompt = prompt_of(N_CTX - 12)
    found = engine.generate(prompt, max_tokens=40, temperature=0, n_draft=8)
    assert list(found.tokens) == TABLE.greedy(prompt, 12)
    assert found.stats.n_accepted


def test_costs_are_measured_beside_the_targets_cells(engine: Engine) -> None:
    prompt = prompt_of(9)
    found = engine.generate(prompt, max_tokens=60, temperature=0)
    assert list(found.tokens) == TABLE.greedy(prompt, 60)


def test_a_state_that_is_missing_leaves_the_round_to_the_target(tmp_path: Path) -> None:
    text = prompt_of(20)
    with closing(Contexts(head_pairs.gemma4(tmp_path), n_ctx=64)) as contexts:
        target, head = contexts.sessions[0], contexts.head.sessions[0]
        for missing in (text[:1], text):
            with pytest.raises(NoRoomError):
                head.score(missing)
        target.score(text)
        assert head.score([*text, 40]).argmax() == TABLE.logits([*text, 40]).argmax()


def test_the_distribution_is_the_targets(tmp_path: Path) -> None:
    """Each rank of the target's likeliest tokens is drawn as often as it is probable."""
    table = Table(n_classes=2, vocab=SMALL, gap=1.0, bonus=1.0)
    prompt, n_drafted, n_accepted = table.spoken[:3].tolist(), 0, 0
    drawn, wanted, variance = np.zeros((3, len(table.vocab)))
    with loaded(tmp_path, table=table, right=0.5, noise=1.0, sees="attention") as engine:
        for seed in range(25):
            found = engine.generate(
                prompt,
                max_tokens=150,
                n_draft=3,
                seed=seed,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
            )
            n_drafted += found.stats.n_drafted
            n_accepted += found.stats.n_accepted
            for i, token in enumerate(found.tokens):
                probs = softmax(table.logits([*prompt, *found.tokens[:i]]))
                ranked = np.argsort(-probs)
                drawn[np.flatnonzero(ranked == token)] += 1
                wanted += probs[ranked]
                variance += probs[ranked] * (1 - probs[ranked])
    assert 0.2 < n_accepted / n_drafted < 0.8
    assert np.abs((drawn - wanted) / np.sqrt(variance))[wanted > 20].max() < 4.5


def softmax(logits: Logits) -> Logits:
    weights: Logits = np.exp(logits - logits.max())
    return weights / weights.sum()
