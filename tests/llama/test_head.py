"""A head is a pure function of its tokens and of what the target has decoded, whatever came before.

A head over memory that was just emptied says what is right; see tests/llama/test_session.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import head_pairs
import numpy as np
import pytest
from head_pairs import Contexts, Interrupted

from ggufspec.decoding.tree import leaves, path_to
from ggufspec.decoding.types import Logits
from ggufspec.engine.slots import Slot, Slots, SlotSession
from ggufspec.errors import NoRoomError

N_CTX, N_BATCH, N_DRAFT, N_SLOTS, N_LEAVES = 192, 12, 7, 2, 3
N_CANDIDATES = 4  # of a token of DFlash2
# As in tests/llama/test_session.py: rounding is below it, a token or state that is missing, doubled
# or misplaced is above.
TOLERANCE = 1e-2

Tokens = list[int]


def made(pair: head_pairs.Pair, **options: int) -> Contexts:
    rows = {"n_rows": N_DRAFT + 1, "n_rollback": N_DRAFT}
    return Contexts(pair, **{"n_ctx": N_CTX, "n_batch": N_BATCH, **rows, **options})


KINDS = ["glm4moe", "qwen35", "step35", "eagle3", "eagle3_d2t", "gemma4"]
KINDS += ["dflash", "dflash_d2t", "dspark", "dflash2"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    written = head_pairs.WRITERS[request.param](tmp_path_factory.mktemp(request.param))
    return head_pairs.perturbed(written)


class Oracle:
    """A head that reads a text anew, the last `n_drafted` tokens without the target."""

    def __init__(self, pair: head_pairs.Pair) -> None:
        self.pair = pair
        self.contexts = made(pair, n_batch=N_CTX)

    def __call__(self, tokens: Tokens, n_drafted: int = 0) -> Logits:
        target, head = self.contexts.sessions[0], self.contexts.head.sessions[0]
        target.forget()
        head.forget()
        target.feed(tokens[: len(tokens) - n_drafted - 1])
        return head.score(tokens).copy()


@pytest.fixture
def oracle(pair: head_pairs.Pair) -> Iterator[Oracle]:
    made = Oracle(pair)
    yield made
    made.contexts.close()


@pytest.fixture
def contexts(pair: head_pairs.Pair) -> Iterator[Contexts]:
    contexts = made(pair, n_sequences=N_SLOTS, n_leaves=N_LEAVES)
    yield contexts
    contexts.close()


def assert_same(found: Logits, wanted: Logits) -> None:
    drafts, n_most = np.isfinite(wanted), 0
    if drafts.sum() == N_CANDIDATES:
        n_most = 2  # rounding decides which token is the last candidate
    assert (np.isfinite(found) != drafts).sum() <= n_most
    drafts &= np.isfinite(found)
    assert np.abs(found[drafts] - wanted[drafts]).max() < TOLERANCE


def needs_two_tokens(contexts: Contexts) -> bool:
    return contexts.head.facts.kind == "eagle3" or contexts.head.facts.shares_cache


class Machine:
    """Texts in two slots, which grow as those of an engine do."""

    def __init__(self, contexts: Contexts, oracle: Oracle, seed: int) -> None:
        self.random = random.Random(seed)
        self.contexts, self.oracle = contexts, oracle
        self.facts = contexts.head.facts
        layers = self.facts.n_layers
        self.n_at_once = oracle.pair.n_at_once or (layers if layers > 1 else None)
        self.slots = Slots(contexts.target, contexts.head.context, contexts.head)
        self.used: list[Slot | None] = [None] * N_SLOTS
        self.texts: list[Tokens] = [[], []]
        self.lacks: set[int] = set()  # texts that the target has to decode before the head drafts
        self.log: list[object] = []
        self.n_compared = 0
        self.n_trees = 0

    def session(self, i: int) -> SlotSession:
        slot = self.used[i]
        assert slot is not None
        assert slot.draft is not None
        return slot.draft

    def tokens(self, least: int, most: int) -> Tokens:
        return [self.random.randrange(3, 250) for _ in range(self.random.randint(least, most))]

    def prompt(self) -> Tokens:
        text, other = self.texts
        begins = (
            [],
            text[: self.random.randint(0, len(text))],
            text,
            other,
            other[: self.random.randint(0, len(other))],
        )
        begin = self.random.choice(begins)[: N_CTX // 3]
        return [*begin, *self.tokens(0 if begin else 1, self.random.choice((3, 30, 90)))]

    def begin(self, i: int) -> None:
        """A new text, as Generation begins one."""
        prompt = self.prompt()
        self.log.append(("begin", i, len(prompt)))
        if (before := self.used[i]) is not None:
            self.slots.leave(before, None)
        self.used[i] = None
        self.lacks.discard(i)
        slot = self.used[i] = self.slots.take(prompt)
        slot.target.feed(prompt[:-1])
        self.texts[i] = prompt

    def draft(self, i: int) -> Tokens:
        """Draft tokens, each of which the head scores after the one before."""
        text, drafted = self.texts[i], list[int]()
        for n in range(self.random.randint(1, N_DRAFT)):
            self.log.append(("draft", i, len(text), n))
            if self.n_at_once and n >= self.n_at_once:
                with pytest.raises(NoRoomError):
                    self.session(i).score([*text, *drafted])
                break
            if len(text) + n == 1 and needs_two_tokens(self.contexts):
                with pytest.raises(NoRoomError):
                    self.session(i).score(text)
                break
            try:
                found = self.session(i).score([*text, *drafted]).copy()
            except NoRoomError:
                assert i in self.lacks
                break
            if i not in self.lacks:
                wanted = self.oracle([*text, *drafted], n)
                assert_same(found, wanted)
                found[~np.isfinite(wanted)] = -np.inf
                self.n_compared += 1
            drafted += [self.drafted(found[0])]
            if not self.n_at_once and self.random.random() < 0.2 and n < N_DRAFT - 2:
                drafted += self.tokens(1, 1)  # forced: several tokens at once
                break
        return drafted[:N_DRAFT]

    def drafted(self, row: Logits) -> int:
        if self.random.random() < 0.5:
            return int(row.argmax())
        [token] = self.tokens(1, 1)
        is_asked = self.facts.block is None or not self.facts.block.n_candidates
        return token if is_asked else int(self.random.choice(np.flatnonzero(np.isfinite(row))))

    def with_branches(self, chain: Tokens) -> tuple[Tokens, Tokens]:
        """A tree around a drafted chain, where the target reads trees."""
        draft, parents = list(chain), list(range(-1, len(chain) - 1))
        while self.random.random() < 0.8 and 0 < len(draft) < N_DRAFT:
            parent, [token] = self.random.randrange(-1, len(draft)), self.tokens(1, 1)
            beside = [draft[j] for j, other in enumerate(parents) if other == parent]
            n_leaves = len(leaves([*parents, parent]))
            if token not in beside and n_leaves <= self.contexts.target.n_leaves:
                draft.append(token)
                parents.append(parent)
        self.n_trees += len(leaves(parents)) > 1
        return draft, parents if len(draft) > len(chain) else []

    def accept(self, i: int, draft: Tokens, parents: Tokens) -> None:
        n = self.random.choice((0, len(draft), self.random.randint(0, len(draft))))
        path = path_to(parents, n - 1) if parents else range(n)
        [token] = self.tokens(1, 1)
        while token in draft:  # else the target may have decoded it there, and the head know it
            [token] = self.tokens(1, 1)
        self.texts[i] = [*self.texts[i], *(draft[node] for node in path), token]

    def round_(self, i: int, drafter: str) -> None:
        draft = self.draft(i) if drafter == "head" else []
        if drafter == "ngram":
            draft = self.tokens(1, N_DRAFT)
        draft, parents = self.with_branches(draft)
        self.log.append((drafter, i, len(self.texts[i]), len(draft), parents))
        slot = self.used[i]
        target = slot and slot.target
        assert target is not None
        target.score(self.texts[i], draft, parents)
        self.lacks.discard(i)
        self.accept(i, draft, parents)

    def together(self) -> None:
        """A pass that both texts share."""
        drafts = [
            self.with_branches(self.draft(i) if self.random.random() < 0.5 else [])
            for i in range(N_SLOTS)
        ]
        self.log.append(("together", *map(len, self.texts), *drafts))
        targets = [each.target for each in self.used if each is not None]
        wanted = [
            target.prepare(text, *draft)
            for target, text, draft in zip(targets, self.texts, drafts, strict=True)
        ]
        if sum(len(each.tokens) for each in wanted) <= self.contexts.target.n_batch:
            self.contexts.target.decode_together(wanted)
            self.lacks.clear()
            for i, draft in enumerate(drafts):
                self.accept(i, *draft)

    def step(self) -> None:
        i = self.random.randrange(N_SLOTS)
        if self.used[i] is None or len(self.texts[i]) > N_CTX - 40:
            self.begin(i)
        choice = self.random.random()
        if choice < 0.15:
            self.begin(i)
        elif choice < 0.18:
            self.log.append("forget")
            self.lacks.update(range(N_SLOTS))
            self.slots.forget()
        elif choice < 0.25 and None not in self.used and self.contexts.target.can_share_passes:
            self.together()
        elif choice < 0.35:
            for _ in range(self.random.randint(1, 12)):
                if len(self.texts[i]) < N_CTX - 20:
                    self.round_(i, self.random.choice(("plain", "ngram")))
        else:
            self.round_(i, "head")

    def interrupt(self) -> None:
        """A step that ends at any moment; what it would have written is not kept."""
        at = self.random.choice((10, 100, 1000))
        self.log.append(("interrupt", at))
        self.lacks.update(range(N_SLOTS))
        sys.setprofile(Interrupted(self.random.randrange(at) + 1))
        try:
            with suppress(KeyboardInterrupt):
                self.step()
        finally:
            sys.setprofile(None)


def test_logits_depend_on_the_text_only_also_after_ctrl_c(
    contexts: Contexts, oracle: Oracle
) -> None:
    machine = Machine(contexts, oracle, 1)
    for _ in range(20):
        machine.step()
    assert machine.n_compared > 10
    for i in range(20):
        machine.interrupt() if i % 4 == 0 else machine.step()
    assert machine.n_trees > 2 or contexts.target.n_leaves == 1


def test_ctrl_c_leaves_no_states_of_other_tokens(contexts: Contexts, oracle: Oracle) -> None:
    target, head = contexts.sessions[0], contexts.head.sessions[0]
    one, other = [*range(20, 40)], [*range(20, 28), *range(60, 72)]
    wanted = oracle([*other, 50])
    for at in count(1, 3):
        target.feed(one)
        interrupted = Interrupted(at)
        sys.setprofile(interrupted)
        try:
            with suppress(KeyboardInterrupt):
                target.score(other[:-4], other[-4:])
        finally:
            sys.setprofile(None)
        target.score(other)
        assert_same(head.score([*other, 50]), wanted)
        if interrupted.is_late:
            break


def test_a_long_prompt_that_begins_with_drafted_tokens_is_read_once(
    contexts: Contexts, oracle: Oracle
) -> None:
    target, head = contexts.sessions[0], contexts.head.sessions[0]
    text, drafted = [*range(20, 40)], list[int]()
    target.feed(text[:-1])
    for _ in range(3):
        drafted.append(int(head.score([*text, *drafted]).argmax()))
    text = [*text, *drafted[:2], *range(70, 160), 50]
    progress: list[int] = []
    target.feed(text[:-1], lambda n_done, n_all: progress.append(n_done))
    assert progress == sorted(progress)
    assert head.n_common(text) > 60
    assert_same(head.score(text), oracle(text))


def test_an_accepted_path_of_a_tree_is_read_once(contexts: Contexts, oracle: Oracle) -> None:
    if contexts.target.n_leaves == 1:
        pytest.skip("the target reads no trees")
    target, head = contexts.sessions[0], contexts.head.sessions[0]
    text = [*range(20, 40)]
    for path in ([60, 61], [70, 71, 72], [70]):
        target.score(text, [60, 61, 70, 71, 72], [-1, 0, -1, 2, 3])
        after = [*text, *path, 50]
        assert target.prepare(after, ()).tokens == [50]
        target.score(after)
        assert_same(head.score([*after, 51]), oracle([*after, 51]))


def test_a_saved_text_is_drafted_from(contexts: Contexts, oracle: Oracle) -> None:
    target, head = contexts.sessions[0], contexts.head.sessions[0]
    text = [*range(20, 40)]
    target.feed(text[:-1])
    saved = target.save(text[:-1]), head.save(text[:-1])
    target.feed([*range(60, 90)])
    target.restore(saved[0])
    head.restore(saved[1])
    assert head.n_bytes >= 0
    if contexts.head.facts.shares_cache:
        assert saved[1] is None, "its cells are the target's"
    else:
        assert_same(head.score(text), oracle(text))


def test_a_prompt_of_one_token_has_drafts_but_of_two_kinds(
    contexts: Contexts, oracle: Oracle
) -> None:
    target, head = contexts.sessions[0], contexts.head.sessions[0]
    target.feed([*range(20, 40)])
    head.score([*range(20, 40), 50])
    target.feed([])  # the beginning of another text
    if not needs_two_tokens(contexts):
        assert np.isfinite(head.score([40]).max())
        assert_same(head.score([40]), oracle([40]))
    else:
        with pytest.raises(NoRoomError, match="two tokens"):
            head.score([40])


def test_a_text_that_the_target_has_not_decoded_is_not_drafted(contexts: Contexts) -> None:
    """The head would decode it token by token."""
    with pytest.raises(NoRoomError):
        contexts.head.sessions[0].score([*range(10, 30)])
