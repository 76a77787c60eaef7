"""Drafters that draft trees: exact, within their limits, and with branches only where they pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from fakes import FakeSession, hashed_logits, of_last_two, speculated

from ggufspec.decoding import verify
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.tree import leaves
from ggufspec.decoding.types import Draft, Drafter, Probs, Round, Uniforms, Verdict
from ggufspec.drafting import strategies
from ggufspec.drafting.acceptance import Acceptance
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.pair_profile import fixed_length

Outcome = tuple[float, list[int], int]  # probability, accepted nodes, next token

N_VOCAB = 3
SAMPLING = Sampling(temperature=1, top_k=0, top_p=1, min_p=0)
GREEDY = Sampling(temperature=0)


def outcomes(draft: Draft, target_probs: Probs) -> Iterator[Outcome]:
    """All that recursive rejection can find (SpecInfer, https://arxiv.org/abs/2305.09781)."""
    n = len(draft.tokens)
    target = np.asarray(target_probs).astype(float)
    probs = np.asarray(draft.probs).astype(float) if draft.probs is not None else None
    parents = draft.parents or range(-1, n - 1)

    def below(node: int, path: list[int], chance: float) -> Iterator[Outcome]:
        rest = target[node + 1]
        for child in range(n):
            if parents[child] != node:
                continue
            token = draft.tokens[child]
            row = np.eye(len(rest))[token] if probs is None else probs[child]
            accepted = min(rest[token] / row[token], 1.0)
            yield from below(child, [*path, child], chance * accepted)
            chance *= 1 - accepted
            if chance < 1e-12:
                return
            rest = np.maximum(rest - row, 0)
            rest = rest / rest.sum()
        for token, p in enumerate(rest):
            yield chance * p, path, token

    yield from (each for each in below(-1, [], 1.0) if each[0] > 1e-12)


def made(
    policy: LengthPolicy,
    draft: FakeSession,
    *,
    name: str = "model",
    sampling: Sampling = SAMPLING,
    uniforms: Callable[[int], Uniforms] | None = None,
    tree: str = "on",
    n_leaves: int = 16,
    n_draft: int = 8,
    stop_tokens: Sequence[int] = (),
) -> Drafter:
    materials = strategies.Materials(
        sampling,
        uniforms or uniform_streams(3)[1],
        stop_tokens,
        draft,
        n_draft_max=n_draft,
        policy=policy,
        tree=tree,
        n_leaves=n_leaves,
    )
    return strategies.make(name, materials)


# Exactness: a draft model whose probabilities are thirds and halves, also without a token or two,
# has all its draws among six uniforms. So all drafts of a round can be enumerated.

PRIOR = Acceptance((0.4, 0.3), (0.4, 0.3), (0.4, 0.3))
UNIFORMS = [(i + 0.5) / 6 for i in range(6)]
WEIGHTS = [(1, 1, 1), (1, 1, 0), (0, 1, 1), (2, 1, 0), (0, 2, 1), (1, 0, 2)]


def draft_logits(prefix: tuple[int, ...]) -> np.ndarray:
    weights = WEIGHTS[np.random.default_rng([7, *prefix[-2:]]).integers(len(WEIGHTS))]
    with np.errstate(divide="ignore"):
        return np.log(np.array(weights, float))


DRAFT, TARGET = of_last_two(draft_logits), hashed_logits(N_VOCAB, 5, spread=1.0)


@cache
def target_probs_after(prefix: tuple[int, ...]) -> np.ndarray:
    weights = np.exp(TARGET(prefix).astype(np.float32).astype(float))
    return weights / weights.sum()


class Enumerated:
    """Uniforms that take all values in turns, one position at a time, as far as they are used."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.n_used = 0

    def __call__(self, n: int) -> Uniforms:
        self.n_used = 0
        return self  # type: ignore[return-value]

    def __getitem__(self, i: int) -> float:
        while len(self.values) <= i:
            self.values.append(0)
        self.n_used = max(self.n_used, i + 1)
        return UNIFORMS[self.values[i]]

    def advance(self) -> bool:
        """To the next combination; false after the last."""
        del self.values[self.n_used :]
        while self.values and self.values[-1] == len(UNIFORMS) - 1:
            self.values.pop()
        if self.values:
            self.values[-1] += 1
        return bool(self.values)


def texts_after_a_round(
    policy: Callable[[], LengthPolicy],
    prompt: Sequence[int],
    *,
    name: str = "model",
    changed: Callable[[Draft], Draft] = lambda draft: draft,
    n_draft: int = 3,
) -> tuple[dict[tuple[int, ...], float], set[tuple[int, ...]]]:
    """The probability of each text of n_draft + 1 tokens whose first round is speculative, and the
    shapes of its drafts."""
    uniforms = Enumerated()
    found: dict[tuple[int, ...], float] = {}
    shapes = set()
    while True:
        drafter = made(policy(), FakeSession(DRAFT), name=name, uniforms=uniforms, n_draft=n_draft)
        draft = changed(drafter.draft(prompt, n_draft))
        shapes.add(tuple(draft.parents))
        chance = len(UNIFORMS) ** -float(uniforms.n_used)
        logits = FakeSession(TARGET).score(prompt, draft.tokens, draft.parents)
        weights = np.exp(logits.astype(float))
        target = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
        for p, path, token in outcomes(draft, target):
            text = (*(draft.tokens[node] for node in path), token)
            found[text] = found.get(text, 0.0) + chance * p
        if not uniforms.advance():
            break
    ended: dict[tuple[int, ...], float] = {}
    for text, p in found.items():
        rest = product(range(N_VOCAB), repeat=n_draft + 1 - len(text))
        for tail in rest:
            ended[text + tail] = ended.get(text + tail, 0.0) + p * chance_of(prompt, text, tail)
    return ended, shapes


def chance_of(prompt: Sequence[int], text: Sequence[int], tail: Sequence[int]) -> float:
    prefix, chance = [*prompt, *text], 1.0
    for token in tail:
        chance *= float(target_probs_after(tuple(prefix[-2:]))[token])
        prefix.append(token)
    return chance


def distance(found: dict[tuple[int, ...], float], prompt: Sequence[int]) -> float:
    """Total variation from the target's own distribution."""
    texts = product(range(N_VOCAB), repeat=len(next(iter(found))))
    return sum(abs(found.get(text, 0.0) - chance_of(prompt, (), text)) for text in texts) / 2


def auto(curve: Sequence[float] = (1, 1.01, 1.02, 1.03, 1.04), step: float = 0.05) -> LengthPolicy:
    """A policy with these costs, in passes over one token, and with middling acceptance."""
    costs = CostModel(len(curve))
    for _ in range(4):
        for n, seconds in enumerate(curve, 1):
            costs.observe_target(n, seconds)
        costs.observe_draft(1, step)
    costs.is_frozen = True
    return LengthPolicy(costs, PRIOR)


def fixed() -> LengthPolicy:
    return LengthPolicy(prior=PRIOR)


PROMPTS = [(0, 1, 2, 0, 1, 1, 0, 1, 2, 2, 0, 0, *last) for last in ((0, 2), (1, 0), (2, 0))]


@pytest.mark.parametrize("policy", [fixed, auto])
@pytest.mark.parametrize("name", ["model", "auto"])
def test_every_text_has_the_targets_probability(
    name: str, policy: Callable[[], LengthPolicy]
) -> None:
    shapes = set()
    for prompt in PROMPTS:
        found, more = texts_after_a_round(policy, prompt, name=name)
        assert sum(found.values()) == pytest.approx(1, abs=1e-6)
        assert distance(found, prompt) < 1e-6
        shapes |= more
    assert any(shapes)


def test_so_it_has_if_the_shape_depends_on_what_was_drawn() -> None:
    prompt = (*PROMPTS[0][:-2], 1, 1)
    found, shapes = texts_after_a_round(fixed, prompt)
    assert distance(found, prompt) < 1e-6
    assert len(shapes) > 1


def with_full_rows(draft: Draft) -> Draft:
    """A known mistake: a sibling counts as if it had been drawn from the whole row."""
    probs = np.array(draft.probs)
    for node, parent in enumerate(draft.parents):
        probs[node] = probs[list(draft.parents).index(parent)]
    return draft._replace(probs=probs)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_sibling_that_is_drawn_from_the_whole_row_is_found(prompt: Sequence[int]) -> None:
    found, _ = texts_after_a_round(auto, prompt, changed=with_full_rows)
    assert distance(found, prompt) > 0.01


# Limits and choices.


class Written(NamedTuple):
    text: list[int]
    rounds: list[Round]
    drafts: list[Draft]
    n_steps: int  # of the draft model

    def seconds(self, curve: Sequence[float], step: float) -> float:
        return self.n_steps * step + sum(curve[round_.n_drafted] for round_ in self.rounds)


def written(
    policy: LengthPolicy, *, n_tokens: int = 120, noise: float = 1.0, **options: Any
) -> Written:
    """A text of a fake pair whose draft differs from its target by so much noise."""
    sampling = options.setdefault("sampling", GREEDY)
    target, other = hashed_logits(30, 1), hashed_logits(30, 2)
    session = FakeSession(of_last_two(lambda last: target(last) + noise * other(last)))
    drafter = made(policy, session, **options)
    drafts, rounds, tokens = [], [], [1, 2]

    def judge(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        drafts.append(draft)
        return verify.rule("traversal")(draft, target_probs, uniforms)

    for round_ in speculated(
        tokens,
        target=FakeSession(target),
        drafter=drafter,
        verify=judge,
        sampling=sampling,
        uniforms=uniform_streams(4)[0],
        n_draft=options.get("n_draft", 8),
        n_end=2 + n_tokens,
    ):
        policy.observe_round(round_)
        rounds.append(round_)
    return Written(tokens[2:], rounds, drafts, session.n_scores)


@pytest.mark.parametrize("n_draft", [1, 2, 5, 8])
@pytest.mark.parametrize("n_leaves", [2, 3, 16])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING])
def test_a_tree_has_no_more_nodes_and_leaves_than_allowed(
    sampling: Sampling, n_leaves: int, n_draft: int
) -> None:
    policy = fixed_length(sampling.temperature)
    drafts = written(policy, sampling=sampling, n_leaves=n_leaves, n_draft=n_draft).drafts
    assert max(len(draft.tokens) for draft in drafts) == n_draft
    assert max(len(leaves(draft.parents)) for draft in drafts) <= n_leaves
    assert n_draft < 5 or any(draft.parents for draft in drafts)
    for draft in drafts:
        children = list(zip(draft.parents, draft.tokens, strict=bool(draft.parents)))
        assert len(set(children)) == len(children)  # of one node, they differ


