"""A session is a pure function of its tokens: earlier calls show in the time alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import takewhile
from typing import Any

import numpy as np
import plain_context
import pytest
import tiny
from head_pairs import Interrupted
from plain_context import N_VOCAB, Alone, Tokens, assert_same

from ggufspec.common import defaults
from ggufspec.decoding.types import token_array
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.context import Context
from ggufspec.llama.model import Model
from ggufspec.llama.saved_text import thin
from ggufspec.llama.session import LlamaSession

N_CTX, N_BATCH, N_ROWS = 192, 32, 9


@pytest.fixture(scope="module", params=["llama", "swa", "mamba", "hybrid", "qwen35"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    with closing(Model(plain_context.WRITERS[request.param](path))) as loaded:
        yield loaded


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


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that go to llama.cpp, as they go."""
    sizes: list[int] = []
    decode = Context.decode

    def counting(self: Context, tokens: Sequence[int], *where: int) -> None:
        sizes.append(len(tokens))
        decode(self, tokens, *where)

    monkeypatch.setattr(Context, "decode", counting)
    return sizes


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


def test_the_tokens_of_the_caller_are_left_alone(context: Context) -> None:
    session, texts = LlamaSession(context), texts_of(0)
    text, draft = texts.some(50), texts.some(4)
    before = list(text), list(draft)
    session.feed(text)
    session.score(text, draft)
    text[10:] = texts.some(40)
    session.score(text, draft)
    assert text[:10] == before[0][:10]
    assert draft == before[1]
    assert fed(session, text) == 50, "changing the list behind its back confuses no session"


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


def test_progress_rises_to_the_number_of_unread_tokens(context: Context) -> None:
    session, texts = LlamaSession(context), texts_of(0)
    text = texts.some(150)
    heard: list[tuple[int, int]] = []
    session.feed([])
    session.feed(text[:40])
    session.feed(text, lambda done, of: heard.append((done, of)))
    done = [done for done, _ in heard]
    assert len(done) > 2
    assert done == sorted(set(done))
    assert done[-1] == 110
    assert {of for _, of in heard} == {110}


def test_nothing_that_is_held_is_fed_again(context: Context, decoded: list[int]) -> None:
    session, texts = LlamaSession(context), texts_of(0)
    text = texts.some(50)
    heard: list[tuple[int, int]] = []
    session.feed(text)
    session.feed(text, lambda done, of: heard.append((done, of)))
    assert not session.prepare(text, wants_rows=False).tokens
    session.feed(text[:20])
    assert (heard, sum(decoded)) == ([], 50), "what is known is not read again"


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


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("models") / "qwen35.gguf"
    with closing(Model(tiny.write_qwen35(path))) as loaded:
        yield loaded


@pytest.fixture
def oracle_of_states(rolled_back: Model) -> Iterator[Alone]:
    with plain_context.alone(rolled_back, n_ctx=N_CTX, n_batch=N_CTX, n_rows=N_ROWS) as score:
        yield score


@pytest.mark.parametrize("n_rollback", [0, 1, 3])
def test_drafts_may_be_longer_than_what_can_be_rolled_back(
    rolled_back: Model, oracle_of_states: Alone, n_rollback: int
) -> None:
    context = make_context(rolled_back, n_rollback=n_rollback)
    session, texts = LlamaSession(context), texts_of(n_rollback)
    assert context.n_droppable == n_rollback
    for _ in range(40):
        text, draft = texts.next()
        assert_same(session.score(text, draft), oracle_of_states(text, draft))
    context.close()


def test_a_draft_that_is_rolled_back_needs_no_checkpoint(
    rolled_back: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    checkpoint = Context.checkpoint

    def counting(self: Context, sequence: int = 0) -> Any:
        saved.append(self.n_cells(sequence))
        return checkpoint(self, sequence)

    monkeypatch.setattr(Context, "checkpoint", counting)
    context = make_context(rolled_back, n_ctx=1000)
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


@pytest.mark.parametrize("n_batch", [1, 3])
def test_no_more_is_kept_than_a_batch_holds(rolled_back: Model, n_batch: int) -> None:
    context = make_context(rolled_back, n_rows=1, n_batch=n_batch, n_rollback=16)
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


# Helpers


def test_a_context_keeps_the_common_prefix(context: Context) -> None:
    pick = random.Random(0)
    for _ in range(60):
        a = [pick.randrange(3) for _ in range(pick.randrange(1, 12))]
        b = [*a[: pick.randrange(12)], *(pick.randrange(3) for _ in range(pick.randrange(6)))]
        assert context.truncate(0)
        context.decode(a, 0)
        n_most = pick.randrange(len(b) + 1)
        same = takewhile(lambda each: each[0] == each[1], zip(a, b[:n_most], strict=False))
        n = len([*same])
        kept = context.resume(token_array(b), n_most)
        most = len(a) if context.n_droppable is None else min(context.n_droppable, len(a) - 1)
        assert kept == (n if n == 0 or len(a) - n <= most else -1)
        assert context.n_cells() == n


SAVED = np.zeros(1, np.uint8)


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
