"""numpy twins of native/: the same rules, written for reading. Slow, and used by tests only."""

from __future__ import annotations

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


def pick(probs: Row, coin: float) -> int:
    """The first token at which the cumulative probability exceeds coin * total."""
    total = probs.cumsum()
    return int(np.nonzero(total > coin * total[-1])[0][0])


def match(tokens: list[int], target: NDArray[np.float64], coins: Row) -> tuple[int, int]:
    for i in range(len(tokens)):
        drawn = pick(target[i], coins[i])
        if drawn != tokens[i]:
            return i, drawn
    return len(tokens), pick(target[-1], coins[-1])


def rejection(
    tokens: list[int], draft: NDArray[np.float64] | None, target: NDArray[np.float64], coins: Row
) -> tuple[int, int]:
    for i, token in enumerate(tokens):
        drafted = np.eye(target.shape[1])[token] if draft is None else draft[i]
        if coins[i] * drafted[token] >= target[i, token]:
            return i, pick(np.maximum(target[i] - drafted, 0), coins[-1])
    return len(tokens), pick(target[-1], coins[-1])
