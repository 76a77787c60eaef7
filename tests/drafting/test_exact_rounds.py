"""Texts have the target's probability after a round with a tree or a block: by enumeration.

How many tokens are drawn depends on logit gaps, and on the tokens drawn before; never on the token
that is drawn next. A head has all rows of a block, so that the gaps are known before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import reference
from enumerated import TWINS, Choices, Distribution, distance
from fake_blocks import FakeBlocks
from fakes import FakeSession, drafter_of, hashed_logits, known_costs

from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Draft, Drafter, Probs, Uniforms
from ggufspec.drafting.draft_length import Coefficients, LengthPolicy

N_VOCAB = 3
N_ROWS = 3  # of a block
SAMPLING = Sampling(temperature=1, top_k=0, top_p=1, min_p=0)
# Thirds and halves, also without a token or two; a head is sure, or not, or sure of one of two.
WEIGHTS = [(1, 1, 1), (1, 1, 0), (0, 1, 1), (2, 1, 0), (0, 2, 1), (1, 0, 2), (0, 1, 0), (1, 2, 0)]
TARGET = hashed_logits(N_VOCAB, 5, spread=1.0)


@cache
def weights_of(*numbers: int) -> np.ndarray:
    weights = WEIGHTS[np.random.default_rng(numbers).integers(len(WEIGHTS))]
    with np.errstate(divide="ignore"):
        return np.log(np.array(weights, float))


def independent(known: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
    """As of DFlash: by the text, and by how far behind it."""
    return weights_of(7, *known[-2:], len(drafted))


def chained(known: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
    """As of DFlash2: by the token before, too."""
    return weights_of(8, *known[-2:], len(drafted), *drafted[-1:])


HEADS = {"independent": independent, "chained": chained}


def session_of(draft: str, text: Sequence[int], n_rows: int = N_ROWS) -> FakeSession:
    """Of a head, by its name in HEADS, or of a draft model."""
    if draft == "model":
        return FakeSession(lambda prefix: weights_of(9, *prefix[-2:]))
    return FakeBlocks(text, HEADS[draft], n_rows, is_chained=draft == "chained")


@cache
def target_after(last: tuple[int, ...]) -> np.ndarray:
    weights = np.exp(TARGET(last).astype(np.float32).astype(float))
    return weights / weights.sum()


def chance_of(prompt: Sequence[int], text: Sequence[int]) -> float:
    """The target's probability of a text."""
    prefix, chance = list(prompt), 1.0
    for token in text:
        chance *= float(target_after(tuple(prefix[-2:]))[token])
        prefix.append(token)
    return chance


def target_distribution(prompt: Sequence[int], n_tokens: int) -> Distribution:
    texts = product(range(N_VOCAB), repeat=n_tokens)
    return {text: chance_of(prompt, text) for text in texts}


# Policies

PRIOR, SECOND = (-1.5, 4.0), (0.4, 0.3)


def auto(
    curve: Sequence[float],
    bonus: float = 0.0,
    *,
    step: float = 0.2,
    n_per_step: int = N_ROWS,
    prior: Coefficients = PRIOR,
) -> LengthPolicy:
    return LengthPolicy(known_costs(curve, step, n_per_step), prior, SECOND, block_bonus=bonus)


POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: LengthPolicy(None, PRIOR, SECOND),
    "flat": lambda: auto([1, 1.05, 1.1, 1.15, 1.2]),
    "rising": lambda: auto([1, 1.3, 1.6, 1.9, 2.2], bonus=0.05),
    "stairs": lambda: auto([1, 1.6, 1.7, 1.75, 2.6]),  # two tokens or none
}


LENGTHS = {"fixed": {3}, "flat": {2, 3}, "rising": {0, 1, 2, 3}, "stairs": {0, 3}}


# One round, with trees


