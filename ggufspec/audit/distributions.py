"""Computes next-token distributions of models and verification rules, and quantiles of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.sampling import Sampling, as_rows, to_probs
from ggufspec.decoding.types import Draft, Logits, Probs, Verify

Distribution = NDArray[np.float64]  # (..., n_vocab), sums to 1

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
    """Both distributions over the likeliest tokens of either, normalised.

    A rule must be lossless for any two distributions; these are realistic, and small.
    """
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
