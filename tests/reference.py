"""Reference implementations in numpy of the rules in native/, written for reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


def to_probs(
    logits: NDArray[np.float32],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    bias: tuple[tuple[int, float], ...] = (),
) -> Row:
    """One row (n_vocab): bias, top-k, top-p, min-p, temperature."""
    row = logits.astype(np.float64)
    for token, value in bias:
        row[token] += value
    row[np.isnan(row)] = -np.inf
    if temperature <= 0:
        return np.eye(1, len(row), int(row.argmax()))[0]
    order = np.lexsort((np.arange(len(row)), -row))  # falling logits, ties by token
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(row[order] - row[order[0]])
    if top_p < 1:
        reached = np.nonzero(weights.cumsum() >= top_p * weights.sum())[0]
        order = order[: reached[0] + 1]
    if min_p > 0:
        order = order[row[order] >= row[order[0]] + np.log(min_p)]
    probs = np.zeros_like(row)
    probs[order] = np.exp((row[order] - row[order[0]]) / temperature)
    return probs / probs.sum()


def pick(probs: Row, uniform: float) -> int:
    """The first token at which the cumulative probability exceeds uniform * total."""
    total = probs.cumsum()
    return int(np.nonzero(total > uniform * total[-1])[0][0])


# A rule is given by two things: with what chance each node of a draft passes, if it is tested, and
# what the next token is drawn from behind each. Uniforms make verdicts of it, sums make its exact
# distribution. All arrays may have further dimensions in front: many drafts of one shape.


def children(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def excess(target: Row, draft: Row, factor: Row | float = 1.0) -> Row:
    """max(factor * target - draft, 0), normalised; the target where nothing is left."""
    left = np.maximum(np.asarray(factor)[..., None] * target - draft, 0)
    total = left.sum(axis=-1, keepdims=True)
    return np.where(total > 0, left / np.where(total > 0, total, 1), target)


def of(rows: Row, tokens: NDArray[np.int64]) -> Row:
    """The probability of a token in each row."""
    return np.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]


@dataclass
class Judgement:
    """`chances[..., i]`: that node i passes. `rests[..., 1 + i, :]`: what follows it."""

    parents: Sequence[int]
    chances: Row
    rests: Row
    leaves_first: bool  # a node is tested after its children; else they are, where it passes

    def verdict(self, uniforms: Row) -> tuple[list[int], int]:
        """The accepted nodes and the next token: by one uniform for each node, and a last one."""
        passes = uniforms[:-1] < self.chances
        last = -1
        if self.leaves_first:
            last = next((node for node in self._after_children(-1) if passes[node]), -1)
        while not self.leaves_first and any(passes[children(self.parents, last)]):
            last = next(child for child in children(self.parents, last) if passes[child])
        return path_to(self.parents, last), pick(self.rests[last + 1], uniforms[-1])

    def reached(self) -> Row:
        """The probability that a node is the last accepted one; first, that none is accepted."""
        chances, found = np.moveaxis(self.chances, -1, 0), {}

        def go_on(node: int, p: Row | float) -> None:
            for child in children(self.parents, node):
                go_on(child, p * chances[child])
                p = p * (1 - chances[child])
            found[node] = p

        if self.leaves_first:
            p = np.ones(self.chances.shape[:-1])
            for node in self._after_children(-1):
                found[node], p = p * chances[node], p * (1 - chances[node])
            found[-1] = p
        else:
            go_on(-1, np.ones(self.chances.shape[:-1]))
        return np.stack([found[node] for node in range(-1, len(self.parents))], axis=-1)

    def _after_children(self, node: int) -> list[int]:
        """All nodes behind one, each after its children."""
        behind = children(self.parents, node)
        return [each for child in behind for each in (*self._after_children(child), child)]


def _arrays(
    tokens: Any, draft: Row | None, target: Row, parents: Sequence[int]
) -> tuple[NDArray[np.int64], Row, Sequence[int]]:
    """Tokens, what they were drawn from (one-hot where they were certain), and parents."""
    array = np.asarray(tokens, np.int64)
    rows = np.eye(target.shape[-1])[array] if draft is None else draft
    return array, rows, parents or range(-1, array.shape[-1] - 1)


def rejection(
    tokens: Any, draft: Row | None, target: Row, parents: Sequence[int] = ()
) -> Judgement:
    tokens, drafted, parents = _arrays(tokens, draft, target, parents)
    chances, rests = np.zeros(tokens.shape), target.copy()
    for node in range(-1, len(parents)):
        for child in children(parents, node):
            rest, row = rests[..., node + 1, :], drafted[..., child, :]
            x = tokens[..., child]
            chances[..., child] = np.minimum(of(rest, x) / of(row, x), 1)
            rests[..., node + 1, :] = excess(rest, row)
    return Judgement(parents, chances, rests, leaves_first=False)


def match(tokens: Any, draft: Row | None, target: Row, parents: Sequence[int] = ()) -> Judgement:
    """Its distribution; its uniforms mean something else (see match_verdict)."""
    return rejection(tokens, None, target, parents)


def match_verdict(
    tokens: Sequence[int], target: Row, uniforms: Row, parents: Sequence[int] = ()
) -> tuple[list[int], int]:
    parents, node = parents or range(-1, len(tokens) - 1), -1
    for uniform in uniforms:
        drawn = pick(target[node + 1], uniform)
        found = [child for child in children(parents, node) if tokens[child] == drawn]
        if not found:
            break
        node = found[0]
    return path_to(parents, node), drawn


def traversal(
    tokens: Any,
    draft: Row | None,
    target: Row,
    parents: Sequence[int] = (),
    remembers: bool = True,
) -> Judgement:
    tokens, drafted, parents = _arrays(tokens, draft, target, parents)
    chances, rests = np.zeros(tokens.shape), target.copy()

    def walk(node: int, ratio: Row) -> None:
        first, row = ratio, target[..., node + 1, :]
        for child in children(parents, node):
            if not remembers:
                ratio, row = first, target[..., node + 1, :]
            other, x = drafted[..., child, :], tokens[..., child]
            walk(child, np.minimum(ratio * of(row, x) / of(other, x), 1))
            more = np.maximum(ratio[..., None] * row - other, 0).sum(axis=-1)
            row, whole = excess(row, other, ratio), more + (1 - ratio)
            ratio = np.where(whole > 0, more / np.where(whole > 0, whole, 1), 1.0)
        rests[..., node + 1, :] = row
        if node >= 0:
            chances[..., node] = ratio

    walk(-1, np.ones(tokens.shape[:-1]))
    return Judgement(parents, chances, rests, leaves_first=True)


# Known mistakes


def traversal_that_forgets(*judged: Any) -> Judgement:
    """The next child is judged as if no sibling had been rejected."""
    return traversal(*judged, remembers=False)


def block_that_breaks(*judged: Any) -> Judgement:
    """On a chain, the first prefix that fails ends it."""
    return replace(traversal(*judged), leaves_first=False)


def block_with_token_residual(*judged: Any) -> Judgement:
    """The residual of token-wise rejection."""
    return replace(traversal(*judged), rests=rejection(*judged).rests)


class Rule(NamedTuple):
    """As StoppingRule in native/stopping_rule.h."""

    evaluate_from: list[float]
    draw_from: list[float]
    tokens: float
    seconds: float


_LOG_LEVELS = np.linspace(math.log(1e-3), 0.0, 40)
_LEVELS = np.exp(_LOG_LEVELS)


def best_rule(
    curve: list[float], step: float, probs: list[float], min_rate: float = 0.0, bonus: float = 0.0
) -> Rule:
    """Dinkelbach's iteration around a backward induction on a grid of acceptance probabilities."""
    least = max(1 / curve[0], min_rate)
    rate = least
    for _ in range(4):
        rule = rule_at(rate, curve, step, probs, bonus)
        found = max(rule.tokens / rule.seconds, least)
        is_close = abs(found - rate) < 0.005 * rate
        rate = found
        if is_close:
            break
    return rule


