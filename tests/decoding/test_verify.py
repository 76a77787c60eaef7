"""Every rule keeps the target's distribution, and equals its numpy twin on the same uniforms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import reference

from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Rows, Sampling, to_probs
from ggufspec.decoding.types import Draft, Verify
from ggufspec.errors import OptionError

RULES = verify.names()


def random_rows(rng: np.random.Generator, n: int, n_vocab: int) -> np.ndarray:
    """Distributions, some with zeros, some one-hot."""
    rows = rng.dirichlet(np.full(n_vocab, 0.7), n) * (rng.random((n, n_vocab)) < 0.8)
    rows[np.arange(n), rng.integers(0, n_vocab, n)] += 0.01
    if rng.random() < 0.2:
        rows[0] = np.eye(n_vocab)[rng.integers(n_vocab)]
    return (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)


def test_the_rules_are_found_by_file_name() -> None:
    assert {"block", "match", "rejection"} <= set(RULES)
    with pytest.raises(OptionError, match="choose from block, match"):
        verify.rule("telepathy")


def drafted_rows(
    rng: np.random.Generator, n_draft: int, n_vocab: int, certain: str
) -> tuple[list[int], np.ndarray]:
    """Tokens, and what they were drawn from: distributions, one-hot rows, or some of each."""
    rows = random_rows(rng, n_draft, n_vocab) if n_draft else np.zeros((0, n_vocab), "f4")
    tokens = [reference.pick(row.astype(float), rng.random()) for row in rows]
    for i, token in enumerate(tokens):
        if certain == "all" or (certain == "some" and rng.random() < 0.5):
            rows[i] = np.eye(n_vocab)[token]
    return tokens, rows


@pytest.mark.parametrize("certain", ["none", "some", "all", "all, and no rows"])
@pytest.mark.parametrize("name", ["match", "rejection", "block"])
def test_native_equals_numpy_for_the_same_uniforms(name: str, certain: str) -> None:
    rng = np.random.default_rng(5)
    n_partly = 0
    for _ in range(2000):
        n_vocab, n_draft = int(rng.integers(1, 12)), int(rng.integers(0, 6))
        tokens, rows = drafted_rows(rng, n_draft, n_vocab, certain.split(",")[0])
        target_probs = random_rows(rng, n_draft + 1, n_vocab)
        uniforms = rng.random(n_draft + 1)
        draft = Draft(tokens, None if "no rows" in certain else rows)
        verdict = verify.rule(name)(draft, target_probs, uniforms)
        target, probs = target_probs.astype(float), rows.astype(float)
        if name == "match":
            expected = reference.match_verdict(tokens, target, uniforms)
        else:
            expected = getattr(reference, name)(tokens, probs, target).verdict(uniforms)
        assert (verdict.n_accepted, verdict.next_token) == expected
        n_partly += 0 < verdict.n_accepted < n_draft
    assert n_partly > 100


@pytest.mark.parametrize("name", ["match", "rejection", "block"])
def test_rows_of_certain_tokens_between_drawn_ones_are_one_hot(name: str) -> None:
    """As a drafter appends them; also where the target's row leaves one token, or forbids it."""
    rng = np.random.default_rng(6)
    kinds = set()
    for _ in range(2000):
        n_vocab, n_draft = int(rng.integers(2, 12)), int(rng.integers(1, 6))
        tokens, probs = drafted_rows(rng, n_draft, n_vocab, "some")
        rows = Rows(n_draft, n_vocab)
        for token, row in zip(tokens, probs, strict=True):
            if row.max() == 1:
                rows.append_certain(token)
            else:
                rows.append_weights(row[None])
        target = random_rows(rng, n_draft + 1, n_vocab)
        for i, token in enumerate(tokens):  # as in text that is forced, but not its tokens
            if rng.random() < 0.5:
                target[i] = 0.9 * np.eye(n_vocab, dtype=np.float32)[token] + 0.1 * target[i]
        uniforms = rng.random(n_draft + 1)
        verdict = verify.rule(name)(Draft(tokens, rows), target, uniforms)
        if name == "match":
            expected = reference.match_verdict(tokens, target.astype(float), uniforms)
        else:
            judged = getattr(reference, name)(tokens, probs.astype(float), target.astype(float))
            expected = judged.verdict(uniforms)
        assert (verdict.n_accepted, verdict.next_token) == expected
        if verdict.n_accepted < n_draft:
            kinds.add((verdict.n_accepted > 0, probs[verdict.n_accepted].max() == 1))
    assert len(kinds) == 4  # certain and drawn tokens were rejected, first ones and later ones


