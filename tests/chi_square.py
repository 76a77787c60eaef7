"""Pearson's test of counted texts against the probability of each."""

from __future__ import annotations

from collections.abc import Mapping

Texts = Mapping[tuple[int, ...], float]


def chi_square(counts: Mapping[tuple[int, ...], int], law: Texts) -> tuple[float, float]:
    """The statistic, and what it exceeds once in 10,000 times (Wilson and Hilferty, 1931)."""
    n_texts = sum(counts.values())
    expected = {text: p * n_texts for text, p in law.items()}
    cells = [(counts.get(text, 0), n) for text, n in expected.items() if n >= 5]
    n_free = len(cells) - 1
    assert n_free > 15
    share = 2 / (9 * n_free)
    limit = n_free * (1 - share + 3.719 * share**0.5) ** 3
    return sum((n - wanted) ** 2 / wanted for n, wanted in cells), limit
