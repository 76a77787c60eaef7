"""Sequences of one context: each is as if it were alone, whatever the others do.

As in test_session, caches hold 32-bit floats, so that what is right differs by rounding only.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ggufspec import _native
from ggufspec.decoding.types import Logits
from ggufspec.errors import DecodeError, OptionError, OutOfMemoryError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

WRITERS: dict[str, Callable[..., Path]] = {
    "llama": tiny.write_llama,
    "swa": tiny.write_swa,
    "moe": tiny.write_moe,
    "mamba": tiny.write_mamba,
    "hybrid": tiny.write_hybrid,
    "qwen35": tiny.write_qwen35,
}
N_CTX, N_ROWS, N_SEQUENCES = 96, 5, 3
N_VOCAB = len(tiny.SPM)
TOLERANCE = 1e-2  # see test_session

Tokens = list[int]


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    loaded = Model(WRITERS[request.param](path))
    yield loaded
    loaded.close()


def context_of(model: Model, n_sequences: int) -> Context:
    return Context(
        model,
        ContextOptions(
            N_CTX,
            n_rows=N_ROWS,
            n_sequences=n_sequences,
            n_batch=32,
            n_rollback=N_ROWS - 1,
            n_threads=1,
            flash_attention="off",
            type_k="f32",
            type_v="f32",
        ),
    )


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    made = context_of(model, N_SEQUENCES)
    yield made
    made.close()


@pytest.fixture
def alone(model: Model) -> Iterator[Callable[[Tokens, Tokens], Logits]]:
    """The logits of a context of its own."""
    made = context_of(model, 1)

    def score(tokens: Tokens, draft: Tokens) -> Logits:
        session = LlamaSession(made)
        session.forget()
        return session.score(tokens, draft).copy()

    yield score
    made.close()


def same(rows: Logits, wanted: Logits) -> bool:
    return rows.shape == wanted.shape and bool(np.abs(rows - wanted).max() < TOLERANCE)


class Writers:
    """Texts that grow, are cut, or begin anew, one for each sequence."""

    def __init__(self, seed: int) -> None:
        self._pick = random.Random(seed)
        self._beginning = self.some(12)
        self.texts = [self.some(5) for _ in range(N_SEQUENCES)]

    def some(self, n: int) -> Tokens:
        return [self._pick.randrange(3, N_VOCAB) for _ in range(n)]

    def turn(self) -> list[tuple[int, Tokens, Tokens]]:
        """(sequence, text, draft) of a few sequences."""
        pick = self._pick
        for i, text in enumerate(self.texts):
            self.texts[i] = pick.choice(
                [
                    [*text, *self.some(pick.randint(0, 6))],
                    text[: pick.randint(1, len(text))],
                    [*self._beginning[: pick.randint(1, 12)], *self.some(3)],
                ]
            )[: N_CTX - N_ROWS]
        whose = pick.sample(range(N_SEQUENCES), pick.randint(1, N_SEQUENCES))
        return [(i, self.texts[i], self.some(pick.randint(0, N_ROWS - 1))) for i in whose]


def scored_together(
    context: Context, turn: list[tuple[int, Tokens, Tokens]]
) -> list[tuple[Logits, Tokens, Tokens]]:
    sessions = [LlamaSession(context, i) for i, _, _ in turn]
    wanted = [
        session.prepare(text, draft)
        for session, (_, text, draft) in zip(sessions, turn, strict=True)
    ]
    context.decode_together(
        [
            BatchPart(session.sequence, each.tokens, each.n_rows)
            for session, each in zip(sessions, wanted, strict=True)
        ]
    )
    found, first = [], 0
    for session, each, (_, text, draft) in zip(sessions, wanted, turn, strict=True):
        found.append((session.rows_of(each, first).copy(), text, draft))
        first += len(each.tokens)
    return found


@pytest.mark.parametrize("seed", range(2))
def test_a_shared_pass_gives_the_logits_of_separate_passes(
    context: Context, alone: Callable[[Tokens, Tokens], Logits], seed: int
) -> None:
    if not context.can_share_passes:
        pytest.skip("texts share no passes of such a model")
    writers = Writers(seed)
    for _ in range(25):
        for rows, text, draft in scored_together(context, writers.turn()):
            assert same(rows, alone(text, draft))


def test_sequences_that_take_turns_do_not_disturb_each_other(
    context: Context, alone: Callable[[Tokens, Tokens], Logits]
) -> None:
    writers = Writers(7)
    sessions = [LlamaSession(context, i, drafts=i == 1) for i in range(N_SEQUENCES)]
    for _ in range(20):
        for i, text, draft in writers.turn():
            assert same(sessions[i].score(text, draft), alone(text, draft))


def test_a_pass_together_is_one_batch_and_each_sequence_holds_its_own(context: Context) -> None:
    a, b = LlamaSession(context, 0), LlamaSession(context, 1)
    context.decode_together([BatchPart(0, [5, 6, 7], 1), BatchPart(1, [5, 8], 2)])
    assert context.rows(2, 1).shape == (1, N_VOCAB)
    assert context.rows(3, 2).shape == (2, N_VOCAB)
    assert (a.n_held, b.n_held, context.n_cells(2)) == (3, 2, 0)
    assert a.n_common([5, 6, 9]) == 2
    assert b.n_common([5, 6, 9]) == 1


def test_a_borrowed_beginning_is_not_read_again(
    context: Context, alone: Callable[[Tokens, Tokens], Logits]
) -> None:
    writers = Writers(3)
    a, b = LlamaSession(context, 0), LlamaSession(context, 1)
    beginning = writers.some(20)
    a.feed([*beginning, *writers.some(5)])
    b.feed(writers.some(9))
    b.borrow(a.sequence, beginning)
    if not context.can_share_passes:
        assert b.n_held == 9, "their memory is apart"
        return
    before = context.decode_seconds
    assert not b.unread(beginning)
    b.feed(beginning)
    assert context.decode_seconds == before
    a.forget()  # what was borrowed stays
    text, draft = [*beginning, *writers.some(4)], writers.some(2)
    assert same(b.score(text, draft), alone(text, draft))


def test_a_failed_pass_leaves_no_sequence_with_tokens_that_it_does_not_hold(
    context: Context, alone: Callable[[Tokens, Tokens], Logits]
) -> None:
    if not context.can_share_passes:
        pytest.skip("texts share no passes of such a model")
    a, b = LlamaSession(context, 0), LlamaSession(context, 1)
    text = Writers(5).some(10)
    a.feed(text)
    b.feed(text[:4])
    with pytest.raises(DecodeError, match="2 sequences in one pass"):
        context.decode_together([BatchPart(0, [5], 1), BatchPart(1, [N_VOCAB + 9], 1)])
    assert (a.n_held, b.n_held) == (10, 4)
    assert same(a.score(text, [7]), alone(text, [7]))
    assert same(b.score(text[:4], [8]), alone(text[:4], [8]))


def test_which_models_share_passes(model: Model, context: Context) -> None:
    assert context.can_share_passes == model.description.startswith(("llama", "qwen3moe"))
    alone = context_of(model, 1)
    assert not alone.can_share_passes
    alone.close()


def test_batches_that_make_no_sense_are_refused(context: Context) -> None:
    for parts in (
        [],
        [BatchPart(0, [5], 1), BatchPart(0, [6], 1)],
        [BatchPart(0, [], 0)],
        [BatchPart(0, [5] * 20, 1), BatchPart(1, [5] * 20, 1)],
        [BatchPart(N_SEQUENCES, [5], 1)],
    ):
        with pytest.raises(ValueError, match=r"decode|no such sequence"):
            context.decode_together(parts)
    with pytest.raises(DecodeError, match="rows"):
        context.decode_together([BatchPart(0, [5] * 10, context.n_outputs + 1)])
    for act in (
        lambda: context.n_cells(N_SEQUENCES),
        lambda: context.truncate(0, N_SEQUENCES),
        lambda: context.n_common(array("i", [1]), N_SEQUENCES),
        lambda: context.copy_prefix(0, 0, array("i", [1])),
        lambda: context.copy_prefix(0, N_SEQUENCES, array("i", [1])),
    ):
        with pytest.raises(ValueError, match=r"own prefix|no such sequence"):
            act()
    assert [context.n_cells(i) for i in range(N_SEQUENCES)] == [0] * N_SEQUENCES


def test_a_context_has_at_least_one_sequence() -> None:
    nowhere = dict.fromkeys(
        (
            "llama_decode",
            "llama_synchronize",
            "llama_get_logits_ith",
            "llama_memory_seq_rm",
            "llama_memory_seq_cp",
            "llama_memory_seq_pos_max",
            "llama_set_abort_callback",
        ),
        1,
    )
    with pytest.raises(ValueError, match="at least one"):
        _native.Context(1, 1, 8, 0, **nowhere)


@pytest.mark.parametrize(
    ("write", "n_ctx"),
    [(tiny.write_llama, 10**8), (tiny.write_mamba, 2**31 - 1), (tiny.write_qwen35, 6 * 10**7)],
)
def test_what_is_too_much_for_all_sequences_together_names_them(
    tmp_path: Path, write: Callable[..., Path], n_ctx: int
) -> None:
    with (
        closing(Model(write(tmp_path / "model.gguf"))) as model,
        pytest.raises((OptionError, OutOfMemoryError), match="each of 64 slots"),
    ):
        Context(model, ContextOptions(n_ctx, n_sequences=64))
