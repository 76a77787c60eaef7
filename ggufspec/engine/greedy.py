"""Whether two texts at temperature 0 are equal but for a token that rounding chose.

Kernels for one token and for several round differently, and each processor in its own way. So two
greedy texts may differ from a token on whose rivals are nearer than rounding moves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.decoding.tree import n_equal
from ggufspec.decoding.types import Logits
from ggufspec.engine import scoring
from ggufspec.engine.constraints import sampling_of
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions

_N_ROWS = (2, 4, 8)  # rows of the batches that are compared with single tokens
# Rounding is rare on some processors: it changes few cells of the cache, and then all that follows.
_N_BEFORE, _N_AFTER = 128, 16  # tokens before and after a difference, to measure it at, at most
_N_LIKELY = 8  # tokens whose gaps are compared
_KEEP_THE_ORDER = ("penalties", "dry")  # the samplers that can change which token is the likeliest

Scores = NDArray[np.float64]  # (n_vocab,): logits as sampling sees them, up to a constant


@dataclass(frozen=True)
class Divergence:
    """The first tokens in which two greedy texts differ.

    `tokens`: of the first text and of the second. `gaps`: how far the less likely one of them is
    below the likeliest token, in logits after penalties and constraints, when the text is read
    token by token, and in batches (the largest). `rounding`: the largest change of a gap between
    two likely tokens that batches were measured to make in that text, before penalties.
    """

    position: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]
    rounding: float

    @property
    def gap(self) -> float:
        return max(self.gaps)

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= self.rounding

    @property
    def reason(self) -> str:
        """How the two texts differ, to follow "the texts differ"."""
        single, batched = self.gaps
        found = (
            f"from token {self.position + 1} on: the two tokens there are {single:.2g} and "
            f"{batched:.2g} logits apart (token by token and in batches), and batches change such "
            f"gaps by up to {self.rounding:.2g}"
        )
        return f"{found}: a near-tie" if self.is_near_tie else f"{found}: rounding is not the cause"

    @property
    def document(self) -> dict[str, object]:
        """The same as JSON data."""
        return {**asdict(self), "near_tie": self.is_near_tie}


def compare(
    engine: Engine,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    options: CheckedOptions,
) -> Divergence | None:
    """The first difference of two continuations of `prompt`; None: they are equal.

    `options` are those of the texts. Where one text ends before the other, its next token is the
    likeliest one that ends a text. If there is a difference, the engine forgets its slots.
    Raises DecodeError, ClosedError.
    """
    at = n_equal(first, second)
    if at == len(first) == len(second):
        return None
    sampling = sampling_of(options, engine.vocab, len(prompt))
    kept = tuple(name for name in sampling.samplers if name in _KEEP_THE_ORDER)
    sampling = replace(sampling, temperature=1.0, samplers=kept)
    longer = first if len(first) > at else second
    n_before = max(at - _N_BEFORE, 0)
    before, text = [*prompt, *longer[:n_before]], list(longer[n_before : at + _N_AFTER])
    there = at - n_before
    engine.forget()
    singles = [*chain.from_iterable(scoring.logits(engine, before, text, whose="target"))]

    def scores(row: Logits) -> Scores:
        return _scores(row, sampling, [*before, *text[:there]])

    single = scores(singles[there])
    ends = max(engine.vocab.stop_tokens, key=lambda end: single[end], default=-1)
    tokens = (first[at] if at < len(first) else ends, second[at] if at < len(second) else ends)
    rounding, gaps = 0.0, []
    for i, batched in _in_batches(engine, before, text):
        rounding = max(rounding, *map(_change, singles[i:], batched))
        if i <= there < i + len(batched):
            gaps.append(_gap(scores(batched[there - i]), tokens))
    return Divergence(at, tokens, (_gap(single, tokens), max(gaps)), rounding)


def _in_batches(
    engine: Engine, before: Sequence[int], text: Sequence[int]
) -> Iterator[tuple[int, Logits]]:
    """Logits from some indices of `text` on, of each position by batches of several sizes."""
    for n_rows in (each for each in _N_ROWS if each <= engine.n_draft_max + 1):
        for n in (len(text), len(text) - n_rows):  # of two batches, one is read without its logits
            yield from scoring.reprocessed(engine, before, text[: max(n, 0)], n_rows)


def _scores(logits: Logits, sampling: Sampling, tokens: Sequence[int]) -> Scores:
    (row,) = np.asarray(to_probs(logits[np.newaxis], sampling, tokens))
    with np.errstate(divide="ignore"):  # of what is banned
        scores: Scores = np.log(row.astype(np.float64))
        return scores


def _gap(scores: Scores, tokens: Sequence[int]) -> float:
    return float(scores.max() - scores[list(tokens)].min())


def _change(single: Logits, batched: Logits) -> float:
    """The largest change of a gap between two likely tokens."""
    likely = np.argsort(single)[-_N_LIKELY:]
    return float(np.ptp(batched[likely] - single[likely]))