@pytest.mark.parametrize("target_is", ["dense", "list"])
@pytest.mark.parametrize("draft_is", ["dense", "list", "certain"])
@pytest.mark.parametrize("name", ["match", "rejection", "block"])
def test_all_forms_of_rows_are_judged_alike(name: str, draft_is: str, target_is: str) -> None:
    """Rows as the loop has them, lazy or truncated, against the same as plain arrays."""
    rng = np.random.default_rng(9)
    n_vocab, n_draft = 3000, 4
    options = {
        "dense": Sampling(temperature=1, top_k=0, top_p=1, min_p=0),
        "list": Sampling(temperature=1, top_k=40, top_p=0.95),
        "certain": Sampling(temperature=0),
    }
    lengths, n_unlike = set(), 0
    for _ in range(300):
        base = rng.normal(0, 3, (n_draft + 1, n_vocab))
        logits = (base + rng.normal(0, 0.5, base.shape)).astype(np.float32)
        target = to_probs(logits, options[target_is], draft=[0] * n_draft)
        near = base[:n_draft].astype(np.float32)
        probs = to_probs(near, options[draft_is], draft=[0] * (n_draft - 1))
        tokens = [probs.pick(i, rng.random()) for i in range(n_draft)]
        uniforms = rng.random(n_draft + 1).tolist()
        rule = verify.rule(name)
        found = rule(Draft(tokens, probs), target, uniforms)
        expected = rule(Draft(tokens, np.asarray(probs)), np.asarray(target), uniforms)
        n_unlike += found != expected
        lengths.add(found.n_accepted)
    assert len(lengths) >= 3
    assert n_unlike <= 2  # uniforms so near an edge that rounding decides


Distribution = dict[tuple[int, ...], float]
Tree = dict[tuple[int, ...], np.ndarray]
RULE_TWINS = {
    "match": reference.match,
    "rejection": reference.rejection,
    "block": reference.block,
}
MUTANTS = [reference.block_that_breaks, reference.block_with_token_residual]


def random_tree(rng: np.random.Generator, n_vocab: int, depth: int, certain: str = "none") -> Tree:
    """A distribution after every prefix of up to `depth` tokens."""
    tree = {}
    for n in range(depth + 1):
        for prefix in itertools.product(range(n_vocab), repeat=n):
            row = random_rows(rng, 1, n_vocab)[0].astype(float)
            if certain == "all" or (certain == "some" and rng.random() < 0.5):
                row = np.eye(n_vocab)[rng.integers(n_vocab)]
            tree[prefix] = row / row.sum()
    return tree


def distribution_of(tree: Tree, n: int) -> Distribution:
    """The probability of every text of n tokens."""
    distribution: Distribution = {(): 1.0}
    for _ in range(n):
        distribution = {
            (*t, x): p * q for t, p in distribution.items() for x, q in enumerate(tree[t]) if q > 0
        }
    return distribution


def distribution_by_rule(
    rule: Callable[..., reference.Judgement], target: Tree, draft: Tree, stops: set[tuple[int, ...]]
) -> tuple[Distribution, float]:
    """The exact distribution of a text after one round, then of the target alone; and E[accepted].

    A draft goes on until its prefix is one of `stops`.
    """
    depth = max(len(prefix) for prefix in stops) + 1
    distribution: Distribution = {}
    length = 0.0

    def go_on(text: tuple[int, ...], p: float) -> None:
        if len(text) == depth:
            distribution[text] = distribution.get(text, 0.0) + p
            return
        for x, q in enumerate(target[text]):
            if q > 0:
                go_on((*text, x), p * q)

    def draft_on(tokens: tuple[int, ...], p: float) -> None:
        nonlocal length
        if tokens not in stops:
            for x, q in enumerate(draft[tokens]):
                if q > 0:
                    draft_on((*tokens, x), p * q)
            return
        prefixes = [tokens[:i] for i in range(len(tokens) + 1)]
        judged = rule(
            list(tokens),
            np.array([draft[prefix] for prefix in prefixes[:-1]]).reshape(len(tokens), -1),
            np.array([target[prefix] for prefix in prefixes]),
        )
        for n, chance in enumerate(judged.length_probs()):
            length += p * chance * n
            for x, q in enumerate(judged.rests[n]):
                if chance * q > 0:
                    go_on((*tokens[:n], x), p * chance * q)

    draft_on((), 1.0)
    return distribution, length


