"""Next-token distributions, quantiles of tokens, and two-sample tests with their power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.sampling import Sampling, as_rows, to_probs
from ggufspec.decoding.types import Draft, Logits, Probs, Verify
from ggufspec.errors import OptionError

try:
    import scipy  # type: ignore[import-untyped]  # it imports scipy.stats where that is used
except ImportError as error:
    raise OptionError(
        "an audit needs scipy, which is not installed; install it with "
        "`pip install 'ggufspec[audit]'`"
    ) from error

Floats = NDArray[np.float64]
Distribution = Floats  # (..., n_vocab), sums to 1

_N_PERMUTATIONS = 1999  # the smallest p-value is 1 / 2000
_POWER = 0.9
_N_BUCKETS = 4093  # number of hashes of tokens and pairs of tokens; a prime
_N_LIKELIEST = 16  # likeliest tokens of each model that are kept to integrate a rule
_N_LIKELIEST_SIBLINGS = 4  # fewer for two siblings: all pairs of tokens are tried
_N_SEQUENCES = 4
_N_POINTS = 4096  # points of a sequence, divided among the drafts by their probability
_N_POINTS_MIN = 64  # least number of points for each draft of one token; 8 for a draft of two


def to_distributions(
    logits: Logits,
    sampling: Sampling,
    tokens: Sequence[int] = (),
    ahead: Sequence[int] = (),
    next_token: int | None = None,
) -> Distribution:
    """The distributions (n, n_vocab) after `tokens`, then after each token of `ahead` (n - 1).

    `next_token`: follows them; the state of `sampling` moves on to the position behind it.
    """
    rows = to_probs(logits, sampling, tokens, ahead)
    if next_token is not None:
        rows.advance(sampling.native, range(len(ahead)), next_token)
    probs = np.asarray(rows).astype(np.float64)
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
    points of several scrambled Halton sequences. The error is the total variation distance of the
    mean outcome from `target_probs`; the resolution is how much the sequences differ. A lossless
    rule has an error of about the resolution, which grows with n_vocab: see `likeliest`.
    """
    # The rule gets float32, as in decoding; its outcome is compared with the float32 target.
    draft, target = (row.astype(np.float32) for row in (draft_probs, target_probs))
    possible = np.flatnonzero(draft > 0).tolist()
    n_drafted = min(n_siblings, len(possible))
    rows = as_rows(np.tile(target, (n_drafted + 1, 1)))
    parents = [-1] * n_drafted if n_drafted > 1 else []
    outcomes = np.zeros((_N_SEQUENCES, len(target)))
    sequences = [scipy.stats.qmc.Halton(n_drafted + 1, rng=i) for i in range(_N_SEQUENCES)]
    n_min = round(_N_POINTS_MIN ** (1 / n_drafted))
    for tokens in permutations(possible, n_drafted):
        proposed, weight = _without_replacement(draft, tokens)
        drafted = Draft(tokens, as_rows(proposed), parents=parents)
        n_points = max(int(np.ceil(_N_POINTS * weight)), n_min)
        for outcome, sequence in zip(outcomes, sequences, strict=True):
            counts = [0] * len(target)
            # Each draft has different points, so that errors cancel.
            for uniforms in sequence.random(n_points).tolist():
                n_accepted, token, path = verify(drafted, rows, uniforms)
                counts[tokens[path[0] if path else 0] if n_accepted else token] += 1
            outcome += np.array(counts) * (weight / n_points)
    errors = outcomes.std(axis=0, ddof=1) / np.sqrt(_N_SEQUENCES)
    expected = target / target.sum(dtype=np.float64)
    return total_variation(outcomes.mean(axis=0), expected), float(errors.sum() / 2)


def _without_replacement(draft: Probs, tokens: Sequence[int]) -> tuple[Probs, float]:
    rows, weight = np.zeros((len(tokens), len(draft)), np.float32), 1.0
    for i, token in enumerate(tokens):
        rows[i] = draft
        rows[i, list(tokens[:i])] = 0
        rows[i] /= rows[i].sum(dtype=np.float64)
        weight *= float(rows[i, token])
    return rows, weight


@dataclass(frozen=True)
class Test:
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
    reach = float(scipy.stats.norm.isf(alpha / 2)) * error
    p = float(2 * scipy.stats.norm.sf(abs(effect) / error))
    return Test(name, effect, effect - reach, effect + reach, p, p)


def kolmogorov_smirnov(name: str, plain: Floats, speculative: Floats, alpha: float) -> Test:
    """Tests the largest difference of the distribution functions; its interval is the band of
    Dvoretzky, Kiefer, Wolfowitz and Massart (https://doi.org/10.1214/aop/1176990746)."""
    effect, p = map(float, scipy.stats.ks_2samp(plain, speculative, method="asymp"))
    # Each of the two functions is within its band with confidence 1 - alpha / 2.
    reach = sum(math.sqrt(math.log(4 / alpha) / (2 * len(s))) for s in (plain, speculative))
    return Test(name, effect, max(effect - reach, 0.0), min(effect + reach, 1.0), p, p)


def text_profiles(texts: Sequence[Sequence[int]]) -> Floats:
    """Counts of tokens and of pairs of successive tokens in each text: (n_texts, n_buckets)."""
    profiles = np.zeros((len(texts), _N_BUCKETS))
    for row, text in zip(profiles, texts, strict=True):
        tokens = np.asarray(text, np.int64)
        pairs = tokens[:-1] * 1_000_003 + tokens[1:] * 7_919 + 1
        np.add.at(row, np.concatenate([tokens, pairs]) % _N_BUCKETS, 1.0)
    return profiles


def energy(name: str, profiles: Floats, rng: np.random.Generator) -> Test:
    """Tests the energy distance of plain and speculative texts by swapping the texts of pairs.

    `profiles` (2 n, n_features): of n plain, then of n speculative texts of the same prompts. If
    both kinds have the same distribution, a pair may be swapped, so the p-value is exact for any
    number and length of texts. The effect is the distance minus the mean over all permutations.
    Szekely and Rizzo, https://doi.org/10.1016/j.jspi.2013.03.018
    """
    n = len(profiles) // 2
    if n < 2:
        return Test(name, 0.0, None, None, 1.0, 1.0)
    squares = (profiles**2).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * profiles @ profiles.T
    np.sqrt(np.maximum(distances, 0), out=distances)

    def distance(plain: NDArray[np.int64], speculative: NDArray[np.int64], axis: int) -> Floats:
        weights = np.zeros((*plain.shape[:-1], 2 * n))
        np.put_along_axis(weights, plain, -1 / n, axis)
        np.put_along_axis(weights, speculative, 1 / n, axis)
        # Rounded, so that values that differ only by the rounding of sums are equal.
        found: Floats = np.round(-np.einsum("...i,...i", weights @ distances, weights), 9)
        return found

    found = scipy.stats.permutation_test(
        (np.arange(n), np.arange(n, 2 * n)),
        distance,
        permutation_type="samples",
        n_resamples=_N_PERMUTATIONS,
        alternative="greater",
        vectorized=True,
        rng=rng,
    )
    effect, p = float(found.statistic - found.null_distribution.mean()), float(found.pvalue)
    return Test(name, effect, None, None, p, p)


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
    norm = scipy.stats.norm
    z = float(norm.isf(alpha / n_tests / 2) + norm.ppf(_POWER))
    return z * _shift_error(n_plain, n_speculative)


def _shift_error(n_plain: int, n_speculative: int) -> float:
    return math.sqrt((1 / n_plain + 1 / n_speculative) / 12)