class Sixths:
    """Uniforms of which any of WEIGHTS has all its draws."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._values: dict[int, float] = {}

    def __call__(self, n: int) -> Uniforms:
        self._values.clear()
        return self  # type: ignore[return-value]

    def __getitem__(self, i: int) -> float:
        if i not in self._values:
            self._values[i] = (self._choices.choose([1 / 6] * 6) + 0.5) / 6
        return self._values[i]


def exactly(probs: Probs) -> np.ndarray:
    """What float32 has rounded."""
    return np.array([exact_row(tuple(row)) for row in np.asarray(probs).tolist()])


@cache
def exact_row(row: tuple[float, ...]) -> list[float]:
    exact = [float(Fraction(p).limit_denominator(6)) for p in row]
    np.testing.assert_allclose(row, exact, atol=1e-6)
    return exact


def after_a_round(
    head: str,
    policy: Callable[[], LengthPolicy],
    prompt: Sequence[int],
    *,
    n_draft: int = N_ROWS,
    n_rows: int = N_ROWS,
    **options: Any,
) -> tuple[dict[str, float], set[tuple[int, ...]]]:
    """By rule: how far texts whose first round is speculative are from the target's distribution.

    Also the shapes of its drafts: their lengths, and their parents if they branch.
    """
    found: dict[str, Distribution] = {rule: {} for rule in TWINS}
    shapes, choices = set(), Choices()
    known: dict[tuple[object, ...], list[tuple[float, tuple[int, ...]]]] = {}
    for _ in choices.runs():
        session = session_of(head, prompt, n_rows)
        drafter = made(policy(), session, Sixths(choices), n_draft=n_draft, **options)
        draft = drafter.draft(prompt, n_draft)
        shapes.add((len(draft.tokens), *draft.parents))
        probs = None if draft.probs is None else exactly(draft.probs)
        for rule in TWINS:
            key = (rule, *draft.tokens, *draft.parents, None if probs is None else probs.tobytes())
            if key not in known:
                known[key] = outcomes(rule, draft, probs, prompt)
            for p, text in known[key]:
                found[rule][text] = found[rule].get(text, 0.0) + choices.probability * p
    wanted = target_distribution(prompt, n_draft + 1)
    distances = {
        rule: distance(ended(prompt, texts, n_draft + 1), wanted) for rule, texts in found.items()
    }
    return distances, shapes


def ended(prompt: Sequence[int], texts: Distribution, n_tokens: int) -> Distribution:
    """The target writes what they lack."""
    found: Distribution = {}
    for text, p in texts.items():
        for tail in product(range(N_VOCAB), repeat=n_tokens - len(text)):
            chance = chance_of([*prompt, *text], tail)
            found[text + tail] = found.get(text + tail, 0.0) + p * chance
    return found


def outcomes(
    rule: str, draft: Draft, probs: np.ndarray | None, prompt: Sequence[int]
) -> list[tuple[float, tuple[int, ...]]]:
    """What a rule makes of a draft: each text, and its probability."""
    parents = list(draft.parents) or list(range(-1, len(draft.tokens) - 1))
    paths = [reference.path_to(parents, node) for node in range(-1, len(parents))]
    texts = [tuple(draft.tokens[node] for node in path) for path in paths]
    target = np.array([target_after((*prompt, *text)[-2:]) for text in texts])
    judgement = TWINS[rule](list(draft.tokens), probs, target, parents)
    return [
        (float(p * q), (*text, token))
        for p, text, rest in zip(judgement.reached(), texts, judgement.rests, strict=True)
        for token, q in enumerate(rest)
        if p * q > 0
    ]


def made(
    policy: LengthPolicy, session: FakeSession, uniforms: Any, *, name: str = "model", **how: Any
) -> Drafter:
    given = {"sampling": SAMPLING, "uniforms": uniforms, "policy": policy, "n_leaves": 16}
    made: Drafter = drafter_of(name, session, **{"tree": "on", "n_draft": N_ROWS, **given, **how})
    return made


PROMPTS = [(0, 1, 2, 0, 1, 1, 2, 0, *last) for last in product(range(N_VOCAB), repeat=2)]


@pytest.mark.parametrize("tree", ["off", "on"])
@pytest.mark.parametrize("head", HEADS)
def test_every_text_has_the_targets_probability(head: str, tree: str) -> None:
    """By token-wise, block (of chains) and traversal verification, and by equality."""
    for name, policy in POLICIES.items():
        seen: set[tuple[int, ...]] = set()
        for prompt in PROMPTS[::2]:
            distances, shapes = after_a_round(head, policy, prompt, tree=tree)
            assert max(distances.values()) < 1e-12
            seen |= shapes
        if tree == "off":
            assert seen >= {(n,) for n in LENGTHS[name]}
        elif name != "rising":
            assert any(parents for _, *parents in seen)


@pytest.mark.parametrize("options", [{"n_rows": 2}, {"name": "auto"}], ids=str)
def test_so_it_has_at_the_end_of_a_block_and_beside_n_grams(options: dict[str, Any]) -> None:
    for prompt in PROMPTS[::4]:
        for name in ("fixed", "flat"):
            distances, shapes = after_a_round("chained", POLICIES[name], prompt, **options)
            assert max(distances.values()) < 1e-12
            assert shapes - {(0,)}


# A draft model with probable branches

MODEL_PRIOR = (0.4, 0.3)
MODEL_POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: LengthPolicy(None, MODEL_PRIOR, SECOND),
    "flat": lambda: auto([1, 1.01, 1.02, 1.03, 1.04], step=0.05, n_per_step=1, prior=MODEL_PRIOR),
}


@pytest.mark.parametrize("policy", MODEL_POLICIES)
@pytest.mark.parametrize("name", ["model", "auto"])
def test_so_it_has_with_the_trees_of_a_draft_model(name: str, policy: str) -> None:
    n_shapes = []
    for prompt in PROMPTS[::3]:
        distances, shapes = after_a_round("model", MODEL_POLICIES[policy], prompt, name=name)
        assert max(distances.values()) < 1e-12
        n_shapes.append(len(shapes))
    assert max(n_shapes) > 1, "the shape depends on the tokens that were drawn"
