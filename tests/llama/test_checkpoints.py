"""Recurrent states are kept where messages end: a turn that departs there is not read anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from plain_context import models, plain_context

from ggufspec.common import defaults
from ggufspec.llama.context import Context
from ggufspec.llama.model import Model
from ggufspec.llama.saved_text import Checkpoints, thin
from ggufspec.llama.session import LlamaSession

N_CTX = 2048
SAVED = np.zeros(1, np.uint8)


model = models("mamba", "qwen35")


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with closing(context_of(model)) as made:
        yield made


def context_of(model: Model, **options: Any) -> Context:
    return plain_context(model, **{"n_ctx": N_CTX, "n_batch": 64, "n_rows": 4, **options})


def messages(model: Model, *lengths: int, seed: int = 0) -> list[int]:
    """Messages of so many tokens, each with its end."""
    pick, (end, *_) = random.Random(seed), model.vocab.stop_tokens
    others = [token for token in range(3, model.vocab.n_tokens) if token != end]
    return [token for n in lengths for token in [*pick.choices(others, k=n - 1), end]]


def n_read(session: LlamaSession, text: list[int]) -> int:
    n = len(session.unread(text))
    session.feed(text)
    return n


def test_a_turn_without_the_earlier_reasoning_reads_only_what_is_new(
    context: Context, model: Model
) -> None:
    session = LlamaSession(context)
    question = messages(model, 300, 400)
    header, reasoning, answer = ([*messages(model, n, seed=n)[:-1]] for n in (4, 500, 30))
    session.feed([*question, *header])
    for i in range(0, len(reasoning), 4):  # longer than any distance that is kept without marks
        session.score([*question, *header, *reasoning[: i + 1]], reasoning[i + 1 : i + 3])
    later = [*question, *header, *answer, *messages(model, 1, 50)]
    assert n_read(session, later) <= len(later) - len(question)
    fresh = context_of(model)
    wanted = LlamaSession(fresh).score(later).copy()
    np.testing.assert_allclose(session.score(later), wanted, atol=1e-2)
    fresh.close()


def test_only_the_last_ends_are_kept_and_none_where_none_is_wanted(model: Model) -> None:
    for n_kept in (0, 2):
        context = context_of(model, n_checkpoints=n_kept)
        session, text = LlamaSession(context), messages(model, *[70] * 10)
        session.feed([*text, 5])
        for n_back in (1, 2, 3):
            departed = [*text[: -70 * (n_back - 1) or None], 6, 7]
            wanted = 2 if n_back <= n_kept else len(departed)
            session = LlamaSession(context)
            session.forget()
            session.feed([*text, 5])
            assert n_read(session, departed) == wanted, (n_kept, n_back)
        context.close()


def test_ends_that_are_marked_stay_through_later_turns(context: Context, model: Model) -> None:
    session, text = LlamaSession(context), messages(model, 100)
    for turn in range(4):
        text = [*text, *messages(model, 120, seed=turn)]
        assert n_read(session, text) == 120 + (100 if turn == 0 else 0)
        session.score([*text, 5], [6, 7])
        session.score([*text, 5, 6, 8], [6, 7])


def test_restored_checkpoints_are_kept_as_marked_ones(context: Context) -> None:
    session = LlamaSession(context)
    session.feed(list(range(3, 100)))
    checkpoints = Checkpoints(context, 0)
    checkpoints.take([(20, SAVED), (40, SAVED)])
    checkpoints.save()
    assert [n for n, _ in checkpoints.saved] == [20, 40, 97]
    checkpoints.drop_after(39)
    assert [n for n, _ in checkpoints.saved] == [20]
    assert checkpoints.last == 20
    places = [(n, SAVED) for n in (5, 6, 7, 1000, 1001, 1990)]
    assert [n for n, _ in thin(places, 2000, [6, 1001])] == [6, 1001, 1990]


@pytest.mark.parametrize("steps", [[1], [1, 1, 1, 5]])
def test_thinning_keeps_one_within_reach_of_any_draft(steps: list[int]) -> None:
    pick = random.Random(0)
    n, checkpoints = 1, [(1, SAVED)]
    while n < 1000:
        n += pick.choice(steps)
        checkpoints = thin([*checkpoints, (n, SAVED)], n)
        for back in range(min(n, defaults.N_DRAFT_LIMIT)):
            distances = [n - place for place, _ in checkpoints if place <= n - back]
            assert distances, f"none is {back} back"
            assert min(distances) <= 8 * (back + 1)
        distances = [n - place for place, _ in checkpoints]
        doublings = {distance.bit_length() for distance in distances}
        assert len(doublings) == len(distances), "one in each doubling of the distance"
        assert max(distances) < 256, "far ones are of no use"
