"""Drafters that draft trees stay within their limits, and branch only where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from fakes import (
    GREEDY,
    FakeSession,
    drafter_of,
    hashed_logits,
    known_costs,
    of_last_two,
    speculated,
)

from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.tree import leaves
from ggufspec.decoding.types import Draft, Probs, Round, Uniforms, Verdict
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.pair_profile import fixed_length

SAMPLING = Sampling(temperature=1, top_k=0, top_p=1, min_p=0)

PRIOR = SECOND = (0.4, 0.3)


def auto(curve: Sequence[float] = (1, 1.01, 1.02, 1.03, 1.04), step: float = 0.05) -> LengthPolicy:
    """A policy with these costs, in passes over one token, and with middling acceptance."""
    return LengthPolicy(known_costs(curve, step), PRIOR, SECOND)


def fixed() -> LengthPolicy:
    return LengthPolicy(None, PRIOR, SECOND)


class Written(NamedTuple):
    text: list[int]
    rounds: list[Round]
    drafts: list[Draft]
    n_steps: int  # of the draft model

    def seconds(self, curve: Sequence[float], step: float) -> float:
        return self.n_steps * step + sum(curve[round_.n_drafted] for round_ in self.rounds)


def written(
    policy: LengthPolicy,
    *,
    n_tokens: int = 120,
    noise: float = 1.0,
    sampling: Sampling = GREEDY,
    tree: str = "on",
    n_leaves: int = 16,
    n_draft: int = 8,
) -> Written:
    """A text of a fake pair whose draft differs from its target by so much noise."""
    target, other = hashed_logits(30, 1), hashed_logits(30, 2)
    session = FakeSession(of_last_two(lambda last: target(last) + noise * other(last)))
    how: dict[str, Any] = {"sampling": sampling, "n_draft": n_draft}
    more = {"policy": policy, "tree": tree, "n_leaves": n_leaves}
    drafts, rounds, tokens = [], [], [1, 2]

    def judge(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        drafts.append(draft)
        return verify.rule("traversal")(draft, target_probs, uniforms)

    for round_ in speculated(
        tokens,
        target=FakeSession(target),
        drafter=drafter_of("model", session, **how, **more),
        verify=judge,
        n_tokens=n_tokens,
        **how,
    ):
        policy.observe_round(round_)
        rounds.append(round_)
    return Written(tokens[2:], rounds, drafts, session.n_scores)


@pytest.mark.parametrize(("n_draft", "n_leaves"), [(1, 2), (5, 2), (8, 16)])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING])
def test_a_tree_has_no_more_nodes_and_leaves_than_allowed(
    sampling: Sampling, n_draft: int, n_leaves: int
) -> None:
    policy = fixed_length(sampling.temperature)
    drafts = written(policy, sampling=sampling, n_leaves=n_leaves, n_draft=n_draft).drafts
    assert max(len(draft.tokens) for draft in drafts) == n_draft
    assert max(len(leaves(draft.parents)) for draft in drafts) <= n_leaves
    assert n_draft < 5 or any(draft.parents for draft in drafts)
    for draft in drafts:
        children = list(zip(draft.parents, draft.tokens, strict=bool(draft.parents)))
        assert len(set(children)) == len(children)  # of one node, they differ


def test_with_one_leaf_or_without_trees_drafts_are_chains() -> None:
    chains = [
        written(auto(), n_leaves=1),
        written(auto(), tree="off"),
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
    assert policy.n_max >= 3
    assert policy.n_worth([0.3, 0.2], n_drafted=1) == 2
    assert policy.n_worth([0.3], n_drafted=1) == 0
    assert policy.n_worth([0.3, 0.2], n_drafted=2) == 1
    assert policy.n_worth([0.3, 0.2], n_drafted=3) == 0


@pytest.mark.parametrize("curve", [FLAT, STAIRS])
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
