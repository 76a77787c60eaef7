"""Next-token distributions: of logits, of a verification rule, and a token's quantile in one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.decoding.types import Draft, Logits, Verify

Distribution = NDArray[np.float64]  # (..., n_vocab), sums to 1

_N_LIKELIEST = 16  # tokens of each model that are kept where a rule is integrated
_N_SHIFTS = 4
_N_POINTS = 4096  # of a lattice, divided among the drafted tokens by their probability
_N_POINTS_MIN = 64
# The best two-dimensional additive recurrence: powers of the inverse of the plastic number.
_PLASTIC = np.array([0.7548776662466927, 0.5698402909980532])


def to_distributions(
    logits: Logits, sampling: Sampling, tokens: Sequence[int] = (), ahead: Sequence[int] = ()
) -> Distribution:
    """The distributions (n, n_vocab) after `tokens`, then after each of `ahead` (n - 1)."""
    probs = np.asarray(to_probs(logits, sampling, tokens, ahead)).astype(np.float64)
    probs /= probs.sum(axis=1, keepdims=True)
    return probs


def total_variation(probs: Distribution, other: Distribution) -> float:
    """The total variation distance: the largest difference in the probability of any event."""
    return float(np.abs(probs - other).sum() / 2)


def quantile(token: int, probs: Distribution, score: Distribution, uniform: float) -> float:
    """The probability of tokens with a higher score: uniform in [0, 1) if `probs` drew `token`.

    `probs`, `score` (n_vocab); `uniform` is an independent uniform, for the share of the token
    itself (Rosenblatt, https://doi.org/10.1214/aoms/1177729394). It is conditional on all earlier
    tokens, so the quantiles of all tokens of all texts are independent.
    """
    above = float(probs[score > score[token]].sum())
    equal = float(probs[score == score[token]].sum())
    return min(above + uniform * equal, 1.0)


def draft_ratio(target_probs: Distribution, draft_probs: Distribution) -> Distribution:
    """draft / target of each token; infinite where only the target's probability is 0.

    A rule that follows the draft too much moves probability to tokens with a large ratio; by the
    lemma of Neyman and Pearson, no other order of the tokens shows it better.
    """
    ratio = np.where(draft_probs > 0, np.inf, 0.0)
    np.divide(draft_probs, target_probs, out=ratio, where=target_probs > 0)
    return ratio


def likeliest(
    target_probs: Distribution, draft_probs: Distribution
) -> tuple[Distribution, Distribution]:
    """Both distributions, cut to the tokens that are likeliest by either and normalised.

    A rule must be lossless for any two distributions; these are realistic, and small.
    """
    kept = np.union1d(*(np.argsort(-probs)[:_N_LIKELIEST] for probs in (target_probs, draft_probs)))
    target, draft = target_probs[kept], draft_probs[kept]
    return target / target.sum(), draft / draft.sum()


def rule_error(
    verify: Verify, target_probs: Distribution, draft_probs: Distribution
) -> tuple[float, float]:
    """How far the distribution of a rule's next token is from the target's: (error, resolution).

    One token is drafted from `draft_probs` (n_vocab). For each token that can be drafted, the rule
    is called at the points of shifted lattices in the square of its two uniforms. The error is the
    total variation distance of the outcome from `target_probs`; the resolution is how far the
    lattices disagree. A lossless rule has an error of about the resolution, which grows with
    n_vocab: see `likeliest`.
    """
    # As in the decoding loop, the rule gets float32; its outcome is compared with the same numbers.
    draft, target = (row.astype(np.float32) for row in (draft_probs, target_probs))
    rows, proposed = np.stack([target, target]), draft[None, :]
    drafted = draft / draft.sum(dtype=np.float64)
    outcomes = np.zeros((_N_SHIFTS, len(target)))
    shifts = np.random.default_rng(0).random((_N_SHIFTS, 2))
    n_used = 0
    for token in np.flatnonzero(draft > 0):
        n_points = max(int(np.ceil(_N_POINTS * drafted[token])), _N_POINTS_MIN)
        points = np.arange(n_used, n_used + n_points)[:, None] * _PLASTIC
        n_used += n_points  # each token has points of its own, so that errors cancel
        for outcome, shift in zip(outcomes, shifts, strict=True):
            for uniforms in ((points + shift) % 1.0).tolist():
                verdict = verify(Draft([int(token)], proposed), rows, uniforms)
                next_token = token if verdict.n_accepted else verdict.next_token
                outcome[next_token] += drafted[token] / n_points
    errors = outcomes.std(axis=0, ddof=1) / np.sqrt(_N_SHIFTS)
    expected = target / target.sum(dtype=np.float64)
    return total_variation(outcomes.mean(axis=0), expected), float(errors.sum() / 2)
