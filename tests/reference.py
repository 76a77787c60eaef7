"""Reference implementations in numpy of the rules in native/, written for reading."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

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
        return np.eye(len(row))[row.argmax()]
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


# A rule is told by two things: with what chance each prefix of the draft passes, if the rule comes
# to ask, and what the next token is drawn from behind each prefix. Uniforms make verdicts of it,
# sums make its exact law.


def excess(target: Row, draft: Row, factor: float = 1.0) -> Row:
    """max(factor * target - draft, 0), normalised; the target where nothing is left."""
    left = np.maximum(factor * target - draft, 0)
    return left / left.sum() if left.sum() > 0 else target


def rows_of(
    tokens: list[int], draft: NDArray[np.float64] | None, n_vocab: int
) -> NDArray[np.float64]:
    """What the tokens were drawn from; one-hot where they were certain."""
    return np.eye(n_vocab)[tokens] if draft is None else draft


@dataclass
class Judgement:
    """`chances[i]`: that a prefix of i + 1 tokens passes. `rests[i]`: what follows i tokens."""

    chances: list[float]
    rests: list[Row]
    from_behind: bool  # the longest that passes stands, or all before the first that does not

    def verdict(self, uniforms: Row) -> tuple[int, int]:
        """`uniforms` (n_draft + 1): one for each prefix, the last for the draw."""
        passes = [
            uniform < chance for uniform, chance in zip(uniforms[:-1], self.chances, strict=True)
        ]
        if self.from_behind:
            n = max((i + 1 for i, passed in enumerate(passes) if passed), default=0)
        else:
            n = next((i for i, passed in enumerate(passes) if not passed), len(passes))
        return n, pick(self.rests[n], uniforms[-1])

    def law(self) -> list[float]:
        """The probability that exactly n tokens stand, n from 0 to n_draft."""
        n_draft = len(self.chances)
        kept = np.array([1.0, *self.chances])
        fails = np.array([*(1 - chance for chance in self.chances), 1.0])
        if self.from_behind:
            return [float(kept[n] * fails[n:n_draft].prod()) for n in range(n_draft + 1)]
        return [float(kept[: n + 1].prod() * fails[n]) for n in range(n_draft + 1)]


def rejection(
    tokens: list[int], draft: NDArray[np.float64] | None, target: NDArray[np.float64]
) -> Judgement:
    drafted = rows_of(tokens, draft, target.shape[1])
    chances = [min(1.0, target[i, x] / drafted[i, x]) for i, x in enumerate(tokens)]
    rests = [excess(target[i], drafted[i]) for i in range(len(tokens))]
    return Judgement(chances, [*rests, target[-1]], from_behind=False)


def match(
    tokens: list[int], draft: NDArray[np.float64] | None, target: NDArray[np.float64]
) -> Judgement:
    """As a law; its uniforms mean something else (see match_verdict)."""
    certain = np.eye(target.shape[1])[tokens]
    chances = [float(target[i, x]) for i, x in enumerate(tokens)]
    rests = [excess(target[i], certain[i]) for i in range(len(tokens))]
    return Judgement(chances, [*rests, target[-1]], from_behind=False)


def match_verdict(tokens: list[int], target: NDArray[np.float64], uniforms: Row) -> tuple[int, int]:
    for i in range(len(tokens)):
        drawn = pick(target[i], uniforms[i])
        if drawn != tokens[i]:
            return i, drawn
    return len(tokens), pick(target[-1], uniforms[-1])


def block(
    tokens: list[int], draft: NDArray[np.float64] | None, target: NDArray[np.float64]
) -> Judgement:
    drafted = rows_of(tokens, draft, target.shape[1])
    ratios = [1.0]
    for i, x in enumerate(tokens):
        ratios.append(min(ratios[i] * target[i, x] / drafted[i, x], 1.0))
    chances = []
    for i in range(1, len(tokens)):
        more = np.maximum(ratios[i] * target[i] - drafted[i], 0).sum()
        whole = more + 1 - ratios[i]
        chances.append(float(more / whole) if whole > 0 else 1.0)
    rests = [excess(target[i], drafted[i], ratios[i]) for i in range(len(tokens))]
    return Judgement([*chances, *ratios[1:][-1:]], [*rests, target[-1]], from_behind=True)


def block_that_breaks(
    tokens: list[int], draft: NDArray[np.float64] | None, target: NDArray[np.float64]
) -> Judgement:
    """A known mistake: the first prefix that fails ends it."""
    return replace(block(tokens, draft, target), from_behind=False)


def block_with_token_residual(
    tokens: list[int], draft: NDArray[np.float64] | None, target: NDArray[np.float64]
) -> Judgement:
    """A known mistake: the residual of token-wise rejection."""
    return replace(block(tokens, draft, target), rests=rejection(tokens, draft, target).rests)


class Rule(NamedTuple):
    """As StoppingRule in native/draft_length.h."""

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