def stops_of(
    rng: np.random.Generator, n_vocab: int, n_draft: int, early: float
) -> set[tuple[int, ...]]:
    """Where a draft ends: after n_draft tokens, or, by what has been drawn so far, sooner."""
    stops: set[tuple[int, ...]] = set()
    for n in range(1, n_draft + 1):
        for prefix in itertools.product(range(n_vocab), repeat=n):
            if any(prefix[:i] in stops for i in range(1, n)):
                continue
            if n == n_draft or rng.random() < early:
                stops.add(prefix)
    return stops


def cases(certain: str = "none") -> Iterator[tuple[Tree, Tree, set[tuple[int, ...]]]]:
    rng = np.random.default_rng(13)
    for n_vocab, n_draft in ((2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3), (2, 4)):
        for early in (0.0, 0.3):
            for _ in range(2):
                target = random_tree(rng, n_vocab, n_draft + 1)
                draft = random_tree(rng, n_vocab, n_draft, certain)
                yield target, draft, stops_of(rng, n_vocab, n_draft, early)


def distance(one: Distribution, other: Distribution) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def test_each_rule_has_a_reference_in_numpy() -> None:
    """So that the exact tests below cover it."""
    assert set(RULE_TWINS) == set(RULES)


@pytest.mark.parametrize("certain", ["none", "some", "all"])
@pytest.mark.parametrize("name", RULE_TWINS)
def test_every_text_has_exactly_the_targets_probability(name: str, certain: str) -> None:
    """By enumeration of all drafts, whose length depends on what was drawn, and all verdicts."""
    for target, draft, stops in cases(certain):
        distribution, _ = distribution_by_rule(RULE_TWINS[name], target, draft, stops)
        assert distance(distribution, distribution_of(target, len(max(stops, key=len)) + 1)) < 1e-12


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_known_wrong_versions_of_block_verification_are_caught(
    mutant: Callable[..., reference.Judgement],
) -> None:
    worst = max(
        distance(
            distribution_by_rule(mutant, target, draft, stops)[0],
            distribution_of(target, len(max(stops, key=len)) + 1),
        )
        for target, draft, stops in cases()
    )
    assert worst > 0.001


@pytest.mark.parametrize("certain", ["none", "some", "all"])
def test_block_never_keeps_less_than_token_wise_rejection(certain: str) -> None:
    gains = []
    for case in cases(certain):
        by_name = {name: distribution_by_rule(rule, *case)[1] for name, rule in RULE_TWINS.items()}
        gains.append(by_name["block"] - by_name["rejection"])
        assert by_name["rejection"] >= by_name["match"] - 1e-12
        if certain == "all":  # whatever the rule, no more than the target's own probability
            assert max(by_name.values()) - min(by_name.values()) < 1e-12
    assert min(gains) > -1e-12
    assert max(gains) > 0.01 or certain == "all"


def distribution_of_first_token(
    rule: Verify, target: np.ndarray, draft: np.ndarray, certain: bool, n_runs: int
) -> np.ndarray:
    """How often each token comes first, with n_draft = 1, over many seeded uniforms."""
    rng = np.random.default_rng(11)
    counts = np.zeros(target.shape[1])
    drafted = rng.choice(len(draft[0]), size=n_runs, p=draft[0].astype(float) / draft[0].sum())
    for token, uniforms in zip(drafted, rng.random((n_runs, 2)), strict=True):
        verdict = rule(Draft([int(token)], None if certain else draft), target, uniforms)
        counts[token if verdict.n_accepted else verdict.next_token] += 1
    return counts / n_runs


