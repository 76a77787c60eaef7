"""A draft's cache that is smaller than its texts holds their first and their newest tokens."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
from plain_context import N_VOCAB, assert_same, models, plain_context

from ggufspec.errors import OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import N_FIRST
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

# llama.cpp's caches have a multiple of 256 cells: these sequences have no more than they may use.
N_KEPT, N_SEQUENCES = 64, 4
N_ROWS = 5


model = models("llama", "swa")


def context_of(model: Model, **how: Any) -> Context:
    return plain_context(model, **{"n_ctx": 1024, "n_rows": N_ROWS, "n_batch": 32, **how})


@pytest.fixture
def short(model: Model) -> Iterator[Context]:
    with closing(context_of(model, n_kept=N_KEPT, n_sequences=N_SEQUENCES)) as made:
        yield made


@pytest.fixture
def session(short: Context) -> LlamaSession:
    return LlamaSession(short, drafts=True)


@pytest.fixture
def whole(model: Model) -> Iterator[LlamaSession]:
    with closing(context_of(model)) as made:
        yield LlamaSession(made, drafts=True)


def some(n: int, seed: int = 0) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(3, N_VOCAB) for _ in range(n)]


def test_texts_that_have_room_are_read_whole(session: LlamaSession, whole: LlamaSession) -> None:
    text = some(N_KEPT - 3)
    for n, draft in [(20, [7]), (len(text), [7, 8, 9]), (40, []), (41, [9, 8])]:
        assert_same(session.score(text[:n], draft), whole.score(text[:n], draft))


@pytest.mark.parametrize("n", [N_KEPT + 2, 10 * N_KEPT + 7])
def test_of_a_long_prompt_the_first_and_the_newest_tokens_are_read(
    session: LlamaSession, whole: LlamaSession, n: int
) -> None:
    text = some(n)
    session.feed(text[:-1])
    assert session.n_held <= N_KEPT
    assert session.n_common(text) == n - 1
    n_newest = session.n_held - N_FIRST
    assert n_newest > N_KEPT / 2
    read = [*text[:N_FIRST], *text[-1 - n_newest :]]
    assert_same(session.score(text, [5, 6]), whole.score(read, [5, 6]))


def test_a_text_that_grows_is_never_read_again(short: Context, session: LlamaSession) -> None:
    pick, text = random.Random(1), some(10)
    session.feed(text)
    n_decoded = n_held = 0
    while len(text) < 6 * N_KEPT:
        draft = [pick.randrange(3, N_VOCAB) for _ in range(pick.randint(0, N_ROWS - 1))]
        prepared = session.prepare(text, draft)
        n_decoded = max(n_decoded, len(prepared.tokens))
        short.decode(prepared.tokens, prepared.n_rows)
        n_held = max(n_held, session.n_held)
        text += [*draft[: pick.randint(0, len(draft))], pick.randrange(3, N_VOCAB)]
    assert n_decoded <= 2 * N_ROWS
    assert N_KEPT * 3 / 4 < n_held <= N_KEPT


def test_rejected_tokens_leave_no_trace(model: Model) -> None:
    text = some(5 * N_KEPT)
    found = []
    for rejected in ([], [9, 9, 9]):
        with closing(context_of(model, n_kept=N_KEPT)) as context:
            session = LlamaSession(context, drafts=True)
            for n in range(10, len(text)):
                session.score(text[:n], text[n : n + 3])  # leaves tokens out at the same places
                session.score(text[:n], rejected)
            found.append(session.score(text).copy())
    assert_same(*found)


def test_a_text_that_goes_back_has_its_newest_tokens_read(
    session: LlamaSession, whole: LlamaSession
) -> None:
    text = some(5 * N_KEPT)
    for n in range(10, len(text), 3):
        session.score(text[:n])
    # Before the newest tokens, just behind their beginning, to other texts, and to short ones.
    others = [some(n, seed=5) for n in (2 * N_KEPT, len(text) - 30)]
    for other in (text[: 3 * N_KEPT], text[:-40], *others, text[:20], text[:2]):
        found = session.score(other).copy()
        n_newest = session.n_held - N_FIRST
        assert n_newest > N_KEPT / 2 or session.n_held == len(other)
        read = other if session.n_held == len(other) else [*other[:N_FIRST], *other[-n_newest:]]
        assert_same(found, whole.score(read))
        for n in range(10, len(text), 7):
            session.score(text[:n])


def test_a_text_goes_on_at_once_where_its_newest_tokens_are_held(session: LlamaSession) -> None:
    text = some(4 * N_KEPT)
    for n in range(10, len(text)):
        session.score(text[:n])
    prepared = session.prepare([*text[:-5], 7, 8])
    assert len(prepared.tokens) <= 3 + 5


@pytest.mark.parametrize("n", [20, 3 * N_KEPT])
def test_a_sequence_borrows_what_another_holds(model: Model, n: int) -> None:
    text, others = some(n), [some(2 * N_KEPT, seed=i) for i in (1, 2)]
    with closing(context_of(model, n_kept=N_KEPT, n_sequences=2)) as context:
        lender, borrower = (LlamaSession(context, i, drafts=True) for i in range(2))
        borrower.feed(others[0])
        for k in range(10, n + 1):
            lender.score(text[:k])
        wanted = lender.score(text, [5]).copy()
        borrower.borrow(0, [*text, *others[1]])
        if not context.can_share_passes:  # sliding windows
            return
        assert borrower.n_common(text) == n
        lender.forget()
        assert_same(borrower.score(text, [5]), wanted)
        # Only the first tokens are the same.
        lender.borrow(1, [*text[:2], *others[1]])
        assert lender.n_common(text) == lender.n_held == 2


def test_what_is_lost_while_a_prompt_is_read_is_read_again(
    short: Context, session: LlamaSession, whole: LlamaSession
) -> None:
    text = some(3 * N_KEPT)
    piece = session.piece(text[:-1], 2)
    assert piece is not None
    short.decode(piece.tokens, 0)
    short.truncate(0)
    session.feed(text[:-1])
    n_newest = session.n_held - N_FIRST
    read = [*text[:N_FIRST], *text[-1 - n_newest :]]
    assert_same(session.score(text), whole.score(read))


def test_what_leaves_out_no_tokens_is_refused(tmp_path: Path) -> None:
    for write in (tiny.write_mamba, tiny.write_hybrid):
        with (
            closing(Model(write(tmp_path / "model.gguf"))) as model,
            pytest.raises(OptionError, match=r"recurrent layers.*\(n_ctx_draft, -cd\)"),
        ):
            context_of(model, n_kept=N_KEPT)


def test_a_cache_without_room_for_drafts_is_refused(model: Model) -> None:
    with pytest.raises(OptionError, match="too small for drafts of 5: use at least 18"):
        context_of(model, n_kept=17)
    with closing(context_of(model, n_kept=18, n_sequences=N_SEQUENCES)) as context:
        sessions = [LlamaSession(context, i, drafts=True) for i in range(N_SEQUENCES)]
        texts = [some(100, seed=i) for i in range(N_SEQUENCES)]
        for n in range(1, 100):
            for session, text in zip(sessions, texts, strict=True):
                session.score(text[:n], text[n : n + N_ROWS - 1])
                assert session.n_held <= 18, "all sequences have room"


def test_only_a_middle_can_be_dropped(short: Context) -> None:
    short.decode(array("i", some(20)), 1)
    with pytest.raises(ValueError, match="drop_middle"):
        short.native.drop_middle(4, 16)
    short.native.drop_middle(4, 10)
    assert short.n_cells() == 10
    with pytest.raises(ValueError, match="drop_middle"):
        short.native.drop_middle(3, 2)
    short.truncate(4)
    short.decode(array("i", some(20)), 1)
    short.native.drop_middle(3, 2)
