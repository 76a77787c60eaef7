"""Sequences of one context: each is as if it were alone, whatever the others do."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import plain_context
import pytest
import tiny
from plain_context import N_VOCAB, Alone, Texts, assert_same

from ggufspec.errors import DecodeError, OptionError, OutOfMemoryError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

N_CTX, N_ROWS, N_SEQUENCES = 96, 5, 3
OPTIONS = {"n_ctx": N_CTX, "n_batch": 32, "n_rows": N_ROWS, "n_rollback": N_ROWS - 1}


model = plain_context.models("llama", "swa", "mamba", "qwen35")


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with closing(plain_context.plain_context(model, n_sequences=N_SEQUENCES, **OPTIONS)) as made:
        yield made


@pytest.fixture
def alone(model: Model) -> Iterator[Alone]:
    with plain_context.alone(model, **OPTIONS) as score:
        yield score


def test_sequences_that_take_turns_do_not_disturb_each_other(
    context: Context, alone: Alone
) -> None:
    sessions = [LlamaSession(context, i, drafts=i == 1) for i in range(N_SEQUENCES)]
    writers = [Texts(i, N_CTX, N_ROWS) for i in range(N_SEQUENCES)]
    for i in range(45):
        text, draft = writers[i % N_SEQUENCES].next()
        assert_same(sessions[i % N_SEQUENCES].score(text, draft), alone(text, draft))


def test_a_pass_together_is_one_batch_and_each_sequence_holds_its_own(context: Context) -> None:
    a, b = LlamaSession(context, 0), LlamaSession(context, 1)
    context.decode_together([BatchPart(0, [5, 6, 7], 1), BatchPart(1, [5, 8], 2)])
    assert context.rows(2, 1).shape == (1, N_VOCAB)
    assert context.rows(3, 2).shape == (2, N_VOCAB)
    assert (a.n_held, b.n_held, context.n_cells(2)) == (3, 2, 0)
    assert a.n_common([5, 6, 9]) == 2
    assert b.n_common([5, 6, 9]) == 1


def test_a_borrowed_beginning_is_not_read_again(context: Context, alone: Alone) -> None:
    texts = Texts(3, N_CTX, N_ROWS)
    a, b = LlamaSession(context, 0), LlamaSession(context, 1)
    beginning = texts.some(20)
    a.feed([*beginning, *texts.some(5)])
    b.feed(texts.some(9))
    b.borrow(a.sequence, beginning)
    is_unified = context.model.description.startswith("llama") and not context.model.has_windows
    assert context.can_share_passes == is_unified
    if not is_unified:
        assert b.n_held == 9, "their memory is apart"
        return
    before = context.decode_seconds
    assert not b.unread(beginning)
    b.feed(beginning)
    assert context.decode_seconds == before
    a.forget()  # what was borrowed stays
    text, draft = [*beginning, *texts.some(4)], texts.some(2)
    assert_same(b.score(text, draft), alone(text, draft))


def test_a_failed_pass_leaves_no_sequence_with_tokens_that_it_does_not_hold(
    context: Context, alone: Alone
) -> None:
    if not context.can_share_passes:
        pytest.skip("texts share no passes of such a model")
    a, b = LlamaSession(context, 0), LlamaSession(context, 1)
    text = Texts(5, N_CTX, N_ROWS).some(10)
    a.feed(text)
    b.feed(text[:4])
    with pytest.raises(DecodeError, match="2 sequences in one pass"):
        context.decode_together([BatchPart(0, [5], 1), BatchPart(1, [N_VOCAB + 9], 1)])
    assert (a.n_held, b.n_held) == (10, 4)
    assert_same(a.score(text, [7]), alone(text, [7]))
    assert_same(b.score(text[:4], [8]), alone(text[:4], [8]))


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
