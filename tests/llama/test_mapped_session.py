"""A draft of another vocabulary as a function from the target's tokens to the target's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tiny

from ggufspec.errors import NoRoomError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.mapped_session import MappedSession
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab_map import VocabMap

N_CTX = 64
HELLO = tiny.SPM.id_of("\u2581hello")  # one token of the target, several of the draft
FEW = tiny.spm_vocab(words=tiny.WORDS[::2])
WRITERS = [tiny.write_llama, tiny.write_mamba]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with closing(Model(tiny.write_llama(tmp_path_factory.mktemp("target") / "t.gguf"))) as model:
        yield model


@pytest.fixture(scope="module", params=WRITERS, ids=lambda write: write.__name__[6:])
def draft(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("draft") / "d.gguf"
    with closing(Model(request.param(path, vocab=FEW))) as model:
        yield model


@pytest.fixture
def vocab_map(target: Model, draft: Model) -> VocabMap:
    return VocabMap(target.vocab, draft.vocab)


@pytest.fixture
def made(draft: Model) -> Iterator[Callable[[], LlamaSession]]:
    contexts: list[Context] = []

    def make() -> LlamaSession:
        contexts.append(Context(draft, ContextOptions(n_ctx=N_CTX, n_threads=1)))
        return LlamaSession(contexts[-1], drafts=True)

    yield make
    for context in contexts:
        context.close()


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def test_rows_are_those_of_the_draft_for_the_same_text(
    vocab_map: VocabMap, made: Callable[[], LlamaSession]
) -> None:
    """Also after texts that part from the last one anywhere."""
    session, alone = MappedSession(made(), vocab_map), made()
    rng = np.random.default_rng(0)
    text = [1, 40]
    for _ in range(30):
        text = text[: int(rng.integers(1, len(text) + 1))]
        text += rng.choice([HELLO, 40, 300, 2, 5, 280], int(rng.integers(0, 3))).tolist()
        del text[12:]
        read = [token for each in text for token in vocab_map.spelled(each)]
        alone.forget()
        own = alone.score(read)
        expected = vocab_map.widen(own, vocab_map.empty_rows(1))[0]
        row = session.score(text)[0]
        first = int(own[0].argmax())
        same = np.ones(len(row), bool)
        if first in vocab_map.compounds:  # whether it has looked for them or not
            same[vocab_map.compounds[first][0]] = False
            same[vocab_map.to_target[first]] = False
        np.testing.assert_allclose(row[same], expected[same], atol=0.02)
        assert session.n_common([*text, 9]) == len(text)


def test_a_token_that_the_draft_writes_in_two_has_their_probability(
    target: Model, tmp_path: Path
) -> None:
    x, i, n = map(FEW.id_of, "xin")
    path = tiny.write_scripted(tmp_path / "draft.gguf", [x, i, n], vocab=FEW, gap=5.0)
    with closing(Model(path)) as model:
        vocab_map = VocabMap(target.vocab, model.vocab)
        with closing(Context(model, ContextOptions(n_ctx=N_CTX, n_threads=1))) as context:
            inner = LlamaSession(context, drafts=True)
            inside = tiny.SPM.id_of("in")
            read = [1, *vocab_map.spelled(inside), x]
            own, ahead = (softmax(inner.score(text)[0]) for text in (read, [*read, i]))
            assert own.argmax() == i
            session = MappedSession(inner, vocab_map)
            text = [1, inside, tiny.SPM.id_of("x")]  # in it is another compound
            row = session.score(text)[0].copy()
            ratio = np.exp(row - row[tiny.SPM.id_of("y")]) * own[FEW.id_of("y")]
            np.testing.assert_allclose(ratio[inside], own[i] * ahead[n], rtol=0.02)
            here = tiny.SPM.id_of("i")
            np.testing.assert_allclose(ratio[here] + ratio[inside], own[i], rtol=0.02)
            n_held = inner.n_held
            after = session.score([*text, here]).copy()
            assert inner.n_held == n_held, "its row was kept"
            fresh = MappedSession(inner, vocab_map).score([*text, here])
            np.testing.assert_allclose(after, fresh, atol=0.02)
            without = session.score([1, tiny.SPM.id_of("x")])[0]
            assert without[inside] == -np.inf, "such a text has no compounds"


def test_rows_after_a_draft_are_those_of_longer_texts(
    vocab_map: VocabMap, made: Callable[[], LlamaSession]
) -> None:
    session, other = MappedSession(made(), vocab_map), MappedSession(made(), vocab_map)
    rows = session.score([1, 40], [HELLO, 41])
    singles = [other.score(text).copy()[0] for text in ([1, 40], [1, 40, HELLO])]
    np.testing.assert_allclose(rows[:2], singles, atol=0.02)


def test_rows_after_a_draft_take_one_pass(
    draft: Model, vocab_map: VocabMap, decoded: list[int]
) -> None:
    options = ContextOptions(n_ctx=N_CTX, n_rows=8, n_threads=1)
    with closing(Context(draft, options)) as context, closing(Context(draft, options)) as other:
        session = MappedSession(LlamaSession(context, drafts=True), vocab_map)
        alone = MappedSession(LlamaSession(other, drafts=True), vocab_map)
        drafted = [token for token in range(30, 300) if len(vocab_map.spelled(token)) == 1][:4]
        texts = [[1, 40, *drafted[:i]] for i in range(5)]
        singles = np.concatenate([alone.score(text).copy() for text in texts])
        decoded.clear()
        np.testing.assert_allclose(session.score([1, 40], drafted), singles, atol=0.02)
        assert len(decoded) == 1


def test_a_token_is_held_once_all_that_the_draft_reads_of_it_is(
    vocab_map: VocabMap, made: Callable[[], LlamaSession]
) -> None:
    inner = made()
    session = MappedSession(inner, vocab_map)
    assert session.n_common([]) == session.n_common([1, HELLO]) == 0
    session.feed([1, HELLO, 40])
    assert session.n_common([1, HELLO, 40]) == 3
    assert inner.n_held == 2 + len(vocab_map.spelled(HELLO)) > 3
    part = [token for each in (1, HELLO) for token in vocab_map.spelled(each)][:-1]
    inner.forget()
    inner.feed(part)
    assert session.n_common([1, HELLO, 40]) == 1
    session.forget()
    assert session.n_common([1]) == 0


def test_a_text_without_room_in_the_drafts_context_is_not_read(
    vocab_map: VocabMap, made: Callable[[], LlamaSession]
) -> None:
    inner = made()
    session = MappedSession(inner, vocab_map)
    n = (N_CTX - 1) // len(vocab_map.spelled(HELLO))
    assert session.score([1, *[HELLO] * n]).shape == (1, len(tiny.SPM))
    with pytest.raises(NoRoomError, match=f"the draft, whose context has {N_CTX}; use a larger"):
        session.score([1, *[HELLO] * (n + 1)])
    assert session.score([1, HELLO]).shape == (1, len(tiny.SPM)), "a shorter one is read again"
    assert session.piece([1, *[HELLO] * (n + 1)]) is None, "there is no room for a score"
    session.feed([1, *[HELLO] * (n + 1)])
    assert session.n_common([1, HELLO, HELLO]) == 2


def test_a_text_without_any_token_of_the_draft_has_logits(target: Model, tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "bpe.gguf", vocab=tiny.BPE)
    with closing(Model(path)) as model:
        found = VocabMap(target.vocab, model.vocab)
        assert found.spelled(tiny.SPM.bos) == ()
        with closing(Context(model, ContextOptions(n_ctx=N_CTX, n_threads=1))) as context:
            session = MappedSession(LlamaSession(context, drafts=True), found)
            assert np.isfinite(session.score([tiny.SPM.bos])).sum() > 200


def test_a_beginning_is_borrowed_in_tokens_of_the_target(
    target: Model, draft: Model, vocab_map: VocabMap
) -> None:
    options = ContextOptions(n_ctx=N_CTX, n_threads=1, n_sequences=2)
    with closing(Context(draft, options)) as context:
        a, b = (MappedSession(LlamaSession(context, i, drafts=True), vocab_map) for i in range(2))
        text = [1, HELLO, 40, HELLO, 41]
        a.feed(text)
        assert a.n_common(text) == 5
        assert b.n_common(text) == 0
        b.borrow(a.sequence, text[:4])
        assert b.n_common(text) == (4 if context.can_share_passes else 0)
