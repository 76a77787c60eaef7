"""A session is a pure function of its tokens: what it did before shows only in the time it takes.

A fresh session, over memory that was just emptied, says what is right. The caches hold 32-bit
floats and attention is computed the plain way, so that the two differ by rounding only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ggufspec.common import defaults
from ggufspec.decoding.types import Logits, token_array
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.saved_text import thin
from ggufspec.llama.session import LlamaSession

WRITERS: dict[str, Callable[..., Path]] = {
    "llama": tiny.write_llama,
    "swa": tiny.write_swa,
    "moe": tiny.write_moe,
    "mamba": tiny.write_mamba,
    "hybrid": tiny.write_hybrid,
    "rwkv": tiny.write_rwkv,
    "qwen35": tiny.write_qwen35,
}
N_CTX, N_BATCH, N_ROWS = 192, 32, 9
# Logits deviate by about 3 from their mean; batches of different shapes were seen to round them
# apart by 5e-5, in one logit by 2e-3, while one token missing, doubled or misplaced moves them by
# more than 0.05.
TOLERANCE = 1e-2
N_VOCAB = len(tiny.SPM)

Tokens = list[int]


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    loaded = Model(WRITERS[request.param](path))
    yield loaded
    loaded.close()


def make_context(model: Model, **how: Any) -> Context:
    rows = {"n_rows": N_ROWS, "n_rollback": N_ROWS - 1}
    options = {"n_ctx": N_CTX, "n_batch": N_BATCH, **rows, **how}
    return Context(
        model,
        ContextOptions(n_threads=1, flash_attention="off", type_k="f32", type_v="f32", **options),
    )


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    made = make_context(model)
    yield made
    made.close()


class Oracle:
    """The logits of a new session."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __call__(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        self._context.truncate(0)
        return LlamaSession(self._context).score(tokens, draft).copy()

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def oracle(model: Model) -> Iterator[Oracle]:
    made = Oracle(make_context(model, n_batch=N_CTX))
    yield made
    made.close()


def assert_same(rows: Logits, wanted: Logits) -> None:
    assert rows.shape == wanted.shape
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=TOLERANCE)
    best = np.sort(wanted, axis=1)
    is_clear = best[:, -1] - best[:, -2] > 2 * TOLERANCE
    assert (rows.argmax(axis=1) == wanted.argmax(axis=1))[is_clear].all()


