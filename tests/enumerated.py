"""Enumerates all that chance can do in speculative decoding, with the probability of each way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import reference

from ggufspec.decoding import verify
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict, Verify

Distribution = dict[tuple[int, ...], float]

TWINS = {
    "traversal": reference.traversal,
    "rejection": reference.rejection,
    "match": reference.match,
}


def distance(one: Distribution, other: Distribution) -> float:
    """Total variation."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other}) / 2


class Choices:
    """Runs a program once for each way through its choices."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, Sequence[float]]] = []  # of this run
        self._planned: list[int] = []
        self.probability = 1.0

    def runs(self) -> Iterator[None]:
        while True:
            self._taken, self.probability = [], 1.0
            yield
            while self._taken and not any(self._taken[-1][1][self._taken[-1][0] + 1 :]):
                self._taken.pop()
            if not self._taken:
                return
            last, probs = self._taken[-1]
            after = next(i for i in range(last + 1, len(probs)) if probs[i] > 0)
            self._planned = [taken for taken, _ in self._taken[:-1]] + [after]

    def choose(self, probs: Sequence[float]) -> int:
        n = len(self._taken)
        first = next(i for i, p in enumerate(probs) if p > 0)
        taken = self._planned[n] if n < len(self._planned) else first
        self._taken.append((taken, probs))
        self.probability *= probs[taken]
        return taken


# What a rule may answer, and how probable that is, by all that it is given: most drafts come again.
ANSWERS: dict[tuple[object, ...], tuple[list[Verdict], list[float]]] = {}


def judged(name: str, choices: Choices) -> Verify:
    """Any verdict of a rule, by its twin; the rule itself gives it for the right uniforms."""

    def rule(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        target = np.asarray(target_probs)
        probs = None if draft.probs is None else np.asarray(draft.probs)
        key = (name, *draft.tokens, target.tobytes(), None if probs is None else probs.tobytes())
        if key not in ANSWERS:
            ANSWERS[key] = answers(name, draft, target_probs)
        verdicts, weights = ANSWERS[key]
        return verdicts[choices.choose(weights)]

    return rule


def answers(name: str, draft: Draft, target_probs: Probs) -> tuple[list[Verdict], list[float]]:
    """All verdicts and their weights; the rule gives each that is possible."""
    tokens = list(draft.tokens)
    target = np.asarray(target_probs).astype(float)
    probs = None if draft.probs is None else np.asarray(draft.probs).astype(float)
    twin = TWINS[name](tokens, probs, target)
    verdicts, weights = [], []
    for n, chance in enumerate(twin.reached()):
        for token, q in enumerate(twin.rests[n]):
            verdicts.append(Verdict(n, token))
            weights.append(float(chance * q))
        if chance > 0 and not twin.rests[n].any():  # behind the end of a text
            verdicts.append(Verdict(n, -1))
            weights.append(float(chance))
    for verdict, weight in zip(verdicts, weights, strict=True):
        if weight > 0 and (passing := uniforms_for(name, twin, tokens, target, verdict)):
            assert verify.rule(name)(draft, target_probs, passing) == verdict
    return verdicts, weights


def uniforms_for(
    name: str,
    twin: reference.Judgement,
    tokens: Sequence[int],
    target: np.ndarray,
    verdict: Verdict,
) -> list[float] | None:
    """Uniforms with which a rule gives that verdict; None if they are too close to an edge."""
    n, token = verdict[:2]
    if token < 0:
        return None

    def within(probs: np.ndarray, x: int) -> tuple[float, float]:
        total = probs.sum()
        return float(probs[:x].sum() / total), float(probs[: x + 1].sum() / total)

    if name == "match":
        drawn = [*tokens[:n], token]
        edges = [within(target[i], x) for i, x in enumerate(drawn)]
        edges += [(0.0, 1.0)] * (len(tokens) - n)
    else:
        edges = [(0.0, chance) for chance in twin.chances]
        failing = range(n, len(tokens)) if twin.leaves_first else [n] if n < len(tokens) else []
        for i in failing:
            edges[i] = (twin.chances[i], 1.0)
        edges.append(within(twin.rests[n], token))
    if any(high - low < 1e-4 for low, high in edges):
        return None
    return [(low + high) / 2 for low, high in edges]
