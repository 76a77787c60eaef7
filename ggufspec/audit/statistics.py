"""Next-token distributions, quantiles of tokens, and two-sample tests with their power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.sampling import Sampling, as_rows, to_probs
from ggufspec.decoding.types import Draft, Logits, Probs, Verify

Floats = NDArray[np.float64]
Distribution = Floats  # (..., n_vocab), sums to 1

N_PERMUTATIONS = 1999  # the smallest p-value is 1 / 2000
_POWER = 0.9
_N_BUCKETS = 4093  # number of hashes of tokens and pairs of tokens; a prime
_SERIES = np.arange(1, 101)
_N_LIKELIEST = 16  # likeliest tokens of each model that are kept to integrate a rule
_N_LIKELIEST_SIBLINGS = 4  # fewer for two siblings: all pairs of tokens are tried
_N_SHIFTS = 4
_N_POINTS = 4096  # points of a lattice, divided among the drafts by their probability
_N_POINTS_MIN = 64  # least number of points for each draft of one token; 8 for a draft of two


def to_distributions(
    logits: Logits, sampling: Sampling, tokens: Sequence[int] = (), ahead: Sequence[int] = ()
) -> Distribution:
    """The distributions (n, n_vocab) after `tokens`, then after each token of `ahead` (n - 1)."""
    probs = np.asarray(to_probs(logits, sampling, tokens, ahead)).astype(np.float64)
    probs /= probs.sum(axis=1, keepdims=True)
    return probs


def total_variation(probs: Distribution, other: Distribution) -> float:
    """The total variation distance: the largest difference in the probability of any event."""
    return float(np.abs(probs - other).sum() / 2)


def quantile(token: int, probs: Distribution, score: Distribution, uniform: float) -> float:
    """The quantile of `token`: the total probability of tokens with a higher score.

    It is uniform in [0, 1) if `token` was drawn from `probs`. `probs`, `score`: (n_vocab);
    `uniform`: an independent random number in [0, 1); that share of the probability of tokens with
    an equal score is counted, too (Rosenblatt, https://doi.org/10.1214/aoms/1177729394). Quantiles
    are conditional on all earlier tokens, so those of all tokens of all texts are independent.
    """
    above = float(probs[score > score[token]].sum())
    equal = float(probs[score == score[token]].sum())
    return min(above + uniform * equal, 1.0)


def draft_ratio(target_probs: Distribution, draft_probs: Distribution) -> Distribution:
    """draft / target for each token; infinite if only the target's probability is 0.

    A rule that follows the draft too much moves probability to tokens with a large ratio; by the
    lemma of Neyman and Pearson, no other order of the tokens detects this better.
    """
    ratio = np.where(draft_probs > 0, np.inf, 0.0)
    np.divide(draft_probs, target_probs, out=ratio, where=target_probs > 0)
    return ratio


def likeliest(
    target_probs: Distribution, draft_probs: Distribution, n_siblings: int = 1
) -> tuple[Distribution, Distribution]:
    """Both distributions over the likeliest tokens of either, normalised: realistic, but small."""
    n = _N_LIKELIEST if n_siblings == 1 else _N_LIKELIEST_SIBLINGS
    kept = np.union1d(*(np.argsort(-probs)[:n] for probs in (target_probs, draft_probs)))
    target, draft = target_probs[kept], draft_probs[kept]
    return target / target.sum(), draft / draft.sum()


def rule_error(
    verify: Verify, target_probs: Distribution, draft_probs: Distribution, n_siblings: int = 1
) -> tuple[float, float]:
    """(error, resolution) of the distribution of a rule's next token.

    `n_siblings` tokens that follow the text are drafted from `draft_probs` (n_vocab) without
    replacement. For each possible draft, the rule is called with many sets of random numbers: the
    points of several lattices, which differ by a shift. The error is the total variation distance
    of the mean outcome from `target_probs`; the resolution is how much the lattices differ. A
    lossless rule has an error of about the resolution, which grows with n_vocab: see `likeliest`.
    """
    # The rule gets float32, as in decoding; its outcome is compared with the float32 target.
    draft, target = (row.astype(np.float32) for row in (draft_probs, target_probs))
    possible = np.flatnonzero(draft > 0).tolist()
    n_drafted = min(n_siblings, len(possible))
    rows = as_rows(np.tile(target, (n_drafted + 1, 1)))
    parents = [-1] * n_drafted if n_drafted > 1 else []
    outcomes = np.zeros((_N_SHIFTS, len(target)))
    shifts = np.random.default_rng(0).random((_N_SHIFTS, n_drafted + 1))
    steps = _additive_recurrence(n_drafted + 1)
    n_min = round(_N_POINTS_MIN ** (1 / n_drafted))
    n_used = 0
    for tokens in permutations(possible, n_drafted):
        proposed, weight = _without_replacement(draft, tokens)
        drafted = Draft(tokens, as_rows(proposed), parents=parents)
        n_points = max(int(np.ceil(_N_POINTS * weight)), n_min)
        points = np.arange(n_used, n_used + n_points)[:, None] * steps
        n_used += n_points  # each draft has different points, so that errors cancel
        for outcome, shift in zip(outcomes, shifts, strict=True):
            counts = [0] * len(target)
            for uniforms in ((points + shift) % 1.0).tolist():
                n_accepted, token, path = verify(drafted, rows, uniforms)
                counts[tokens[path[0] if path else 0] if n_accepted else token] += 1
            outcome += np.array(counts) * (weight / n_points)
    errors = outcomes.std(axis=0, ddof=1) / np.sqrt(_N_SHIFTS)
    expected = target / target.sum(dtype=np.float64)
    return total_variation(outcomes.mean(axis=0), expected), float(errors.sum() / 2)


def _without_replacement(draft: Probs, tokens: Sequence[int]) -> tuple[Probs, float]:
    """The rows that `tokens` are drawn from, and the probability of drawing all of them."""
    rows, weight = np.zeros((len(tokens), len(draft)), np.float32), 1.0
    for i, token in enumerate(tokens):
        rows[i] = draft
        rows[i, list(tokens[:i])] = 0
        rows[i] /= rows[i].sum(dtype=np.float64)
        weight *= float(rows[i, token])
    return rows, weight


def _additive_recurrence(n_dimensions: int) -> Distribution:
    """The steps of a lattice: powers of the inverse of a generalised golden ratio."""
    ratio = 2.0
    for _ in range(60):
        ratio = (1 + ratio) ** (1 / (n_dimensions + 1))
    return np.array([(1 / ratio) ** (i + 1) % 1 for i in range(n_dimensions)])


@dataclass(frozen=True)
class Test:
    """One comparison of speculative with plain texts."""

    name: str
    effect: float
    low: float | None  # the effect is in [low, high] with confidence 1 - alpha; None: no scale
    high: float | None
    p: float  # p-value of this test alone
    p_holm: float  # p-value adjusted for all tests

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
