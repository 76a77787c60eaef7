"""Every rule keeps the target's distribution, and equals its numpy twin on the same uniforms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import reference

from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Rows, Sampling, draw, to_probs
from ggufspec.decoding.tree import depths
from ggufspec.decoding.types import Draft
from ggufspec.errors import OptionError

RULES = verify.names()
RULE_TWINS = {
    "match": reference.match,
    "rejection": reference.rejection,
    "traversal": reference.traversal,
}
Twin = Callable[..., reference.Judgement]


def random_rows(rng: np.random.Generator, n: int, n_vocab: int) -> np.ndarray:
    """Distributions, some with zeros, some one-hot."""
    rows = rng.dirichlet(np.full(n_vocab, 0.7), n) * (rng.random((n, n_vocab)) < 0.8)
    rows[np.arange(n), rng.integers(0, n_vocab, n)] += 0.01
    if rng.random() < 0.2:
        rows[0] = np.eye(n_vocab)[rng.integers(n_vocab)]
    return (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)


def test_the_rules_are_found_by_file_name() -> None:
    assert {"match", "rejection", "traversal"} <= set(RULES)
    assert verify.rule("block") is verify.rule("traversal")  # by its name on chains
    with pytest.raises(OptionError, match="choose from match"):
        verify.rule("telepathy")


def random_tree(rng: np.random.Generator, n_nodes: int) -> list[int]:
    return [int(rng.integers(max(-1, i - 3), i)) for i in range(n_nodes)]


def drafted_rows(
    rng: np.random.Generator, parents: Sequence[int], n_vocab: int, certain: str
) -> tuple[list[int], list[int], np.ndarray]:
    """Parents, tokens, and what they were drawn from: distributions, one-hot rows, or some of each.

    With fewer nodes where a row has no token left for a sibling.
    """
    kept: dict[int, int] = {-1: -1}
    found: list[int] = []
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    whole: dict[int, np.ndarray] = {}
    for i, parent in enumerate(parents):
        if parent not in kept:
            continue
        row = whole.setdefault(parent, random_rows(rng, 1, n_vocab)[0])
        if not row.any():
            continue
        tokens.append(reference.pick(row.astype(float), rng.random()))
        found.append(kept[parent])
        kept[i] = len(tokens) - 1
        is_certain = certain == "all" or (certain == "some" and rng.random() < 0.5)
        rows.append(np.eye(n_vocab)[tokens[-1]] if is_certain else row / row.sum())
        whole[parent] = np.where(np.arange(n_vocab) == tokens[-1], 0, row)
    return found, tokens, np.array(rows, np.float32).reshape(-1, n_vocab)


@pytest.mark.parametrize("certain", ["none", "some", "all", "all, and no rows"])
@pytest.mark.parametrize("name", RULES)
def test_native_equals_numpy_for_the_same_uniforms(name: str, certain: str) -> None:
    """Chains and trees, with rows as drafters append them; the target may forbid a token."""
    rng = np.random.default_rng(5)
    rule, n_partly, n_beside = verify.rule(name), 0, 0
    for case in range(400):
        n_vocab, is_tree = int(rng.integers(2, 12)), case % 2
        n_draft = int(rng.integers(0, 7))
        shape = random_tree(rng, n_draft) if is_tree else range(-1, n_draft - 1)
        parents, tokens, probs = drafted_rows(rng, shape, n_vocab, certain.split(",")[0])
        rows = Rows(max(len(tokens), 1), n_vocab)
        for token, row in zip(tokens, probs, strict=True):
            if row.max() == 1:
                rows.append_certain(token)
            else:
                rows.append_weights(row[None])
        target = random_rows(rng, len(tokens) + 1, n_vocab)
        for i, token in enumerate(tokens):  # as in text that is forced, but not its tokens
            if rng.random() < 0.3:
                row = target[parents[i] + 1]
                row[:] = 0.9 * np.eye(n_vocab, dtype=np.float32)[token] + 0.1 * row
        uniforms = rng.random(len(tokens) + 1)
        draft = Draft(tokens, None if "no rows" in certain else rows)
        draft = draft._replace(parents=parents if is_tree else ())
        verdict = rule(draft, target, uniforms)
        if name == "match":
            expected = reference.match_verdict(tokens, target.astype(float), uniforms, parents)
        else:
            twin = RULE_TWINS[name](tokens, probs.astype(float), target.astype(float), parents)
            expected = twin.verdict(uniforms)
        assert (list(verdict.nodes), verdict.next_token) == expected
        assert verdict.n_accepted == len(verdict.nodes)
        assert (verdict.path is None) == (not draft.parents)
        n_partly += 0 < verdict.n_accepted < len(tokens)
        n_beside += verdict.n_accepted > verdict.n_accepted_of_chain
    assert min(n_partly, n_beside) > 20


@pytest.mark.parametrize("target_is", ["dense", "list", "certain"])
@pytest.mark.parametrize("draft_is", ["dense", "list", "certain"])
@pytest.mark.parametrize("name", RULES)
def test_all_forms_of_rows_are_judged_alike(name: str, draft_is: str, target_is: str) -> None:
    """Rows as the loop has them, lazy or truncated, against the same as plain arrays."""
    rng = np.random.default_rng(9)
    n_vocab, parents = 800, [-1, 0, 1, 0, -1, 4, -1]
    options = {
        "dense": Sampling(temperature=1, top_k=0, top_p=1, min_p=0),
        "list": Sampling(temperature=1, top_k=40, top_p=1, min_p=0),
        "certain": Sampling(temperature=0, top_p=1, min_p=0),
    }
    paths, n_unlike = set(), 0
    for _ in range(40):
        base = rng.normal(0, 3, (len(parents) + 1, n_vocab))
        logits = (base + rng.normal(0, 0.5, base.shape)).astype(np.float32)
        target = to_probs(logits, options[target_is], draft=[0] * len(parents))
        rows, tokens = Rows(len(parents), n_vocab), []
        near = base.astype(np.float32)
        for i, parent in enumerate(parents):
            siblings = reference.children(parents[:i], parent)
            if siblings:
                assert rows.append_without(siblings[-1], tokens[siblings[-1]])
            else:
                row = near[parent + 1 : parent + 2]
                draw(rows, row, options[draft_is], (), None, 0.0)
            tokens.append(rows.pick(i, rng.random()))
        uniforms = rng.random(len(parents) + 1).tolist()
        rule = verify.rule(name)
        draft = Draft(tokens, rows, parents=parents)
        found = rule(draft, target, uniforms)
        draft = draft._replace(probs=np.asarray(rows))
        n_unlike += found != rule(draft, np.asarray(target), uniforms)
        paths.add(tuple(found.nodes))
    assert len(paths) >= 5
    assert n_unlike <= 1  # uniforms so near an edge that rounding decides


# The exact distribution of what a rule emits, by enumeration of all drafts of a small vocabulary.

Levels = list[np.ndarray]  # by depth: (n_vocab**depth, n_vocab), the distribution after each prefix


def forests(n_nodes: int) -> Iterator[tuple[int, ...]]:
    """All shapes of a tree with that many nodes, its nodes in the order of a walk."""
    if n_nodes == 0:
        yield ()
        return
    for parents in forests(n_nodes - 1):
        parent = n_nodes - 2
        while parent >= -1:
            yield (*parents, parent)
            if parent == -1:
                break
            parent = parents[parent]


def random_levels(rng: np.random.Generator, n_vocab: int, depth: int) -> Levels:
    """Distributions after all prefixes: some with zeros, some one-hot."""
    levels = []
    for n in range(depth + 1):
        rows = random_rows(rng, n_vocab**n + 1, n_vocab)[1:].astype(float)
        one_hot = rng.random(len(rows)) < 0.1 * (n > 0)
        rows[one_hot] = np.eye(n_vocab)[rng.integers(0, n_vocab, one_hot.sum())]
        levels.append(rows / rows.sum(axis=1, keepdims=True))
    return levels


def texts_of(levels: Levels, emitted: Levels) -> np.ndarray:
    """The probability of every text, if one of `emitted` (by length) is continued by the target."""
    total = emitted[0]
    for rows, more in zip(levels, emitted[1:], strict=False):
        total = (total[:, None] * rows).ravel() + more
    return total


class Drafts(NamedTuple):
    """All drafts of one shape: (n, n_nodes) tokens, what they were drawn from, probabilities."""

    parents: list[int]
    tokens: np.ndarray
    rows: np.ndarray
    weights: np.ndarray


def all_drafts(
    draft: Levels,
    parents: Sequence[int],
    certain: Collection[int] = (),
    *,
    replaced: bool = False,
) -> Iterator[Drafts]:
    """Everything that can be drawn, node by node: each without its earlier siblings.

    Some nodes are the likeliest tokens, for certain. A node is left out where nothing can be drawn.
    `replaced`: a known mistake, the rows are recorded with the siblings.
    """
    n_vocab, depth = draft[0].shape[1], depths(parents)
    tokens, weights = np.zeros((1, 0), int), np.ones(1)
    prefixes, rows = np.zeros((1, 1), int), np.zeros((1, 0, n_vocab))
    for node, parent in enumerate(parents):
        whole = draft[depth[node] - 1][prefixes[:, parent + 1]]
        row = whole.copy()
        for sibling in reference.children(parents[:node], parent):
            drawn = np.nonzero(tokens[:, sibling] >= 0)[0]
            row[drawn, tokens[drawn, sibling]] = 0
        total = row.sum(axis=1)
        is_there = total > 0
        if parent >= 0:
            is_there &= tokens[:, parent] >= 0
        row /= np.where(total > 0, total, 1)[:, None]
        if node in certain:
            row = np.eye(n_vocab)[row.argmax(axis=1)]
        chances = np.hstack([row * is_there[:, None], ~is_there[:, None]])
        of, x = np.nonzero(chances > 0)
        weights = weights[of] * chances[of, x]
        x[x == n_vocab] = -1
        tokens = np.hstack([tokens[of], x[:, None]])
        prefix = prefixes[of, parent + 1] * n_vocab + x
        prefixes = np.hstack([prefixes[of], prefix[:, None]])
        recorded = whole if replaced else row
        rows = np.concatenate([rows[of], recorded[of][:, None]], axis=1)
    masks = tokens >= 0
    for mask in np.unique(masks, axis=0):
        these, nodes = (masks == mask).all(axis=1), np.nonzero(mask)[0].tolist()
        kept = [-1 if parents[i] < 0 else nodes.index(parents[i]) for i in nodes]
        yield Drafts(kept, tokens[these][:, nodes], rows[these][:, nodes], weights[these])


def emitted_by(twin: Twin, target: Levels, drafts: Iterable[Drafts]) -> tuple[np.ndarray, float]:
    """The exact distribution of a text of one round, then of the target alone; and E[accepted]."""
    n_vocab, accepted = target[0].shape[1], 0.0
    emitted = [np.zeros(n_vocab**n) for n in range(len(target) + 1)]
    for parents, tokens, rows, weights in drafts:
        depth, prefixes = [0, *depths(parents)], [np.zeros(len(tokens), int)]
        for node, parent in enumerate(parents):
            prefixes.append(prefixes[parent + 1] * n_vocab + tokens[:, node])
        after = np.stack([target[n][at] for n, at in zip(depth, prefixes, strict=True)], axis=1)
        judged = twin(tokens, rows, after, parents)
        masses = weights[:, None] * judged.reached()
        accepted += float((masses.sum(axis=0) * depth).sum())
        for i, (n, at) in enumerate(zip(depth, prefixes, strict=True)):
            texts = (at * n_vocab)[:, None] + np.arange(n_vocab)
            np.add.at(emitted[n + 1], texts, masses[:, i, None] * judged.rests[:, i])
    return texts_of(target, emitted), accepted


def distance(texts: np.ndarray, target: Levels) -> float:
    """Total variation from the target's own texts."""
    alone = [np.ones(1), *(np.zeros(rows.size) for rows in target)]
    return float(np.abs(texts - texts_of(target, alone)).sum()) / 2


