"""Computes acceptance probabilities from a draft's logits, and the speed-up to expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.bench.reference import ReferenceText, weights_of
from ggufspec.decoding.types import Logits


class Chances(NamedTuple):
    """For each position of a text, the probability that a drafted token is accepted.

    `greedy` (n,): at temperature 0: 1 if both models have the same most probable token, else 0.
    `sampled` (n,): at reference.TEMPERATURE: the sum over all tokens of the smaller probability.
    """

    greedy: NDArray[np.float64]
    sampled: NDArray[np.float64]


def mean_length(chances: NDArray[np.float64], n_draft: int) -> float:
    """Average number of tokens per round over a text, with drafts of `n_draft` tokens.

    `chances` (n,): the probability that each token is accepted if the tokens before it are.
    """
    n = len(chances)
    rounds = np.zeros(n + n_draft + 2)  # expected number of rounds from each token on
    for at in range(n - 1, -1, -1):
        reached = np.concatenate([[1.0], np.cumprod(chances[at : at + n_draft])])
        ended = reached - np.append(reached[1:], 0.0)  # after 0, 1 ... accepted tokens
        rounds[at] = 1 + ended @ rounds[at + 1 : at + 1 + len(ended)]
    return float(n / rounds[0]) if n else 1.0


def predicted_speedup(chances: NDArray[np.float64], passes: Sequence[float], step: float) -> float:
    """Speed-up over plain decoding with the best fixed draft length, at least 1.

    `passes`: seconds of target passes over 1, 2 ... tokens. `step`: seconds of a draft step.
    """
    return max(
        mean_length(chances, n) * passes[0] / (passes[n] + n * step) for n in range(1, len(passes))
    )


def chances_of(
    rows: Logits, text: ReferenceText, order: NDArray[np.int64], sizes: Sequence[int]
) -> list[Chances]:
    """The Chances of a text for each vocabulary size in `sizes`, by a draft's logits (n, n_vocab).

    `order`: all tokens; a vocabulary of size n keeps the first n of them.
    """
    kept = order[: max(sizes)]
    place = np.full(len(order), len(kept))
    place[kept] = np.arange(len(kept))
    logits = rows.take(kept, axis=1)
    weights = weights_of(logits)
    places = place[np.minimum(text.ids, len(order) - 1)]
    of_text = np.take_along_axis(weights, np.minimum(places, len(kept) - 1), 1)
    found = []
    for n in sizes:
        best = kept[logits[:, :n].argmax(axis=1)]
        total = np.maximum(weights[:, :n].sum(axis=1, keepdims=True), np.float32(1e-30))
        overlap = np.minimum(of_text * (places < n) / total, text.probs).sum(axis=1)
        found.append(Chances((best == text.best).astype(float), overlap.astype(float)))
    return found


def by_kind(texts: Sequence[ReferenceText], chances: Iterable[Chances]) -> dict[str, Chances]:
    """The Chances of all texts of each kind, concatenated."""
    found: dict[str, list[Chances]] = {}
    for text, each in zip(texts, chances, strict=True):
        found.setdefault(text.excerpt.kind, []).append(each)
    return {
        kind: Chances(*(np.concatenate(part) for part in zip(*each, strict=True)))
        for kind, each in found.items()
    }