@pytest.mark.parametrize("policy", [fixed, auto])
def test_with_one_leaf_or_without_trees_drafts_are_chains(
    policy: Callable[[], LengthPolicy],
) -> None:
    chains = [
        written(policy(), n_leaves=1),
        written(policy(), tree="off"),
        written(fixed(), tree="auto"),
    ]
    for each in chains:
        assert not any(draft.parents for draft in each.drafts)
        assert each.text == chains[0].text


FLAT = [1 + 0.01 * n for n in range(9)]
STEEP = [1 + 0.9 * n for n in range(9)]
STAIRS = [1, 1.2, 1.6, 1.25, 2.2, 2.6, 3, 3.4, 3.8]  # four tokens for the price of two


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING])
def test_it_branches_where_passes_are_cheap_and_second_choices_good(sampling: Sampling) -> None:
    def share(curve: Sequence[float], noise: float) -> float:
        policy = auto(curve, step=0.2)
        drafts = written(policy, n_tokens=300, noise=noise, sampling=sampling, tree="auto").drafts
        return sum(bool(draft.parents) for draft in drafts) / len(drafts)

    assert share(FLAT, 0.5) > 0.5
    assert share(STEEP, 0.5) == 0
    assert share(STEEP, 0.1) == 0


def test_branches_fill_a_cheap_size_of_a_pass() -> None:
    """Behind a dear one, where they are worth both together."""
    policy = auto(STAIRS)
    policy.start_round(8, 1)
    assert policy.rule.n_max >= 3
    assert policy.rule.n_worth([0.3, 0.2], n_drafted=1) == 2
    assert policy.rule.n_worth([0.3], n_drafted=1) == 0
    assert policy.rule.n_worth([0.3, 0.2], n_drafted=2) == 1
    assert policy.rule.n_worth([0.3, 0.2], n_drafted=3) == 0


@pytest.mark.parametrize("curve", [FLAT, STEEP, STAIRS])
def test_branches_do_not_cost_more_than_they_save(curve: Sequence[float]) -> None:
    """By simulated seconds, which vary by some per cent with the draws of a text."""
    step, ratios = 0.1, []
    for noise, sampling in product((0.1, 0.5, 1.5), (GREEDY, SAMPLING)):
        trees, chains = (
            written(auto(curve, step), n_tokens=500, noise=noise, sampling=sampling, tree=tree)
            for tree in ("auto", "off")
        )
        ratios.append(trees.seconds(curve, step) / chains.seconds(curve, step))
    assert np.exp(np.mean(np.log(ratios))) < (0.95 if curve is FLAT else 1.03)


def test_a_second_choice_is_learned_wherever_the_first_was_rejected() -> None:
    """Also if no second was drawn."""
    policy = fixed()
    assert policy.second is not None
    before = policy.second.coefficients
    written(policy, n_draft=1, noise=0.5)
    assert policy.second.coefficients != before
