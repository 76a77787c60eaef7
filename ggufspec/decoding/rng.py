"""Streams of uniform random numbers from a seed: for verification, and for drafts."""

from __future__ import annotations

from collections.abc import Callable, Sized

# Not imported lazily: a Ctrl-C during the import of compiled code may be lost.
from numpy.random import Generator, SeedSequence, default_rng

from ggufspec.decoding.types import Uniforms

_N_AHEAD = 4096


UniformStream = Callable[[int], Uniforms]  # stream(n) returns n fresh uniforms


def uniform_streams(seed: int, n: int = 2) -> list[UniformStream]:
    """Independent streams of uniforms in [0, 1): for verification, the draft, and so on."""
    return [_drawn_ahead(default_rng(part)) for part in SeedSequence(seed).spawn(n)]


def by_position(stream: UniformStream, tokens: Sized) -> UniformStream:
    """A stream that gives token i of a text always the same uniform.

    `tokens`: the growing text. Only for rules that read no uniform after a rejected token: the next
    round would read the same uniform again.
    """
    drawn: list[float] = []
    n_before = len(tokens)

    def draw(n: int) -> Uniforms:
        start = len(tokens) - n_before
        drawn.extend(stream(max(start + n - len(drawn), 0)))
        return drawn[start : start + n]

    return draw


def _drawn_ahead(generator: Generator) -> UniformStream:
    """A stream that draws many uniforms at once: one call costs more than the numbers do."""
    stored: list[float] = []
    n_used = 0

    def draw(n: int) -> Uniforms:
        nonlocal stored, n_used
        if n_used + n > len(stored):
            stored, n_used = generator.random(max(n, _N_AHEAD)).tolist(), 0
        n_used += n
        return stored[n_used - n : n_used]

    return draw