def test_each_rule_has_a_reference_in_numpy() -> None:
    """So that the exact tests below cover it."""
    assert set(RULE_TWINS) == set(RULES)


def test_every_text_has_exactly_the_targets_probability() -> None:
    """Drafts of all shapes of up to 5 nodes, some of them certain, and all verdicts."""
    rng, n_vocab = np.random.default_rng(13), 3
    for n_nodes in range(6):
        for parents in forests(n_nodes):
            depth = max(depths(parents), default=0)
            target, draft = (random_levels(rng, n_vocab, depth) for _ in range(2))
            share = rng.choice([0, 0, 0.5, 1])
            certain = [node for node in range(n_nodes) if rng.random() < share]
            accepted = {}
            drafts = list(all_drafts(draft, parents, certain=certain))
            for name, twin in RULE_TWINS.items():
                texts, accepted[name] = emitted_by(twin, target, drafts)
                assert distance(texts, target) < 1e-12
            if len(set(parents)) == n_nodes:  # a chain; matching may be better on a wide tree
                assert accepted["rejection"] >= accepted["match"] - 1e-12
            if share == 1:  # whatever the rule, no more than the target's own probability
                assert max(accepted.values()) - min(accepted.values()) < 1e-12


@pytest.mark.parametrize(
    ("mutant", "parents", "replaced"),
    [
        (reference.block_that_breaks, (-1, 0, 1), False),
        (reference.block_with_token_residual, (-1, 0, 1), False),
        (reference.traversal_that_forgets, (-1, 0, -1), False),
        (reference.traversal, (-1, 0, -1), True),
        (reference.rejection, (-1, 0, -1), True),
    ],
)
def test_known_mistakes_are_caught(mutant: Twin, parents: tuple[int, ...], replaced: bool) -> None:
    rng = np.random.default_rng(19)
    worst = 0.0
    for _ in range(5):
        target, draft = (random_levels(rng, 4, 3) for _ in range(2))
        drafts = all_drafts(draft, parents, replaced=replaced)
        worst = max(worst, distance(emitted_by(mutant, target, drafts)[0], target))
    assert worst > 0.003


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("tokens", "parents", "path", "next_token"),
    [
        ([3, 1, 4], (), [0, 1, 2], 2),
        ([3, 1, 0], (), [0, 1], 4),
        ([0, 1, 4], (), [], 3),
        ([], (), [], 3),
        ([3, 4, 0, 1, 4, 0], (-1, 0, 1, 0, 3, -1), [0, 3, 4], 2),
        ([0, 1, 3, 4, 1], (-1, 0, -1, 2, 2), [2, 4], 4),
        ([0, 1, 2], (-1, 0, -1), [], 3),
    ],
)
def test_greedy_rules_accept_exactly_what_the_target_would_have_written(
    tokens: list[int], parents: Sequence[int], path: list[int], next_token: int, name: str
) -> None:
    """3, 1, 4; and 2 after everything else that agrees."""
    greedy = Sampling(temperature=0)
    logits = np.zeros((len(tokens) + 1, 5), np.float32)
    for node in range(-1, len(tokens)):
        before = [tokens[i] for i in reference.path_to(parents or range(-1, len(tokens) - 1), node)]
        follows = {(): 3, (3,): 1, (3, 1): 4}
        logits[node + 1, follows.get(tuple(before), 2)] = 1
    probs = np.eye(5, dtype=np.float32)[tokens].reshape(-1, 5)
    for draft in (Draft(tokens, probs, parents=parents), Draft(tokens, parents=parents)):
        target = to_probs(logits, greedy, draft=tokens)
        found = verify.rule(name)(draft, target, np.full(len(tokens) + 1, 0.99))
        assert (list(found.nodes), found.next_token) == (path, next_token)