@pytest.mark.parametrize("name", RULES)
def test_the_first_token_has_the_targets_distribution(name: str) -> None:
    """40,000 runs: the standard error of a frequency is at most 0.0025, the bound is 5 of them.

    Accepting with min(1, 2 * target / draft) instead misses by 0.1 on these rows.
    """
    target = np.array([[0.5, 0.2, 0.2, 0.1, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]], np.float32)
    draft = np.array([[0.1, 0.5, 0.1, 0.2, 0.1]], np.float32)
    distribution = distribution_of_first_token(verify.rule(name), target, draft, False, 40_000)
    np.testing.assert_allclose(distribution, target[0], atol=0.0125)
    certain = np.array([[0.0, 1.0, 0.0, 0.0, 0.0]], np.float32)
    distribution = distribution_of_first_token(verify.rule(name), target, certain, True, 40_000)
    np.testing.assert_allclose(distribution, target[0], atol=0.0125)


@pytest.mark.parametrize("name", RULES)
def test_sequences_have_the_targets_distribution(name: str) -> None:
    """Texts of two tokens, drafted two at a time, with rows that depend on the text before them."""
    n_vocab, n_draft, n_runs = 3, 2, 60_000
    rng = np.random.default_rng(2)
    target = {
        prefix: random_rows(rng, 1, n_vocab)[0]
        for n in range(n_draft + 1)
        for prefix in itertools.product(range(n_vocab), repeat=n)
    }
    draft = {prefix: random_rows(rng, 1, n_vocab)[0] for prefix in target}
    rule = verify.rule(name)
    counts = np.zeros((n_vocab, n_vocab))
    for _ in range(n_runs):
        text: list[int] = []
        while len(text) < 2:
            tokens: list[int] = []
            n = 2 - len(text)
            for _ in range(n):
                row = draft[(*text, *tokens)].astype(float)
                tokens.append(reference.pick(row, rng.random()))
            prefixes = [(*text, *tokens[:i]) for i in range(n + 1)]
            verdict = rule(
                Draft(tokens, np.array([draft[prefix] for prefix in prefixes[:-1]])),
                np.array([target[prefix] for prefix in prefixes]),
                rng.random(n + 1),
            )
            text += [*tokens[: verdict.n_accepted], verdict.next_token]
        counts[text[0], text[1]] += 1
    expected = np.array([target[()][a] * target[(a,)] for a in range(n_vocab)])
    # The standard error of a frequency is at most 0.5 / sqrt(60,000) = 0.002.
    np.testing.assert_allclose(counts / n_runs, expected, atol=0.01)


@pytest.mark.parametrize("name", RULES)
def test_greedy_rules_accept_exactly_what_the_target_would_have_written(name: str) -> None:
    greedy = Sampling(temperature=0)
    logits = np.eye(5, dtype=np.float32)[[3, 1, 4, 2]]
    for tokens, verdict in (
        ([3, 1, 4], (3, 2)),
        ([3, 1, 0], (2, 4)),
        ([0, 1, 4], (0, 3)),
        ([], (0, 3)),
    ):
        probs = np.eye(5, dtype=np.float32)[tokens].reshape(-1, 5)
        for draft in (Draft(tokens, probs), Draft(tokens)):
            target = to_probs(logits[: len(tokens) + 1], greedy, draft=tokens)
            found = verify.rule(name)(draft, target, np.full(len(tokens) + 1, 0.99))
            assert (found.n_accepted, found.next_token) == verdict


@pytest.mark.parametrize("name", sorted({*RULES} - {"match"}))  # match draws anew
def test_equal_distributions_are_always_accepted(name: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = random_rows(rng, 5, 9)
        tokens = [reference.pick(row.astype(float), rng.random()) for row in rows[:4]]
        assert verify.rule(name)(Draft(tokens, rows[:4]), rows, rng.random(5)).n_accepted == 4


@pytest.mark.parametrize("name", RULES)
def test_wrong_shapes_are_refused_not_read(name: str) -> None:
    rows, uniforms = np.full((2, 4), 0.25, np.float32), np.zeros(2)
    rule = verify.rule(name)
    for draft, target, tossed in (
        (Draft([1, 2], rows), rows, uniforms),
        (Draft([1], rows[:1]), rows, uniforms[:1]),
        (Draft([4], rows[:1]), rows, uniforms),
        (Draft([-1], rows[:1]), rows, uniforms),
    ):
        with pytest.raises(ValueError, match=r"verify|outside the vocabulary"):
            rule(draft, target, tossed)
