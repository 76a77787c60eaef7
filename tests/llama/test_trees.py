"""A tree is read in one pass, and is then as if each of its paths had been read alone."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
from patience import ctrl_c_in_a_batch
from plain_context import N_VOCAB, TOLERANCE, Tokens, assert_same, models, plain_context

from ggufspec.decoding.tree import leaves, path_to
from ggufspec.decoding.types import Logits
from ggufspec.errors import DecodeError
from ggufspec.llama import context as context_module
from ggufspec.llama.context import Context
from ggufspec.llama.devices import address_of
from ggufspec.llama.hidden_states import BatchPart, addresses
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

N_CTX, N_BATCH, N_ROWS, N_LEAVES, N_SLOTS = 256, 32, 9, 4, 2  # llama.cpp rounds 256 cells to 256


class Drafted(NamedTuple):
    tokens: Tokens
    parents: Tokens

    def path(self, node: int) -> Tokens:
        return [self.tokens[i] for i in path_to(self.parents, node)]


def context_of(model: Model, **how: Any) -> Context:
    return plain_context(model, **{"n_ctx": N_CTX, "n_batch": N_BATCH, "n_rows": N_ROWS, **how})


model = models("llama")


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with closing(context_of(model, n_sequences=N_SLOTS, n_leaves=N_LEAVES)) as made:
        yield made


Oracle = Callable[[Tokens, Drafted], Logits]


@pytest.fixture
def alone(model: Model) -> Iterator[Oracle]:
    """The logits of a tree, of which each path is read anew."""
    with closing(context_of(model)) as made:
        session = LlamaSession(made)

        def score(text: Tokens, draft: Drafted) -> Logits:
            rows = np.empty((len(draft.tokens) + 1, N_VOCAB), np.float32)
            for leaf in leaves(draft.parents) or [-1]:
                session.forget()
                path = path_to(draft.parents, leaf)
                found = session.score(text, draft.path(leaf))
                rows[[0, *(node + 1 for node in path)]] = found
            return rows

        yield score


class Machine:
    """Texts in slots, which grow along trees, depart, begin anew and share passes."""

    def __init__(self, context: Context, alone: Oracle, seed: int) -> None:
        self.random = random.Random(seed)
        self.alone = alone
        self.context = context
        self.sessions = [LlamaSession(context, i) for i in range(N_SLOTS)]
        self.texts = [self.some(5) for _ in range(N_SLOTS)]
        self.drafts = [Drafted([], [])] * N_SLOTS
        self.is_read = [False] * N_SLOTS  # the text and its draft, last
        self.n_trees = 0

    def some(self, n: int) -> Tokens:
        return [self.random.randrange(3, N_VOCAB) for _ in range(n)]

    def draft(self, n_most: int = N_ROWS - 1) -> Drafted:
        """A chain, then branches, which begin behind any earlier node."""
        pick = self.random
        n = pick.randint(0, n_most)
        tokens, parents = self.some(pick.randint(0, n)), list[int]()
        parents = list(range(-1, len(tokens) - 1))
        while tokens and len(tokens) < n:
            parent = pick.randrange(-1, len(tokens))
            [token] = self.some(1)
            beside = [tokens[i] for i, other in enumerate(parents) if other == parent]
            if token not in beside and len(leaves([*parents, parent])) <= N_LEAVES:
                tokens.append(token)
                parents.append(parent)
        self.n_trees += len(leaves(parents)) > 1
        return Drafted(tokens, parents)

    def grow(self, i: int) -> None:
        """Accept a path of the last draft."""
        path = self.drafts[i].path(self.random.randrange(-1, len(self.drafts[i].tokens)))
        self.texts[i] = [*self.texts[i], *path, *self.some(1)]
        if self.is_read[i]:
            assert self.sessions[i].n_common(self.texts[i]) >= len(self.texts[i]) - 1, "read twice"
            self.is_read[i] = False

    def change(self, i: int) -> None:
        pick, text, other = self.random, self.texts[i], 1 - i
        choice = pick.random()
        if choice < 0.7:
            self.grow(i)
        elif choice < 0.8:
            self.texts[i] = text[: pick.randint(1, len(text))]
        elif choice < 0.85:
            self.texts[i] = [*text[: pick.randint(0, len(text) - 1)], *self.some(3)]
        elif choice < 0.9:
            self.sessions[i].forget()
        else:
            self.grow(other)
            n = pick.randint(1, len(self.texts[other]))
            self.sessions[i].borrow(other, self.texts[other][:n])
            self.texts[i] = [*self.texts[other][:n], *self.some(1)]
        if len(self.texts[i]) > N_CTX - N_ROWS:
            self.texts[i] = self.some(pick.randint(1, 40))
        self.drafts[i] = self.draft()
        self.is_read[i] = False

    def together(self) -> None:
        for session, text in zip(self.sessions, self.texts, strict=True):
            session.feed(text[:-1])
        wanted = [
            session.prepare(text, *draft)
            for session, text, draft in zip(self.sessions, self.texts, self.drafts, strict=True)
        ]
        self.context.decode_together(wanted)
        first = 0
        for i, each in enumerate(wanted):
            rows = self.sessions[i].rows_of(each, first).copy()
            assert_same(rows, self.alone(self.texts[i], self.drafts[i]))
            first += len(each.tokens)
            self.is_read[i] = True

    def score(self, i: int) -> None:
        rows = self.sessions[i].score(self.texts[i], *self.drafts[i])
        assert_same(rows, self.alone(self.texts[i], self.drafts[i]))
        self.is_read[i] = True

    def step(self) -> None:
        i = self.random.randrange(N_SLOTS)
        self.change(i)
        if self.random.random() < 0.3:
            self.change(1 - i)
            self.together()
        else:
            self.score(i)


def test_a_tree_has_the_logits_of_its_paths(context: Context, alone: Oracle) -> None:
    machine = Machine(context, alone, 0)
    for _ in range(150):
        machine.step()
    assert machine.n_trees > 50


def test_an_accepted_path_is_not_read_again(context: Context, alone: Oracle) -> None:
    session = LlamaSession(context)
    text = [*range(10, 40)]
    tree = Drafted([50, 51, 52, 53, 54, 55], [-1, 0, 1, 0, -1, 3])
    for node in range(-1, 6):
        session.forget()
        session.score(text, *tree)
        after = [*text, *tree.path(node), 60]
        missing = session.prepare(after, ())
        assert missing.tokens == [60]
        assert session.n_held == len(after) - 1
        assert_same(session.score(after), alone(after, Drafted([], [])))


def test_trees_never_take_more_cells_than_they_have_nodes(context: Context, alone: Oracle) -> None:
    """A cell that is not freed would be missing where both texts reach the end of the context."""
    machine = Machine(context, alone, 0)
    machine.texts = [machine.some(5) for _ in range(N_SLOTS)]
    while len(machine.texts[0]) < N_CTX or len(machine.texts[1]) < N_CTX:
        for i, text in enumerate(machine.texts):
            machine.drafts[i] = machine.draft(min(N_ROWS - 1, N_CTX - len(text)))
            rows = machine.sessions[i].score(text, *machine.drafts[i])
            if len(text) > N_CTX - 20:
                assert_same(rows, alone(text, machine.drafts[i]))
            machine.is_read[i] = True
            machine.grow(i)
            del machine.texts[i][N_CTX:]


@pytest.mark.parametrize("write", [tiny.write_swa, tiny.write_mamba])
def test_what_cannot_read_trees_refuses_them(write: Callable[..., Path], tmp_path: Path) -> None:
    with (
        closing(Model(write(tmp_path / "model.gguf"))) as model,
        closing(context_of(model, n_leaves=N_LEAVES)) as context,
    ):
        assert context.n_leaves == 1
        session = LlamaSession(context)
        with pytest.raises(ValueError, match="more leaves"):
            session.score([5, 6], [7, 8], [-1, -1])
        wanted = session.score([5, 6], [7, 8]).copy()
        assert_same(session.score([5, 6], [7, 8], [-1, 0]), wanted)


def test_how_many_leaves_there_are(model: Model) -> None:
    for asked, n_slots, n_leaves in ((1, 1, 1), (8, 1, 8), (64, 1, N_ROWS), (9, 64, 4)):
        with closing(context_of(model, n_leaves=asked, n_sequences=n_slots)) as context:
            assert context.n_leaves == n_leaves
            assert context.can_share_passes == (n_slots > 1)


def test_trees_that_make_no_sense_are_refused(context: Context) -> None:
    for part in (
        BatchPart(0, [5, 6, 7], 3, [-1, 1]),
        BatchPart(0, [5, 6, 7], 3, [-1, -2]),
        BatchPart(0, [5, 6, 7], 2, [-1, 0]),
        BatchPart(0, [5, 6], 2, [-1, 0]),
        BatchPart(0, [5] * (N_LEAVES + 2), N_LEAVES + 2, [-1] * (N_LEAVES + 1)),
    ):
        with pytest.raises(ValueError, match=r"tree|decode"):
            context.decode_together([part])
    assert context.n_cells() == 0


def test_after_a_pass_that_failed_trees_are_as_before(context: Context, alone: Oracle) -> None:
    machine = Machine(context, alone, 3)
    for _ in range(30):
        machine.step()
        machine.grow(0)
        text, bad = machine.texts[0][: N_CTX - N_ROWS], Drafted([5, N_VOCAB + 9, 7], [-1, 0, -1])
        with pytest.raises(DecodeError):
            machine.sessions[0].score(text, *bad)
        assert machine.sessions[0].n_common([*text, 7]) < len(text)
        machine.drafts[0], machine.is_read[0] = Drafted([], []), False


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such alarm")
def test_ctrl_c_within_a_tree_leaves_nothing_of_it(model: Model, alone: Oracle) -> None:
    n, n_ctx = 3_000, 3_072
    text, tree = [*range(10, 30)], Drafted([50, 51, 52, 53], [-1, 0, -1, 2])
    with closing(context_of(model, n_leaves=N_LEAVES, n_ctx=n_ctx, n_batch=n_ctx)) as context:
        session = LlamaSession(context)
        session.score(text, *tree)
        with ctrl_c_in_a_batch():
            session.score([*text, 52, *[5] * n], *tree)
        assert session.n_common(array("i", [*text, 52, 5])) == len(text) + 1
        text = [*text, 52, 60]
        assert_same(session.score(text, *tree), alone(text, tree))
        context.decode([5] * (n_ctx - len(text) - 2), 0)  # all cells are free again


THROWING = """
#include <stdexcept>
struct Batch { int n_tokens; void * arrays[6]; };
extern "C" {
int (*decode_of_llama)(void *, Batch);
bool fails = false;
int decode(void * context, Batch batch) {
    if (fails) throw std::runtime_error("no memory for the graph");
    return decode_of_llama(context, batch);
}
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_tree_whose_decode_throws_leaves_the_cells_before_it(
    model: Model, alone: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "throwing.cpp").write_text(THROWING)
    made = tmp_path / "throwing.so"
    command = ["c++", "-shared", "-fPIC", "-o", made, tmp_path / "throwing.cpp"]
    subprocess.run(command, check=True)
    library, functions = ctypes.CDLL(str(made)), addresses()
    ctypes.c_void_p.in_dll(library, "decode_of_llama").value = functions["llama_decode"]
    functions["llama_decode"] = address_of(library.decode)
    monkeypatch.setattr(context_module, "addresses", lambda: functions)
    fails = ctypes.c_bool.in_dll(library, "fails")
    text, draft = [5, 6, 7, 8], Drafted([9, 10, 11, 12], [-1, 0, -1, 2])
    with closing(context_of(model, n_leaves=N_LEAVES)) as context:
        context.decode(text[:3], 1)
        fails.value = True
        for _ in range(2):
            with pytest.raises(DecodeError, match="no memory for the graph"):
                context.decode([text[3], *draft.tokens], 5, 0, draft.parents)
            longer = array("i", [*text, *draft.path(3)])
            assert (context.n_cells(), context.n_common(longer)) == (3, 3)
            assert context.resume(longer, len(longer)) == 3
        fails.value = False
        context.decode([text[3], *draft.tokens], 5, 0, draft.parents)
        assert np.abs(context.rows(0, 5) - alone(text, draft)).max() < TOLERANCE
