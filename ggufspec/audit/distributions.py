"""What is exact: the laws of the next token, of a rule, and of a token's place in its own law.

Knows rows of logits and a rule as a black box; no texts, no sessions, no tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.sampling import to_probs as native_to_probs
from ggufspec.decoding.types import Draft, Logits, Verify

Law = NDArray[np.float64]  # (..., n_vocab), sums to 1

_N_LIKELIEST = 16  # tokens by either model: the laws that a rule is tried on are cut to them
_N_SHIFTS = 4
_N_POINTS = 4096  # of a lattice, shared out among the drafted tokens by their chance
_N_POINTS_MIN = 64
# The best two-dimensional additive recurrence: powers of the inverse of the plastic number.
_PLASTIC = np.array([0.7548776662466927, 0.5698402909980532])


def to_laws(
    logits: Logits, sampling: Sampling, tokens: Sequence[int] = (), ahead: Sequence[int] = ()
) -> Law:
    """The distributions (n, n_vocab) after `tokens`, then after each of `ahead` (n - 1).

    In doubles, and summing to 1.
    """
    laws = np.asarray(native_to_probs(logits, sampling, tokens, ahead)).astype(np.float64)
    laws /= laws.sum(axis=1, keepdims=True)
    return laws


def distance(law: Law, other: Law) -> float:
    """The total variation distance of two laws: the largest difference in any chance."""
    return float(np.abs(law - other).sum() / 2)


def place(token: int, law: Law, score: Law, uniform: float) -> float:
    """Where `token` stands among those that score higher: uniform in [0, 1) if `law` drew it.

    `law`, `score` (n_vocab); `uniform` is an independent uniform, for the share of the token itself
    (Rosenblatt, https://doi.org/10.1214/aoms/1177729394). Conditional on all that came before, so
    the places of all tokens of all texts are independent.
    """
    above = float(law[score > score[token]].sum())
    equal = float(law[score == score[token]].sum())
    return min(above + uniform * equal, 1.0)


def temptation(law: Law, draft_law: Law) -> Law:
    """How much likelier the draft believes a token than the target does; infinite where it errs.

    By Neyman and Pearson's lemma, a rule that follows the draft too much shifts chance to where
    this is large: no other order of the tokens shows it better.
    """
    ratio = np.where(draft_law > 0, np.inf, 0.0)
    np.divide(draft_law, law, out=ratio, where=law > 0)
    return ratio


def likeliest(target_law: Law, draft_law: Law) -> tuple[Law, Law]:
    """Both laws over the tokens that are likeliest by either, in the order of the vocabulary.

    A rule must be lossless for any pair of laws; this one is as lifelike, and cheap to integrate.
    """
    kept = np.union1d(*(np.argsort(-law)[:_N_LIKELIEST] for law in (target_law, draft_law)))
    target, draft = target_law[kept], draft_law[kept]
    return target / target.sum(), draft / draft.sum()


def law_of_rule(verify: Verify, target_law: Law, draft_law: Law) -> tuple[float, float]:
    """How far a rule's law of the next token is from the target's: (distance, its resolution).

    One token is drafted from `draft_law` (n_vocab); the rule is asked at the points of shifted
    lattices in the square of its two uniforms, for each token that the draft may draw. The law that
    comes out is compared with `target_law`. The resolution is what the lattices disagree by: a
    lossless rule has a distance of about as much, which grows with n_vocab: see `likeliest`.
    """
    # The rule sees float32, as it does in the loop: that is what its law is compared with.
    draft, target = (row.astype(np.float32) for row in (draft_law, target_law))
    rows, proposed = np.stack([target, target]), draft[None, :]
    chances = draft / draft.sum(dtype=np.float64)
    laws = np.zeros((_N_SHIFTS, len(target)))
    shifts = np.random.default_rng(0).random((_N_SHIFTS, 2))
    n_used = 0
    for token in np.flatnonzero(draft > 0):
        n_points = max(int(np.ceil(_N_POINTS * chances[token])), _N_POINTS_MIN)
        points = np.arange(n_used, n_used + n_points)[:, None] * _PLASTIC
        n_used += n_points  # points of their own for each token: their errors even out
        for law, shift in zip(laws, shifts, strict=True):
            for uniforms in ((points + shift) % 1.0).tolist():
                verdict = verify(Draft([int(token)], proposed), rows, uniforms)
                came = token if verdict.n_accepted else verdict.next_token
                law[came] += chances[token] / n_points
    errors = laws.std(axis=0, ddof=1) / np.sqrt(_N_SHIFTS)
    expected = target / target.sum(dtype=np.float64)
    return distance(laws.mean(axis=0), expected), float(errors.sum() / 2)
