"""Chooses the layers that a model can best do without."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from ggufspec.common.progress import Progress

_N_PARENTS = 2  # sets of each size that are extended by one more layer
_N_EXTENSIONS = 4  # of each of them


def search_layers(
    score: Callable[[frozenset[int]], float],
    n_layers: int,
    *,
    n_wanted: int | None = None,
    seconds: float,
    progress: Progress | None = None,
) -> list[frozenset[int]]:
    """Sets of layers to leave out: one of `n_wanted`, else the best two of all that were tried.

    score: how good a model is without these layers. Single layers are tried first, from the middle
    on, then sets that extend the best ones, until `seconds` are over or, without `n_wanted`, a
    further layer brings nothing. The first and the last layer always stay.
    """
    middle = (n_layers - 1) / 2
    inner = sorted(range(1, n_layers - 1), key=lambda layer: abs(layer - middle))
    tell: Progress = progress or (lambda done, of: None)
    n_expected = 1 + len(inner) + _N_PARENTS * _N_EXTENSIONS * ((n_wanted or 2) - 1)
    known: dict[frozenset[int], float] = {}

    def of(layers: frozenset[int]) -> float:
        if layers not in known:
            known[layers] = score(layers)
            tell(min(len(known), n_expected - 1), n_expected)
        return known[layers]

    started = monotonic()
    best = [frozenset[int]()]  # of each size
    of(best[0])
    tried: list[int] = []
    for layer in inner:
        if tried and monotonic() - started > seconds / 2:
            break
        of(frozenset({layer}))
        tried.append(layer)
    each = (monotonic() - started) / len(known)
    level = sorted((frozenset({layer}) for layer in tried), key=of, reverse=True)
    singles = [layer for (layer,) in level] + inner[len(tried) :]
    while level:
        level.sort(key=of, reverse=True)
        best.append(level[0])
        n_chosen = len(best) - 1
        if n_chosen == n_wanted:
            break
        n_left = 1 if n_wanted is None else n_wanted - n_chosen
        room = (started + seconds - monotonic()) / max(each, 1e-9) / n_left
        if n_wanted is None and (of(best[-1]) <= of(best[-2]) or room < 1):
            break
        n_each = max(min(int(room) // _N_PARENTS, _N_EXTENSIONS), 1)
        ideas = (
            parent | {layer}
            for parent in level[:_N_PARENTS]
            for layer in [at for at in singles if at not in parent][:n_each]
        )
        level = list(dict.fromkeys(ideas))
    tell(n_expected, n_expected)
    return sorted(best[1:], key=of, reverse=True)[:2] if n_wanted is None else best[-1:]