class Texts:
    """Texts that are likely to share a beginning with an earlier one, each with a draft."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.text, self.draft = self.some(20), self.some(4)
        self._earlier = [self.text]

    def some(self, n: int) -> Tokens:
        return [self.random.randrange(3, N_VOCAB) for _ in range(n)]

    def next(self) -> tuple[Tokens, Tokens]:
        pick, text = self.random, self.text
        n_accepted = pick.randint(0, len(self.draft))
        following: Callable[[], Tokens] = pick.choices(
            [
                lambda: [*text, *self.draft[:n_accepted], *self.some(1)],
                lambda: list(text),
                lambda: text[: pick.randint(1, len(text))],
                lambda: text[: pick.randint(0, len(text) - 1)] + self.some(pick.randint(1, 30)),
                lambda: list(pick.choice(self._earlier)),
                lambda: self.some(pick.choice([1, 2, N_BATCH, 150])),
            ],
            weights=[12, 1, 2, 2, 2, 1],
        )[0]
        self.text = following()[: N_CTX - N_ROWS]
        self.draft = self.some(pick.choice([0, 1, 2, 4, N_ROWS - 1]))
        self._earlier.append(self.text)
        return self.text, self.draft


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
    text = Texts(0).some(N_BATCH)
    context.decode(text, N_ROWS)
    wanted = context.rows(N_BATCH - N_ROWS, N_ROWS).copy()
    assert context.truncate(0)
    n_tokens = N_BATCH - N_ROWS + 1
    assert_same(LlamaSession(context).score(text[:n_tokens], text[n_tokens:]), wanted)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_score_is_the_same_whatever_came_before(
    context: Context, oracle: Oracle, seed: int, drafts: bool
) -> None:
    session, texts = LlamaSession(context, drafts=drafts), Texts(seed)
    for _ in range(40):
        text, draft = texts.next()
        if texts.random.random() < 0.2:
            session.feed(text[: texts.random.randint(0, len(text))])
        assert_same(session.score(text, draft), oracle(text, draft))


def test_the_default_caches_are_a_pure_function_too(model: Model) -> None:
    # 16-bit values in the cache, summed in another order: was seen to move a logit by 0.04.
    context = Context(model, ContextOptions(N_CTX, n_rows=N_ROWS, n_threads=1))
    session, texts = LlamaSession(context), Texts(5)
    scored = [(*case, session.score(*case).copy()) for case in (texts.next() for _ in range(30))]
    context.close()
    context = Context(model, ContextOptions(N_CTX, n_rows=N_ROWS, n_threads=1))
    fresh = Oracle(context)
    for text, draft, rows in scored:
        np.testing.assert_allclose(rows, fresh(text, draft), rtol=0, atol=0.2)
    context.close()


def test_the_tokens_of_the_caller_are_left_alone(context: Context) -> None:
    session, texts = LlamaSession(context), Texts(0)
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


def test_an_accepted_draft_costs_one_batch_of_what_is_new(
    context: Context, decoded: list[int]
) -> None:
    session, texts = LlamaSession(context), Texts(0)
    text, draft = texts.some(20), texts.some(4)
    session.score(text, draft)
    for _ in range(20):
        text += [*draft, *texts.some(1)]
        draft = texts.some(texts.random.randint(0, N_ROWS - 1))
        decoded.clear()
        session.score(text, draft)
        assert decoded == [1 + len(draft)]


def test_a_refused_draft_costs_nothing_where_a_tail_can_be_dropped(
    context: Context, decoded: list[int]
) -> None:
    if context.n_droppable == 0:
        pytest.skip("this model cannot drop a tail; its bounded cost is tested below")
    session, texts = LlamaSession(context), Texts(0)
    text, draft = texts.some(20), texts.some(5)
    session.score(text, draft)
    for n_accepted in [0, 1, 2, 3, 4, 5, 0]:
        text += [*draft[:n_accepted], *texts.some(1)]
        draft = texts.some(5)
        decoded.clear()
        session.score(text, draft)
        assert decoded == [1 + len(draft)]


def test_a_draft_session_pays_for_one_token_a_step(context: Context, decoded: list[int]) -> None:
    session, texts = LlamaSession(context, drafts=True), Texts(0)
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
    session, texts = LlamaSession(context), Texts(0)
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
    session, texts = LlamaSession(context), Texts(1)
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


@pytest.mark.parametrize("n_draft", [N_DRAFT, defaults.N_DRAFT_MAX, defaults.N_DRAFT_LIMIT])
def test_refusals_cost_a_draft_session_few_tokens(
    model: Model, decoded: list[int], n_draft: int
) -> None:
    context = make_context(model, n_ctx=1000)
    session, texts = LlamaSession(context, drafts=True), Texts(0)
    text = texts.some(300)
    session.feed(text[:-1])
    n_all = n_rounds = 0
    while len(text) < 1000 - n_draft and n_rounds < 50:
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
    assert n_rounds > 20
    assert n_all <= n_rounds * (1 + n_draft / 2)
    context.close()


# Long prompts, in pieces


@pytest.mark.parametrize("n_draft", [0, 3])
@pytest.mark.parametrize("n_tokens", [1, 2, 31, 32, 33, 35, 36, 63, 64, 65, 150])
def test_a_prompt_longer_than_a_batch_is_read_in_pieces(
    context: Context, oracle: Oracle, decoded: list[int], n_tokens: int, n_draft: int
) -> None:
    texts = Texts(n_tokens)
    text, draft = texts.some(n_tokens), texts.some(n_draft)
    rows = LlamaSession(context).score(text, draft)
    assert max(decoded) <= N_BATCH
    assert sum(decoded) == n_tokens + n_draft
    assert_same(rows, oracle(text, draft))


def test_progress_rises_to_the_number_of_unread_tokens(context: Context) -> None:
    session, texts = LlamaSession(context), Texts(0)
    text = texts.some(150)
    heard: list[tuple[int, int]] = []
    session.feed(text[:40])
    session.feed(text, lambda done, of: heard.append((done, of)))
    done = [done for done, _ in heard]
    assert len(done) > 2
    assert done == sorted(set(done))
    assert done[-1] == 110
    assert {of for _, of in heard} == {110}


def test_nothing_that_is_held_is_fed_again(
    context: Context, oracle: Oracle, decoded: list[int]
) -> None:
    session, texts = LlamaSession(context), Texts(0)
    text = texts.some(50)
    heard: list[tuple[int, int]] = []
    session.feed([])
    session.feed(text)
    session.feed(text, lambda done, of: heard.append((done, of)))
    session.feed(text[:20])
    assert (heard, sum(decoded)) == ([], 50), "what is known is not read again"
    other = text[:30] + texts.some(10)
    known = fed(session, other)
    assert known == 30 if context.model.can_drop_tail else known <= 30
    assert sum(decoded) == 50 + len(other) - known
    assert_same(session.score(other), oracle(other))


def test_feeding_ahead_leaves_one_batch_to_score(context: Context, decoded: list[int]) -> None:
    session, texts = LlamaSession(context), Texts(0)
    text, draft = texts.some(100), texts.some(3)
    session.feed(text[:-1])
    decoded.clear()
    session.score(text, draft)
    assert decoded == [4]


def test_a_slow_machine_gets_smaller_pieces(
    model: Model, oracle: Oracle, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, text = make_context(model, n_batch=96), Texts(0).some(190)
    session = LlamaSession(context)
    two_each = property(lambda self: 2.0 * len(decoded))
    with monkeypatch.context() as patch:
        patch.setattr(Context, "decode_seconds", two_each)
        session.feed(text)
    assert decoded == [96, 48, 32, 14], "Ctrl-C is heard between two pieces only"
    assert_same(session.score(text), oracle(text))
    context.close()


# Accidents


class Accidents:
    """Raises once, before or after a call to llama.cpp through the context, when armed."""

    methods = ("decode", "resume", "truncate", "checkpoint", "restore")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._wait: dict[tuple[str, str], int] = {}
        self._error: type[BaseException] = KeyboardInterrupt
        for name in self.methods:
            monkeypatch.setattr(Context, name, self._wrap(name, getattr(Context, name)))

    def arm(self, name: str, when: str, error: type[BaseException], after: int = 0) -> None:
        """The call that is `after` calls from now will fail."""
        self._wait, self._error = {(name, when): after}, error

    def disarm(self) -> None:
        self._wait.clear()

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            self._perhaps(name, "before")
            result = real(*args)
            self._perhaps(name, "after")
            return result

        return wrapped

    def _perhaps(self, name: str, when: str) -> None:
        left = self._wait.get((name, when))
        if left is None:
            return
        self._wait[name, when] = left - 1
        if left == 0:
            raise self._error


@pytest.fixture
def accidents(monkeypatch: pytest.MonkeyPatch, oracle: Oracle) -> Accidents:
    return Accidents(monkeypatch)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_accidents_one_after_another_leave_the_session_usable(
    context: Context, oracle: Oracle, accidents: Accidents, seed: int, drafts: bool
) -> None:
    session, texts = LlamaSession(context, drafts=drafts), Texts(seed)
    pick = texts.random
    n_accidents = 0
    for _ in range(50):
        text, draft = texts.next()
        accidents.arm(
            pick.choice(Accidents.methods),
            pick.choice(["before", "after"]),
            pick.choice([KeyboardInterrupt, DecodeError]),
            after=pick.choice([0, 0, 0, 1, 2]),
        )
        try:
            rows = session.score(text, draft)
        except (KeyboardInterrupt, DecodeError):
            n_accidents += 1
            if pick.random() < 0.3:
                continue
            accidents.disarm()
            if pick.random() < 0.3:  # after a stop, most likely another text
                text, draft = texts.next()
            rows = session.score(text, draft)
        accidents.disarm()
        assert_same(rows, oracle(text, draft))
    assert n_accidents > 5


def test_progress_may_break_off_the_reading(context: Context, oracle: Oracle) -> None:
    session, texts = LlamaSession(context), Texts(0)
    text = texts.some(150)

    def stop(done: int, of: int) -> None:
        if done > 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.feed(text, stop)
    assert fed(session, text) == 96, "what was read before is kept"
    assert_same(session.score(text), oracle(text))


@pytest.mark.parametrize("bad", [-1, N_VOCAB, 2**31 - 1])
def test_a_token_that_does_not_exist_is_an_error_and_then_forgotten(
    context: Context, oracle: Oracle, bad: int
) -> None:
    session, texts = LlamaSession(context), Texts(0)
    text = texts.some(40)
    session.score(text)
    with pytest.raises(DecodeError, match=r"llama\.cpp: "):
        session.score([*text, *texts.some(3)], [bad])
    with pytest.raises(DecodeError):
        session.feed([*text, bad, *texts.some(3)])
    assert_same(session.score(text, text[:2]), oracle(text, text[:2]))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_closed_context_says_so(model: Model, drafts: bool) -> None:
    text = Texts(0).some(50)
    context = make_context(model)
    fresh = LlamaSession(context, drafts=drafts)
    session = LlamaSession(context, drafts=drafts)
    session.score(text, text[:3])
    context.close()
    context.close()
    for act in (
        lambda: fresh.score(text),
        lambda: fresh.feed(text),
        lambda: session.score(text),
        lambda: session.score([*text, 5]),
        lambda: session.score([*text, *text[:3], 5], [7]),
        lambda: session.score(text[:10]),
        lambda: session.feed([*text[:10], 5]),
        lambda: context.rows(0, 1),
        lambda: context.truncate(0),
        lambda: context.checkpoint(),
    ):
        with pytest.raises(ClosedError, match="closed"):
            act()


# States that are kept for roll-back


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    loaded = Model(tiny.write_qwen35(tmp_path_factory.mktemp("models") / "qwen35.gguf"))
    yield loaded
    loaded.close()


@pytest.mark.parametrize("n_rollback", [0, 1, 3, N_ROWS - 1])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_may_be_longer_than_what_can_be_rolled_back(
    rolled_back: Model, n_rollback: int, seed: int
) -> None:
    context = make_context(rolled_back, n_rollback=n_rollback)
    oracle = Oracle(make_context(rolled_back, n_batch=N_CTX, n_rollback=0))
    session, texts = LlamaSession(context), Texts(seed)
    assert context.n_droppable == n_rollback
    for _ in range(40):
        text, draft = texts.next()
        assert_same(session.score(text, draft), oracle(text, draft))
    context.close()
    oracle.close()


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
    session, texts = LlamaSession(context), Texts(0)
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


@pytest.mark.parametrize("n_batch", [1, 2, 3, 8])
def test_no_more_is_kept_than_a_batch_holds(rolled_back: Model, n_batch: int) -> None:
    context = make_context(rolled_back, n_rows=1, n_batch=n_batch, n_rollback=16)
    assert context.n_droppable == max(n_batch - 2, 0)
    assert LlamaSession(context).score(Texts(0).some(20)).shape == (1, N_VOCAB)
    context.close()


# The width of rows


@pytest.mark.parametrize("n_draft", [0, 3])
def test_rows_are_cut_or_padded_to_the_width_that_was_asked(context: Context, n_draft: int) -> None:
    texts = Texts(0)
    text, draft = texts.some(10), texts.some(n_draft)
    rows = LlamaSession(context).score(text, draft).copy()
    for n_more in (-64, -1, 0, 1, 64, 128):
        assert context.truncate(0)
        asked = LlamaSession(context, n_vocab=N_VOCAB + n_more).score(text, draft)
        assert asked.shape == (n_draft + 1, N_VOCAB + n_more)
        assert asked.dtype == np.float32
        n_common = N_VOCAB + min(n_more, 0)
        assert np.array_equal(asked[:, :n_common], rows[:, :n_common])
        assert np.isneginf(asked[:, n_common:]).all()


# Helpers


def naive_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for ours, theirs in zip(a, b, strict=False):
        if ours != theirs:
            break
        n += 1
    return n


def test_a_context_keeps_the_common_prefix(context: Context) -> None:
    pick = random.Random(0)
    for _ in range(60):
        a = [pick.randrange(3) for _ in range(pick.randrange(1, 12))]
        b = [*a[: pick.randrange(12)], *(pick.randrange(3) for _ in range(pick.randrange(6)))]
        assert context.truncate(0)
        context.decode(a, 0)
        n_most = pick.randrange(len(b) + 1)
        n = naive_prefix(a, b[:n_most])
        kept = context.resume(token_array(b), n_most)
        most = len(a) if context.n_droppable is None else min(context.n_droppable, len(a) - 1)
        assert kept == (n if n == 0 or len(a) - n <= most else -1)
        assert context.n_cells() == n


SAVED = np.zeros(1, np.uint8)


def test_thinning_keeps_a_few_and_changes_none() -> None:
    pick = random.Random(0)
    for _ in range(500):
        n = pick.randrange(3000)
        places = sorted(pick.sample(range(n + 1), pick.randrange(min(n + 1, 80))))
        given = [(place, SAVED) for place in places]
        kept = thin(given, n)
        assert [one for one in given if one in kept] == kept
        distances = [n - place for place, _ in kept]
        doublings = [distance.bit_length() for distance in distances]
        assert len(set(doublings)) == len(doublings), "one in each doubling of the distance"
        assert all(distance < 512 for distance in distances), "far ones are of no use"
        assert thin(kept, n) == kept


@pytest.mark.parametrize("steps", [[1], [1, 2], [1, 1, 1, 5]])
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
