"""Chooses layers to leave out of a model."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from ggufspec.common.progress import Progress

_N_PARENTS = 2  # best sets of each size that are extended by one more layer
_N_EXTENSIONS = 4  # extensions tried for each of these sets


def search_layers(
    score: Callable[[frozenset[int]], float],
    n_layers: int,
    *,
    n_wanted: int | None = None,
    seconds: float,
    progress: Progress | None = None,
) -> list[frozenset[int]]:
    """Sets of layers to leave out: the best of size `n_wanted`; if None, the best two sets.

    `score(layers)`: quality of the model without these layers. Single layers are tried first, from
    the middle outwards, then the best sets with one more layer, until `seconds` are over or,
    without `n_wanted`, the score does not improve. The first and the last layer always stay.
    """
    middle = (n_layers - 1) / 2
    inner = sorted(range(1, n_layers - 1), key=lambda layer: abs(layer - middle))
    tell: Progress = progress or (lambda done, of: None)
    n_expected = 1 + len(inner) + _N_PARENTS * _N_EXTENSIONS * ((n_wanted or 2) - 1)
    known: dict[frozenset[int], float] = {}

    def score_of(layers: frozenset[int]) -> float:
        if layers not in known:
            known[layers] = score(layers)
            tell(min(len(known), n_expected - 1), n_expected)
        return known[layers]

    started = monotonic()
    best = [frozenset[int]()]  # best[n]: the best set of n layers
    score_of(best[0])
    tried: list[int] = []
    for layer in inner:
        if tried and monotonic() - started > seconds / 2:
            break
        score_of(frozenset({layer}))
        tried.append(layer)
    seconds_each = (monotonic() - started) / len(known)
    candidates = sorted((frozenset({layer}) for layer in tried), key=score_of, reverse=True)
    singles = [layer for (layer,) in candidates] + inner[len(tried) :]  # best layers first
    while candidates:
        candidates.sort(key=score_of, reverse=True)
        best.append(candidates[0])
        n_chosen = len(best) - 1
        if n_chosen == n_wanted:
            break
        n_left = 1 if n_wanted is None else n_wanted - n_chosen
        n_affordable = (started + seconds - monotonic()) / max(seconds_each, 1e-9) / n_left
        if n_wanted is None and (n_affordable < 1 or score_of(best[-1]) <= score_of(best[-2])):
            break
        n_extensions = max(min(int(n_affordable) // _N_PARENTS, _N_EXTENSIONS), 1)
        extended = (
            parent | {layer}
            for parent in candidates[:_N_PARENTS]
            for layer in [each for each in singles if each not in parent][:n_extensions]
        )
        candidates = list(dict.fromkeys(extended))
    tell(n_expected, n_expected)
    return sorted(best[1:], key=score_of, reverse=True)[:2] if n_wanted is None else best[-1:]
