"""Logits of given texts, and a comparison of two greedy texts, for measurements.

Where ggufspec's kernels compute everything, a token's logits depend on its text alone, and greedy
texts are equal. GPUs and llama.cpp's kernels round one token and several differently. So greedy
texts may differ there from a position on where two logits are closer than rounding changes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.decoding.tree import n_equal
from ggufspec.decoding.types import Logits
from ggufspec.engine.constraints import sampling_of
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.engine.pair import Pair
from ggufspec.errors import OptionError
from ggufspec.llama.context_checks import why_inexact

_N_ROWS = (2, 4, 8)  # rows of the batches that are compared with single tokens
# Rounding is measured at this many tokens at most, before and after a difference. On AVX2 it
# changes few cells of the cache (F16), and then all later logits: a short text may show none.
_N_BEFORE, _N_AFTER = 128, 16
_N_LIKELY = 8  # tokens whose gaps are compared
_REORDERING = ("penalties", "dry")  # the samplers that can change which token is the likeliest

Scores = NDArray[np.float64]  # (n_vocab,): logits as sampling sees them, up to a constant


def logits(
    engine: Engine,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    whose: str,
    n_together: int = 1,
    n_beside: int = 0,
) -> Iterator[Logits]:
    """Logits before each token of `text`, which follows `prompt`: pieces (n, n_vocab).

    `whose`: "target" or "draft". Each piece is a copy of the rows of one batch of `n_together`
    tokens, or fewer in the last one: 1 as in plain decoding, more as in verification; at most
    n_draft_max + 1 for the target, 1 for the draft. `n_beside` (target only): each batch also has a
    branch of `n_beside` other tokens, so that the text is the second branch of a tree.
    Raises OptionError, DecodeError, ClosedError.
    """
    pair = engine.pair
    if whose not in ("target", "draft") or (whose == "draft" and pair.draft is None):
        raise OptionError(f"this engine has no {whose!r} to compute logits with")
    n_most = pair.n_draft_max + 1 if whose == "target" else 1
    if not 1 <= n_together <= n_most - n_beside:
        raise OptionError(
            f"n_together is {n_together}; for the {whose} it is 1 to {n_most - n_beside}"
        )
    tokens = array("i", [*prompt, *text])
    for start in range(len(prompt), len(tokens), n_together):
        yield _rows(engine, tokens, start, n_together, whose, n_beside)


def reprocessed(
    engine: Engine, prompt: Sequence[int], text: Sequence[int], n_rows: int
) -> Iterator[tuple[int, Logits]]:
    """Yields (i, the target's logits (n_rows, n_vocab) for `text[i:]`) for several i.

    The text is processed from its start, like a prompt, in batches of 2 * n_rows tokens.
    Raises DecodeError, ClosedError.
    """
    engine.forget()
    tokens = array("i", [*prompt, *text])
    first = max(len(text) - n_rows, 0) % (2 * n_rows)
    for index in range(first, len(text), 2 * n_rows):
        yield index, _rows(engine, tokens, len(prompt) + index, n_rows, "target")


def _rows(
    engine: Engine, tokens: array[int], start: int, n_rows: int, whose: str, n_beside: int = 0
) -> Logits:
    """A copy of the logits before tokens `start` to `start + n_rows`, or to the last token."""
    ahead = tokens[start : min(start + n_rows, len(tokens)) - 1]
    pair = engine.pair

    def rows() -> Logits:
        slot = pair.slots.nearest(tokens[:start])
        session = slot.target if whose == "target" else slot.draft
        assert session is not None
        if whose == "draft" and pair.head is not None and start > 1:
            pair.head.use(slot.target.sequence, is_used=True)
            slot.target.score(tokens[: start - 1])  # whose hidden states a head reads
        if not (n_beside and ahead):
            found: Logits = session.score(tokens[:start], ahead).copy()
            return found
        other = [(ahead[0] + 1) % pair.vocab.n_tokens] * n_beside
        parents = [*range(-1, n_beside - 1), -1, *range(n_beside, n_beside + len(ahead) - 1)]
        found = slot.target.score(tokens[:start], [*other, *ahead], parents)
        return np.delete(found, range(1, n_beside + 1), axis=0)  # a copy

    return engine.run(rows)


def sampling(engine: Engine, prompt: Sequence[int], **options: Unpack[GenerateOptions]) -> Sampling:
    """The sampling that a continuation of `prompt` with these options uses.

    Raises OptionError.
    """
    given = CheckedOptions.of({**engine.file_sampling.options, **options})
    return sampling_of(given, engine.vocab, len(prompt))


def draft_alone(engine: Engine) -> Engine:
    """An engine that generates with the draft of another one alone, in the same memory.

    Valid until `engine` is closed. The two engines may generate in turns; call `forget` on one
    before the other generates. Raises OptionError if there is no draft.
    """
    pair = engine.pair
    if pair.draft is None:
        raise OptionError("this engine has no draft; load one (draft=)")
    if pair.head is not None:
        raise OptionError("this engine's draft is a head, which writes no text without its target")
    return Engine(Pair(pair.draft, n_draft_max=1, resources=ExitStack()))


@dataclass(frozen=True)
class Divergence:
    """The first tokens in which two greedy texts differ.

    `tokens`: of the first text and of the second. `gaps`: how far the less likely one of them is
    below the likeliest token, in logits after penalties and constraints, when the text is read
    token by token, and in batches (the largest). `rounding`: the largest change of a gap between
    two likely tokens that batches were measured to make in prompt and text, before penalties; 0 if
    logits depend on the text alone.
    """

    position: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]
    rounding: float

    @property
    def gap(self) -> float:
        """The gap that rounding must account for, in logits.

        Plain decoding reads token by token, so its gap is at most one change away from the other
        text's choice. Batches of the sizes that are read here are up to two changes away.
        """
        single, batched = self.gaps
        return max(single, batched / 2)

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding accounts for the difference."""
        return 0 < self.rounding >= self.gap

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
    used = () if sampling.mirostat else sampling.samplers
    kept = tuple(name for name in used if name in _REORDERING)
    sampling = replace(sampling, temperature=1.0, samplers=kept, mirostat=0)
    longer = first if len(first) > at else second
    tokens = [*prompt, *longer[: at + _N_AFTER]]
    there = len(prompt) + at
    if why_inexact(engine.pair.target) is None:
        (single,) = _rows(engine, array("i", tokens), there, 1, "target")
        batched, rounding = list[Logits](), 0.0
    else:
        # First with the prompt in one piece, as both texts had it; then at its tokens, too.
        n_known = max(len(prompt), there - _N_BEFORE)
        single, batched, rounding = _read(engine, tokens, n_known, there)
        if (earlier := max(there - _N_BEFORE, 1)) < n_known:
            rounding = max(rounding, _read(engine, tokens, earlier, there)[2])
    scores, *others = (_scores(row, sampling, tokens[:there]) for row in (single, *batched))
    ends = max(engine.vocab.stop_tokens, key=lambda end: scores[end], default=-1)
    differ = (first[at] if at < len(first) else ends, second[at] if at < len(second) else ends)
    gap = _gap(scores, differ)
    gaps = gap, max((_gap(other, differ) for other in others), default=gap)
    return Divergence(at, differ, gaps, rounding)


def _read(
    engine: Engine, tokens: Sequence[int], n_known: int, there: int
) -> tuple[Logits, list[Logits], float]:
    """Read the tokens from `n_known` on singly, and in batches as a prompt is.

    Returns the logits before token `there`, those by each size of batches, and the rounding.
    """
    before, text = tokens[:n_known], tokens[n_known:]
    engine.forget()
    singles = [*chain.from_iterable(logits(engine, before, text, whose="target"))]
    rounding, found = 0.0, []
    for i, batched in _in_batches(engine, before, text):
        rounding = max(rounding, *map(_change, singles[i:], batched))
        if i <= there - n_known < i + len(batched):
            found.append(batched[there - n_known - i].copy())
    return singles[there - n_known], found, rounding


def _in_batches(
    engine: Engine, before: Sequence[int], text: Sequence[int]
) -> Iterator[tuple[int, Logits]]:
    """Yields (index in `text`, logits from there on) for batches of several sizes.

    For engines that draft trees, some batches also hold branches of other tokens.
    """
    for n_rows in (each for each in _N_ROWS if each <= engine.n_draft_max + 1):
        for n in (len(text), len(text) - n_rows):  # of two batches, one is read without its logits
            yield from reprocessed(engine, before, text[: max(n, 0)], n_rows)
        if (n_beside := n_rows // 3) and engine.pair.target.n_leaves > 1:
            engine.forget()
            i, n_together = 0, n_rows - n_beside
            batch = {"n_together": n_together, "n_beside": n_beside}
            for rows in logits(engine, before, text, whose="target", **batch):
                yield i, rows
                i += len(rows)


def _scores(logits: Logits, sampling: Sampling, tokens: Sequence[int]) -> Scores:
    (row,) = np.asarray(to_probs(logits[np.newaxis], sampling, tokens))
    with np.errstate(divide="ignore"):  # of what is banned
        scores: Scores = np.log(row.astype(np.float64))
        return scores


def _gap(scores: Scores, tokens: Sequence[int]) -> float:
    return float(np.max(scores) - np.min(scores[list(tokens)]))


def _change(single: Logits, batched: Logits) -> float:
    likely = np.argsort(single)[-_N_LIKELY:]
    return float(np.ptp(batched[likely] - single[likely]))