def rule_at(rate: float, curve: list[float], step: float, probs: list[float], bonus: float) -> Rule:
    n_most = len(curve) - 1
    evaluate_from, draw_from = [2.0] * n_most, [2.0] * n_most
    value, seconds = np.zeros(40), np.zeros(40)
    ahead = np.maximum(_LOG_LEVELS[:, None] + np.log(probs), _LOG_LEVELS[0])  # (40, n_kinds)
    for n in reversed(range(n_most)):
        stair = curve[n + 1] - curve[n]
        draw = (1 + bonus * n) * _LEVELS + value - rate * stair
        drawn = np.interp(ahead, _LOG_LEVELS, draw)
        evaluate = np.maximum(drawn, 0).mean(axis=1) - rate * step
        later = np.interp(ahead, _LOG_LEVELS, seconds) + stair
        spent = np.where(drawn > 0, later, 0).mean(axis=1) + step
        draw_from[n], evaluate_from[n] = _first_positive(draw), _first_positive(evaluate)
        value, seconds = np.maximum(evaluate, 0), np.where(evaluate > 0, spent, 0)
    tokens = 1 + value[-1] + rate * seconds[-1]
    return Rule(evaluate_from, draw_from, float(tokens), float(curve[0] + seconds[-1]))


def _first_positive(values: NDArray[np.float64]) -> float:
    k = int(np.argmax(values > 0))
    if not values[k] > 0:
        return 2.0
    if k == 0:
        return 0.0
    share = values[k] / (values[k] - values[k - 1])
    return float(_LEVELS[k] + share * (_LEVELS[k - 1] - _LEVELS[k]))
