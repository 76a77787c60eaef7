"""Two-sample tests, their effect sizes and their power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

N_PERMUTATIONS = 1999  # the smallest p-value is 1 / 2000
_POWER = 0.9
_N_BUCKETS = 4093  # number of hashes of tokens and pairs of tokens; a prime
_SERIES = np.arange(1, 101)


@dataclass(frozen=True)
class Test:
    """One comparison of speculative with plain texts.

    `effect` is in [`low`, `high`] with confidence 1 - alpha (None: the effect has no natural
    scale); `p`: p-value of this test alone; `p_holm`: p-value adjusted for all tests.
    """

    name: str
    effect: float
    low: float | None
    high: float | None
    p: float
    p_holm: float

    __test__ = False  # for pytest: this class is not a test


def uniform_shift(name: str, plain: Floats, speculative: Floats, alpha: float) -> Test:
    """Tests the difference of means, speculative - plain, of quantiles: uniform if texts agree.

    It is P(a speculative value is larger than a plain one) - 1/2, and at most the total variation
    distance of the two distributions. The variance of a uniform, 1/12, also holds for sums over
    texts whose length depends on their tokens (Wald's second identity).
    """
    effect = float(speculative.mean() - plain.mean())
    error = _shift_error(len(plain), len(speculative))
    reach = NormalDist().inv_cdf(1 - alpha / 2) * error
    p = math.erfc(abs(effect) / error / math.sqrt(2))
    return Test(name, effect, effect - reach, effect + reach, p, p)


def kolmogorov_smirnov(name: str, plain: Floats, speculative: Floats, alpha: float) -> Test:
    """Tests the largest difference of the distribution functions; its interval is the band of
    Dvoretzky, Kiefer, Wolfowitz and Massart (https://doi.org/10.1214/aop/1176990746)."""
    grid = np.concatenate([plain, speculative])
    below = [
        np.searchsorted(np.sort(sample), grid, side="right") / len(sample)
        for sample in (plain, speculative)
    ]
    effect = float(np.abs(below[0] - below[1]).max())
    # Each of the two functions is within its band with confidence 1 - alpha / 2.
    reach = sum(math.sqrt(math.log(4 / alpha) / (2 * len(s))) for s in (plain, speculative))
    n = len(plain) * len(speculative) / (len(plain) + len(speculative))
    p = kolmogorov_tail(effect * math.sqrt(n))
    return Test(name, effect, max(effect - reach, 0.0), min(effect + reach, 1.0), p, p)


def kolmogorov_tail(x: float) -> float:
    """P(K > x) of Kolmogorov's asymptotic distribution; conservative for small samples."""
    if x < 0.2:
        return 1.0  # exact to 12 digits; the series converges slowly there
    terms = (-1.0) ** (_SERIES - 1) * np.exp(-2.0 * (_SERIES * x) ** 2)
    return float(min(max(2 * terms.sum(), 0.0), 1.0))


def text_profiles(texts: Sequence[Sequence[int]]) -> Floats:
    """Counts of tokens and of pairs of successive tokens in each text: (n_texts, n_buckets)."""
    profiles = np.zeros((len(texts), _N_BUCKETS))
    for row, text in zip(profiles, texts, strict=True):
        tokens = np.asarray(text, np.int64)
        pairs = tokens[:-1] * 1_000_003 + tokens[1:] * 7_919 + 1
        np.add.at(row, np.concatenate([tokens, pairs]) % _N_BUCKETS, 1.0)
    return profiles


def energy(
    name: str,
    profiles: Floats,
    is_speculative: NDArray[np.bool_],
    groups: NDArray[np.int64],
    rng: np.random.Generator,
    n_permutations: int = N_PERMUTATIONS,
) -> Test:
    """Tests the energy distance of two sets of texts by permuting labels within each group.

    `profiles`: (n, n_features); `groups` (n): the prompt of each text. If both kinds have the same
    distribution, texts of one prompt are exchangeable, so the p-value is exact for any number and
    length of texts. The effect is the distance minus the mean over all permutations.
    Szekely and Rizzo, https://doi.org/10.1016/j.jspi.2013.03.018
    """
    _, group_of = np.unique(groups, return_inverse=True)
    means = np.zeros((int(np.max(group_of)) + 1, profiles.shape[1]))
    np.add.at(means, group_of, profiles)
    means /= np.bincount(group_of)[:, None]
    centred = profiles - means[group_of]  # removes what texts of one prompt have in common
    squares = (centred**2).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * centred @ centred.T
    np.sqrt(np.maximum(distances, 0), out=distances)

    labels = np.tile(is_speculative, (n_permutations + 1, 1))
    by_group = np.argsort(group_of, kind="stable")
    shuffled = np.argsort(rng.random(labels[1:].shape) + group_of, axis=1)
    np.put_along_axis(labels[1:], shuffled, labels[1:, by_group], axis=1)
    n_speculative = int(is_speculative.sum())
    weights = np.where(labels, 1 / n_speculative, -1 / (len(labels[0]) - n_speculative))
    found = -np.einsum("ij,ij->i", weights @ distances, weights)
    # Values that differ only by the rounding of sums count as equal.
    p = float(np.mean(found >= found[0] - 1e-9 * max(abs(found[0]), 1.0)))
    return Test(name, float(found[0] - found.mean()), None, None, p, p)


def holm(tests: Sequence[Test]) -> tuple[Test, ...]:
    """The tests in the same order, with p-values adjusted by Holm's method."""
    adjusted = [0.0] * len(tests)
    worst = 0.0
    for rank, i in enumerate(sorted(range(len(tests)), key=lambda i: tests[i].p)):
        worst = max(worst, min((len(tests) - rank) * tests[i].p, 1.0))
        adjusted[i] = worst
    return tuple(replace(test, p_holm=p) for test, p in zip(tests, adjusted, strict=True))


def smallest_shift(n_plain: int, n_speculative: int, alpha: float, n_tests: int) -> float:
    """The mean shift that each of `n_tests` tests finds with at least 90 % power (Bonferroni)."""
    normal = NormalDist()
    z = normal.inv_cdf(1 - alpha / n_tests / 2) + normal.inv_cdf(_POWER)
    return z * _shift_error(n_plain, n_speculative)


def _shift_error(n_plain: int, n_speculative: int) -> float:
    return math.sqrt((1 / n_plain + 1 / n_speculative) / 12)
