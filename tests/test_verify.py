"""Every rule keeps the target's distribution, and agrees with its numpy twin on the same coins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference

from ggufspec import verify
from ggufspec.core import Draft, Verify
from ggufspec.errors import OptionError
from ggufspec.sampling import Sampling, to_probs

RULES = verify.names()


def random_rows(rng: np.random.Generator, n: int, n_vocab: int) -> np.ndarray:
    """Distributions, some with zeros, some one-hot."""
    rows = rng.dirichlet(np.full(n_vocab, 0.7), n) * (rng.random((n, n_vocab)) < 0.8)
    rows[np.arange(n), rng.integers(0, n_vocab, n)] += 0.01
    if rng.random() < 0.2:
        rows[0] = np.eye(n_vocab)[rng.integers(n_vocab)]
    return (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)


def test_the_rules_are_found_by_file_name() -> None:
    assert {"match", "rejection"} <= set(RULES)
    with pytest.raises(OptionError, match="choose from match"):
        verify.rule("telepathy")


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("name", ["match", "rejection"])
def test_native_equals_numpy_on_the_same_coins(name: str, certain: bool) -> None:
    rng = np.random.default_rng(5)
    n_partly = 0
    for _ in range(2000):
        n_vocab, n_draft = int(rng.integers(1, 12)), int(rng.integers(0, 6))
        draft_probs = (
            random_rows(rng, n_draft, n_vocab) if n_draft else np.zeros((0, n_vocab), "f4")
        )
        target_probs = random_rows(rng, n_draft + 1, n_vocab)
        tokens = [reference.pick(row.astype(float), rng.random()) for row in draft_probs]
        coins = rng.random(n_draft + 1)
        draft = Draft(tokens, None if certain else draft_probs)
        verdict = verify.rule(name)(draft, target_probs, coins)
        target = target_probs.astype(float)
        if name == "match":
            expected = reference.match(tokens, target, coins)
        else:
            judged = None if certain else draft_probs.astype(float)
            expected = reference.rejection(tokens, judged, target, coins)
        assert (verdict.n_accepted, verdict.next_token) == expected
        n_partly += 0 < verdict.n_accepted < n_draft
    assert n_partly > 100


def law_of_first_token(
    rule: Verify, target: np.ndarray, draft: np.ndarray, certain: bool, n_runs: int
) -> np.ndarray:
    """How often each token comes first, with n_draft = 1, over many seeded coins."""
    rng = np.random.default_rng(11)
    counts = np.zeros(target.shape[1])
    drafted = rng.choice(len(draft[0]), size=n_runs, p=draft[0].astype(float) / draft[0].sum())
    for token, coins in zip(drafted, rng.random((n_runs, 2)), strict=True):
        verdict = rule(Draft([int(token)], None if certain else draft), target, coins)
        counts[token if verdict.n_accepted else verdict.next_token] += 1
    return counts / n_runs


@pytest.mark.parametrize("name", RULES)
def test_the_first_token_has_the_targets_law(name: str) -> None:
    """40,000 runs: the standard error of a frequency is at most 0.0025, the bound is 5 of them.

    Accepting with min(1, 2 * target / draft) instead misses by 0.1 on these rows.
    """
    target = np.array([[0.5, 0.2, 0.2, 0.1, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]], np.float32)
    draft = np.array([[0.1, 0.5, 0.1, 0.2, 0.1]], np.float32)
    law = law_of_first_token(verify.rule(name), target, draft, False, 40_000)
    np.testing.assert_allclose(law, target[0], atol=0.0125)
    certain = np.array([[0.0, 1.0, 0.0, 0.0, 0.0]], np.float32)
    law = law_of_first_token(verify.rule(name), target, certain, True, 40_000)
    np.testing.assert_allclose(law, target[0], atol=0.0125)


@pytest.mark.parametrize("name", RULES)
def test_sequences_have_the_targets_law(name: str) -> None:
    """Texts of two tokens, drafted two at a time from prefix-dependent rows, against exact laws."""
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
    target = to_probs(np.eye(5, dtype=np.float32)[[3, 1, 4, 2]], greedy)
    for tokens, verdict in (
        ([3, 1, 4], (3, 2)),
        ([3, 1, 0], (2, 4)),
        ([0, 1, 4], (0, 3)),
        ([], (0, 3)),
    ):
        probs = np.eye(5, dtype=np.float32)[tokens].reshape(-1, 5)
        for draft in (Draft(tokens, probs), Draft(tokens)):
            found = verify.rule(name)(
                draft, target[: len(tokens) + 1], np.full(len(tokens) + 1, 0.99)
            )
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
    rows, coins = np.full((2, 4), 0.25, np.float32), np.zeros(2)
    rule = verify.rule(name)
    for draft, target, tossed in (
        (Draft([1, 2], rows), rows, coins),
        (Draft([1], rows[:1]), rows, coins[:1]),
        (Draft([4], rows[:1]), rows, coins),
        (Draft([-1], rows[:1]), rows, coins),
    ):
        with pytest.raises(ValueError, match="verify"):
            rule(draft, target, tossed)
