"""A session is a pure function of its tokens: earlier calls show in the time alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np
import plain_context
import pytest
from head_pairs import Interrupted
from plain_context import N_VOCAB, Alone, Tokens, assert_same

from ggufspec.common import defaults
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.context import Context
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

N_CTX, N_BATCH, N_ROWS = 192, 32, 9


model = plain_context.models("llama", "swa", "mamba", "hybrid", "qwen35")


def make_context(model: Model, **how: Any) -> Context:
    rows = {"n_rows": N_ROWS, "n_rollback": N_ROWS - 1}
    return plain_context.plain_context(model, **{"n_ctx": N_CTX, "n_batch": N_BATCH, **rows, **how})


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with closing(make_context(model)) as made:
        yield made


@pytest.fixture
def oracle(model: Model) -> Iterator[Alone]:
    with plain_context.alone(model, n_ctx=N_CTX, n_batch=N_CTX, n_rows=N_ROWS) as score:
        yield score


def texts_of(seed: int) -> plain_context.Texts:
    return plain_context.Texts(seed, N_CTX, N_ROWS)


def fed(session: LlamaSession, text: Sequence[int]) -> int:
    """Feeds a text; returns how many of its tokens were held already."""
    n_known = len(text) - len(session.unread(text))
    session.feed(text)
    return n_known


# A pure function


def test_a_fresh_score_is_what_llama_cpp_says_to_one_batch(context: Context) -> None:
    text = texts_of(0).some(N_BATCH)
    context.decode(text, N_ROWS)
    wanted = context.rows(N_BATCH - N_ROWS, N_ROWS).copy()
    assert context.truncate(0)
    n_tokens = N_BATCH - N_ROWS + 1
    assert_same(LlamaSession(context).score(text[:n_tokens], text[n_tokens:]), wanted)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_score_is_the_same_whatever_came_before(
    context: Context, oracle: Alone, drafts: bool
) -> None:
    session, texts = LlamaSession(context, drafts=drafts), texts_of(drafts)
    for _ in range(40):
        text, draft = texts.next()
        if texts.random.random() < 0.2:
            session.feed(text[: texts.random.randint(0, len(text))])
        assert_same(session.score(text, draft), oracle(text, draft))


# A memo: nothing is evaluated twice


def test_a_draft_costs_one_batch_of_what_is_new(context: Context, decoded: list[int]) -> None:
    """Also a rejected one, where a tail can be dropped."""
    session, texts = LlamaSession(context), texts_of(0)
    text, draft = texts.some(20), texts.some(5)
    session.score(text, draft)
    for n_accepted in (5, 4, 3, 2, 1, 0, 5, 0):
        if context.n_droppable == 0:
            n_accepted = 5
        text += [*draft[:n_accepted], *texts.some(1)]
        draft = texts.some(5)
        decoded.clear()
        session.score(text, draft)
        assert decoded == [1 + len(draft)]


def test_a_draft_session_pays_for_one_token_a_step(context: Context, decoded: list[int]) -> None:
    session, texts = LlamaSession(context, drafts=True), texts_of(0)
    text = texts.some(20)
    session.score(text)
    for _ in range(15):
        decoded.clear()
        text += texts.some(2)  # the last one drafted, which nobody scored, and the target's own
        session.score(text)
        assert decoded == [2]
        for _ in range(3):
            text += texts.some(1)
            session.score(text)
        assert decoded == [2, 1, 1, 1]


def test_one_text_after_another_pays_for_what_differs(context: Context, decoded: list[int]) -> None:
    if not context.model.can_drop_tail:
        pytest.skip("this model cannot drop a tail")
    session, texts = LlamaSession(context), texts_of(0)
    text = texts.some(150)
    session.score(text)
    for n_shared in (149, 100, 99, 1):
        text = text[:n_shared] + texts.some(8)
        decoded.clear()
        session.score(text)
        assert decoded == [8]
    decoded.clear()
    session.score(text)
    session.score(text[:5])
    assert decoded == [1, 1], "a row is only to be had by a token's evaluation"


N_DRAFT = 4


def test_refusals_cost_a_target_session_few_tokens(context: Context, decoded: list[int]) -> None:
    session, texts = LlamaSession(context), texts_of(1)
    text = texts.some(60)
    session.feed(text[:-1])
    decoded.clear()
    while len(text) < N_CTX - 2 * N_DRAFT:
        draft = texts.some(N_DRAFT)
        before = sum(decoded)
        session.score(text, draft)
        n_repeated = sum(decoded) - before - (1 + N_DRAFT)
        assert n_repeated <= 25, f"at {len(text)} tokens"
        text += [*draft[: texts.random.choice([0, 0, 0, 1, 2, N_DRAFT])], *texts.some(1)]


def test_refusals_cost_a_draft_session_few_tokens(model: Model, decoded: list[int]) -> None:
    n_draft = defaults.N_DRAFT_LIMIT
    context = make_context(model, n_ctx=1000)
    session, texts = LlamaSession(context, drafts=True), texts_of(0)
    text = texts.some(300)
    session.feed(text[:-1])
    n_all = n_rounds = 0
    while len(text) < 1000 - n_draft and n_rounds < 25:
        draft: Tokens = []
        decoded.clear()
        while len(draft) < n_draft:
            session.score(text + draft)
            draft += texts.some(1)
        n_repeated = sum(decoded) - n_draft
        assert n_repeated <= 4 * n_draft, f"at {len(text)} tokens"
        n_all, n_rounds = n_all + n_repeated, n_rounds + 1
        n_accepted = texts.random.choice([0, 0, 1, 2, texts.random.randint(0, n_draft), n_draft])
        text += [*draft[:n_accepted], *texts.some(1)]
    assert n_rounds > 10
    assert n_all <= n_rounds * (1 + n_draft / 2)
    context.close()


# Long prompts, in pieces


def test_a_prompt_longer_than_a_batch_is_read_in_pieces(
    context: Context, oracle: Alone, decoded: list[int]
) -> None:
    session, texts = LlamaSession(context), texts_of(1)
    for n_tokens, n_draft in ((1, 0), (31, 3), (32, 0), (33, 3), (64, 3), (150, 0)):
        text, draft = texts.some(n_tokens), texts.some(n_draft)
        session.forget()
        decoded.clear()
        rows = session.score(text, draft)
        assert max(decoded) <= N_BATCH
        assert sum(decoded) == n_tokens + n_draft
        assert_same(rows, oracle(text, draft))


def test_progress_rises_to_the_number_of_unread_tokens(
    context: Context, decoded: list[int]
) -> None:
    session, texts = LlamaSession(context), texts_of(0)
    text = texts.some(150)
    heard: list[tuple[int, int]] = []
    session.feed([])
    session.feed(text[:40])
    for _ in range(2):  # what is known is not read again
        session.feed(text, lambda done, of: heard.append((done, of)))
    assert not session.prepare(text, wants_rows=False).tokens
    assert len(heard) == len(set(heard)) > 2
    assert heard == sorted(heard)
    assert (heard[-1], {of for _, of in heard}) == ((110, 110), {110})
    session.feed(text[:20])
    assert sum(decoded) == 150


def test_a_slow_machine_gets_smaller_pieces(
    model: Model, oracle: Alone, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, text = make_context(model, n_batch=96), texts_of(0).some(190)
    session = LlamaSession(context)
    two_each = property(lambda self: 2.0 * len(decoded))
    with monkeypatch.context() as patch:
        patch.setattr(Context, "decode_seconds", two_each)
        session.feed(text)
    assert decoded == [96, 48, 32, 14], "Ctrl-C is heard between two pieces only"
    assert_same(session.score(text), oracle(text))
    context.close()


def test_a_saved_text_goes_on_and_back(context: Context, oracle: Alone) -> None:
    session, texts = LlamaSession(context), texts_of(2)
    text = texts.some(90)
    session.feed(text[:-1])
    saved = session.save(text[:-1])
    assert saved is not None
    assert saved.n_usable(text) == 89
    assert saved.n_usable([*text[:30], 5]) <= 30
    assert session.n_bytes > 0 < saved.n_bytes
    for n in (90, 88, 84, 30):
        session.score(texts.some(40))
        session.restore(saved)
        draft = texts.some(2)
        assert_same(session.score(text[:n], draft), oracle(text[:n], draft))


# Accidents


@pytest.mark.parametrize("drafts", [False, True])
def test_ctrl_c_at_any_moment_leaves_the_session_usable(
    context: Context, oracle: Alone, drafts: bool
) -> None:
    session, texts = LlamaSession(context, drafts=drafts), texts_of(drafts)
    pick = texts.random
    for _ in range(50):
        text, draft = texts.next()
        sys.setprofile(Interrupted(pick.randint(1, pick.choice((20, 100)))))
        try:
            with suppress(KeyboardInterrupt):
                session.score(text, draft)
        finally:
            sys.setprofile(None)
        if pick.random() < 0.3:  # after a stop, most likely another text
            text, draft = texts.next()
        assert_same(session.score(text, draft), oracle(text, draft))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_state_that_cannot_be_copied_costs_time_only(
    context: Context, oracle: Alone, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, texts = LlamaSession(context, drafts=drafts), texts_of(drafts)
    real = Context.checkpoint

    def perhaps(self: Context, sequence: int = 0) -> Any:
        if texts.random.random() < 0.5:
            raise DecodeError("no memory")
        return real(self, sequence)

    monkeypatch.setattr(Context, "checkpoint", perhaps)
    for _ in range(20):
        text, draft = texts.next()
        assert_same(session.score(text, draft), oracle(text, draft))


def test_progress_may_break_off_the_reading(context: Context, oracle: Alone) -> None:
    session, texts = LlamaSession(context), texts_of(0)
    text = texts.some(150)

    def stop(done: int, of: int) -> None:
        if done > 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.feed(text, stop)
    assert fed(session, text) == 96, "what was read before is kept"
    assert_same(session.score(text), oracle(text))


@pytest.mark.parametrize("bad", [-1, N_VOCAB])
def test_a_token_that_does_not_exist_is_an_error_and_then_forgotten(
    context: Context, oracle: Alone, bad: int
) -> None:
    session, texts = LlamaSession(context), texts_of(0)
    text = texts.some(40)
    session.score(text)
    with pytest.raises(DecodeError, match=r"llama\.cpp: "):
        session.score([*text, *texts.some(3)], [bad])
    with pytest.raises(DecodeError) as caught:
        session.feed([*text, bad, *texts.some(3)])
    assert str(caught.value).count("failed to decode") == 1, "nothing of an earlier failure"
    assert_same(session.score(text, text[:2]), oracle(text, text[:2]))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_closed_context_says_so(model: Model, drafts: bool) -> None:
    text = texts_of(0).some(50)
    context = make_context(model)
    fresh = LlamaSession(context, drafts=drafts)
    session = LlamaSession(context, drafts=drafts)
    session.score(text, text[:3])
    context.close()
    context.close()
    for act in (
        lambda: fresh.feed(text),
        lambda: session.score(text),
        lambda: session.score([*text, *text[:3], 5], [7]),
        lambda: context.rows(0, 1),
        lambda: context.truncate(0),
        lambda: context.checkpoint(),
    ):
        with pytest.raises(ClosedError, match="closed"):
            act()


# States that are kept for roll-back


with_states = pytest.mark.parametrize("model", ["qwen35"], indirect=True)


@with_states
@pytest.mark.parametrize("n_rollback", [0, 1, 3])
def test_drafts_may_be_longer_than_what_can_be_rolled_back(
    model: Model, oracle: Alone, n_rollback: int
) -> None:
    context = make_context(model, n_rollback=n_rollback)
    session, texts = LlamaSession(context), texts_of(n_rollback)
    assert context.n_droppable == n_rollback
    for _ in range(40):
        text, draft = texts.next()
        assert_same(session.score(text, draft), oracle(text, draft))
    context.close()


@with_states
def test_a_draft_that_is_rolled_back_needs_no_checkpoint(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    checkpoint = Context.checkpoint

    def counting(self: Context, sequence: int = 0) -> Any:
        saved.append(self.n_cells(sequence))
        return checkpoint(self, sequence)

    monkeypatch.setattr(Context, "checkpoint", counting)
    context = make_context(model, n_ctx=1000)
    session, texts = LlamaSession(context), texts_of(0)
    text = texts.some(300)
    session.feed(text[:-1])
    while len(text) < 900:
        draft = texts.some(N_ROWS - 1)
        session.score(text, draft)
        text += [*draft[: texts.random.randint(0, N_ROWS - 1)], *texts.some(1)]
    assert saved[0] == 299, "the end of the prompt, for another text after it"
    assert len(saved) <= 1 + 600 // 128
    session.score(text, texts.some(N_ROWS - 1))
    assert fed(session, [*text[:-3], *texts.some(10)]) >= len(text) - 3 - 128
    context.close()


@with_states
@pytest.mark.parametrize("n_batch", [1, 3])
def test_no_more_is_kept_than_a_batch_holds(model: Model, n_batch: int) -> None:
    context = make_context(model, n_rows=1, n_batch=n_batch, n_rollback=16)
    assert context.n_droppable == max(n_batch - 2, 0)
    assert LlamaSession(context).score(texts_of(0).some(20)).shape == (1, N_VOCAB)
    context.close()


# The width of rows


def test_rows_are_cut_or_padded_to_the_width_that_was_asked(context: Context) -> None:
    texts, n_draft = texts_of(0), 3
    text, draft = texts.some(10), texts.some(n_draft)
    rows = LlamaSession(context).score(text, draft).copy()
    for n_more in (-64, 0, 128):
        assert context.truncate(0)
        asked = LlamaSession(context, n_vocab=N_VOCAB + n_more).score(text, draft)
        assert asked.shape == (n_draft + 1, N_VOCAB + n_more)
        assert asked.dtype == np.float32
        n_common = N_VOCAB + min(n_more, 0)
        assert np.array_equal(asked[:, :n_common], rows[:, :n_common])
        assert np.isneginf(asked[:, n_common:]).all()
