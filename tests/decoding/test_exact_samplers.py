"""Under samplers that mix or keep a state, texts have the target's probability: by enumeration.

The loop and its distributions are the real ones. All tokens that a draft could have are tried, and
all verdicts on it. What the target alone writes is computed here, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from enumerated import TWINS, Choices, Distribution, distance
from fakes import FakeSession, hashed_logits, speculated

from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict, Verify

N_VOCAB = 3
N_TOKENS = 3
PROMPT = (2, 0)
TARGET = hashed_logits(N_VOCAB, 21, spread=1.3)
DRAFT = hashed_logits(N_VOCAB, 22, spread=1.0)
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.9}


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


# What the target alone does: the distribution of the next token, and the state after each token.

Step = tuple[np.ndarray, Callable[[int], Any]]


def xtc(logits: np.ndarray, state: Any) -> Step:
    """Probability 0.4, threshold 0.2."""
    probs = softmax(logits)
    above = sorted(np.nonzero(probs >= 0.2)[0], key=lambda token: -probs[token])
    rest = logits.copy()
    rest[above[:-1]] = -np.inf
    return 0.6 * softmax(logits, 0.9) + 0.4 * softmax(rest, 0.9), lambda token: None


def dynamic(logits: np.ndarray, state: Any) -> Step:
    """Temperature 0.9, range 0.7, exponent 1.5."""
    probs = softmax(logits)
    share = -(probs * np.log(probs)).sum() / np.log(N_VOCAB)
    return softmax(logits, 0.2 + 1.4 * share**1.5), lambda token: None


def mirostat_1(logits: np.ndarray, mu: float | None) -> Step:
    """With tau 1.5, eta 1."""
    mu = 3.0 if mu is None else mu
    probs = softmax(logits, 0.9)
    falls = -np.diff(np.log(np.sort(probs)[::-1]))
    steps = np.log(np.arange(2, N_VOCAB + 1) / np.arange(1, N_VOCAB))
    exponent = (steps * falls).sum() / (steps**2).sum()
    rest = exponent - 1
    n = (rest * 2**mu / (1 - N_VOCAB**-rest)) ** (1 / exponent)
    kept = np.argsort(-probs)[: max(int(n), 1)]
    probs = np.where(np.isin(np.arange(N_VOCAB), kept), probs, 0) / probs[kept].sum()
    return probs, lambda token: mu - (-np.log2(probs[token]) - 1.5)


def mirostat(logits: np.ndarray, mu: float | None) -> Step:
    """Version 2 with tau 1, eta 0.6."""
    mu = 2.0 if mu is None else mu
    probs = softmax(logits, 0.9)
    kept = (-np.log2(probs) <= mu) | (probs == probs.max())
    kept = kept if (-np.log2(probs) <= mu).any() else probs == probs.max()
    probs = np.where(kept, probs, 0) / probs[kept].sum()
    return probs, lambda token: mu - 0.6 * (-np.log2(probs[token]) - 1.0)


def adapted(before: np.ndarray, weighted: float, total: float) -> np.ndarray:
    far = np.abs(before - np.clip(1.0 - weighted / total, 0, 1)) / 0.3
    return softmax(np.where(before > 0, 5 - 10 * far**2 / (1 + far), -np.inf))


def adaptive(logits: np.ndarray, sums: tuple[float, float] | None) -> Step:
    """Target 0.5, decay 0.5."""
    weighted, total = sums or (1.0, 2.0)
    before = softmax(logits, 0.9)
    after = adapted(before, weighted, total)
    return after, lambda token: (before[token] + 0.5 * weighted, 1 + 0.5 * total)


def xtc_and_adaptive(seed: int) -> Callable[[np.ndarray, Any], Step]:
    """Both, with threshold 0.03. A coin decides, given a token, whether XTC had removed others."""

    def step(logits: np.ndarray, state: Any) -> Step:
        weighted, total, n_tokens = state or (1.0, 2.0, 0)
        probs = softmax(logits)
        above = sorted(np.nonzero(probs >= 0.03)[0], key=lambda token: -probs[token])
        rest = logits.copy()
        rest[above[:-1]] = -np.inf
        before = [softmax(logits, 0.9), softmax(rest, 0.9)]
        after = [
            share * adapted(each, weighted, total)
            for share, each in zip((0.6, 0.4), before, strict=True)
        ]

        def next_state(token: int) -> Any:
            is_kept = coin(seed, n_tokens) * (after[0] + after[1])[token] < after[0][token]
            observed = before[0 if is_kept else 1][token]
            return observed + 0.5 * weighted, 1 + 0.5 * total, n_tokens + 1

        return after[0] + after[1], next_state

    return step


def coin(seed: int, n_tokens: int) -> float:
    return float(mixed(seed + mixed(n_tokens)) / 2**64)


def mixed(bits: int) -> int:
    """SplitMix64, https://doi.org/10.1145/2660193.2660195."""
    bits = (bits + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


CASES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray, Any], Step]]] = {
    "xtc": ({"xtc_probability": 0.4, "xtc_threshold": 0.2}, xtc),
    "dynatemp": ({"dynatemp_range": 0.7, "dynatemp_exponent": 1.5}, dynamic),
    "mirostat_1": ({"mirostat": 1, "mirostat_tau": 1.5, "mirostat_eta": 1.0}, mirostat_1),
    "mirostat": ({"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.6}, mirostat),
    "adaptive_p": (
        {
            "samplers": ("temperature", "adaptive_p"),
            "adaptive_target": 0.5,
            "adaptive_decay": 0.5,
        },
        adaptive,
    ),
}


def target_distribution(step: Callable[[np.ndarray, Any], Step]) -> Distribution:
    going: dict[tuple[int, ...], tuple[float, Any]] = {(): (1.0, None)}
    for _ in range(N_TOKENS):
        longer = {}
        for (text, (chance, state)), token in product(going.items(), range(N_VOCAB)):
            probs, next_state = step(TARGET((*PROMPT, *text)), state)
            if probs[token] > 0:
                longer[(*text, token)] = (chance * probs[token], next_state(token))
        going = longer
    return {text: chance for text, (chance, _) in going.items()}


# All that drafts and verdicts can be

SHAPES: dict[str, Sequence[int]] = {
    "chain": (),
    "tree": (-1, 0, -1, 2),  # two branches of two tokens
}


class Drawn:
    """A draft of four nodes at most, each of whose tokens is tried; siblings differ."""

    def __init__(self, choices: Choices, parents: Sequence[int]) -> None:
        self._choices, self._parents = choices, parents

    def draft(self, tokens: Sequence[int], n_most: int) -> Draft:
        n = min(n_most, 2)
        parents = [each for each in self._parents if n == 2 or (n and each < 0)]
        drawn, rows = list[int](), list[list[float]]()
        for node in range(len(parents) or n):
            parent = parents[node] if parents else node - 1
            prefix = (*tokens, *([] if parent < 0 else [drawn[parent]]))
            siblings = [drawn[i] for i, each in enumerate(parents[:node]) if each == parent]
            rows.append(drafted_from(prefix[-2:], tuple(siblings)))
            drawn.append(self._choices.choose(rows[-1]))
        return Draft(drawn, np.array(rows, np.float32) if rows else None, parents=parents)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None: ...


@cache
def drafted_from(last: tuple[int, ...], siblings: tuple[int, ...]) -> list[float]:
    row = softmax(DRAFT(last))
    row[[*siblings]] = 0
    drafted: list[float] = (row / row.sum()).tolist()
    return drafted


# The probabilities of all verdicts, by all that a rule is given: most drafts come again.
WEIGHTS: dict[tuple[object, ...], list[float]] = {}


def judged(rule: str, choices: Choices) -> Verify:
    """Any verdict on a chain or a tree, with its probability."""

    def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        target = np.asarray(target_probs)
        drafted = None if draft.probs is None else np.asarray(draft.probs)
        parents = list(draft.parents) or list(range(-1, len(draft.tokens) - 1))
        key = (rule, *draft.tokens, *parents, target.tobytes())
        key += (None if drafted is None else drafted.tobytes(),)
        if key not in WEIGHTS:
            probs = None if drafted is None else drafted.astype(float)
            twin = TWINS[rule](list(draft.tokens), probs, target.astype(float), parents)
            chances = np.asarray(twin.reached())[:, None] * twin.rests
            WEIGHTS[key] = chances.ravel().tolist()
        node, token = divmod(choices.choose(WEIGHTS[key]), N_VOCAB)
        path, last = list[int](), node - 1
        while last >= 0:
            path.insert(0, last)
            last = parents[last]
        return Verdict(len(path), token, path if draft.parents else None)

    return verify


def all_texts(rule: str, shape: str, sampling: Sampling, seed: int = 0) -> Distribution:
    choices, found = Choices(), Distribution()
    for _ in choices.runs():
        tokens = list(PROMPT)
        for _round in rounds_of(tokens, choices, rule, shape, sampling.begun(seed)):
            pass
        text = tuple(tokens[len(PROMPT) :])
        found[text] = found.get(text, 0.0) + choices.probability
    return found


def rounds_of(
    tokens: list[int], choices: Choices, rule: str, shape: str, sampling: Sampling
) -> Iterator[object]:
    return speculated(
        tokens,
        target=FakeSession(TARGET),
        drafter=Drawn(choices, SHAPES[shape]),
        verify=judged(rule, choices),
        sampling=sampling,
        uniforms=lambda n: [0.5] * n,
        n_draft=4,
        n_end=len(PROMPT) + N_TOKENS,
    )


@pytest.mark.parametrize("rule", TWINS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_every_text_has_the_targets_probability(case: str, shape: str, rule: str) -> None:
    options, step = CASES[case]
    found = all_texts(rule, shape, Sampling(**{**OFF, **options}))
    assert sum(found.values()) == pytest.approx(1)
    assert distance(found, target_distribution(step)) < 1e-5


@pytest.mark.parametrize("rule", TWINS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_text_has_the_targets_probability_given_the_coins_of_xtc(
    shape: str, rule: str
) -> None:
    options = {**OFF, **CASES["adaptive_p"][0], "samplers": ("xtc", "temperature", "adaptive_p")}
    sampling = Sampling(**options, xtc_probability=0.4, xtc_threshold=0.03)
    laws = [target_distribution(xtc_and_adaptive(seed)) for seed in range(3)]
    assert all(distance(laws[seed], laws[seed - 1]) > 0.001 for seed in range(3))
    for seed, law in enumerate(laws):
        assert distance(all_texts(rule, shape, sampling, seed), law) < 1e-5


@pytest.mark.parametrize("case", ["mirostat_1", "mirostat", "adaptive_p"])
def test_a_state_that_each_round_begins_anew_is_found(case: str) -> None:
    """The test above sees a wrong state."""
    options, step = CASES[case]
    sampling = Sampling(**{**OFF, **options})
    choices, found = Choices(), Distribution()
    for _ in choices.runs():
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + N_TOKENS:
            next(iter(rounds_of(tokens, choices, "traversal", "chain", sampling)))
        text = tuple(tokens[len(PROMPT) :])
        found[text] = found.get(text, 0.0) + choices.probability
    assert distance(found, target_distribution(step)) > 0.01


def test_a_coin_of_xtc_for_a_whole_round_is_found() -> None:
    """It is one for each token; the test above sees the difference."""
    options, step = CASES["xtc"]
    both = [Sampling(**{**OFF, **options, "xtc_probability": each}) for each in (0.0, 1.0)]
    choices, found = Choices(), Distribution()
    for _ in choices.runs():
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + N_TOKENS:
            sampling = both[choices.choose([0.6, 0.4])]
            next(iter(rounds_of(tokens, choices, "traversal", "chain", sampling)))
        text = tuple(tokens[len(PROMPT) :])
        found[text] = found.get(text, 0.0) + choices.probability
    assert distance(found, target_distribution(step)) > 0.001
