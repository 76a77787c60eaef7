"""Logits of given texts, their sampling, and the draft alone, for measurements."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from typing_extensions import Unpack

from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Logits
from ggufspec.engine.constraints import sampling_of
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.engine.pair import Pair
from ggufspec.errors import OptionError


def logits(
    pair: Pair,
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
    if whose not in ("target", "draft") or (whose == "draft" and pair.draft is None):
        raise OptionError(f"this engine has no {whose!r} to compute logits with")
    n_most = pair.n_draft_max + 1 if whose == "target" else 1
    if not 1 <= n_together <= n_most - n_beside:
        raise OptionError(
            f"n_together is {n_together}; for the {whose} it is 1 to {n_most - n_beside}"
        )
    tokens = array("i", [*prompt, *text])
    for start in range(len(prompt), len(tokens), n_together):
        yield _rows(pair, tokens, start, n_together, whose, n_beside)


def reprocessed(
    pair: Pair, prompt: Sequence[int], text: Sequence[int], n_rows: int
) -> Iterator[tuple[int, Logits]]:
    """Yields (i, the target's logits (n_rows, n_vocab) for `text[i:]`) for several i.

    The text is processed from its start, like a prompt, in batches of 2 * n_rows tokens.
    Raises DecodeError, ClosedError.
    """
    pair.forget()
    tokens = array("i", [*prompt, *text])
    first = max(len(text) - n_rows, 0) % (2 * n_rows)
    for index in range(first, len(text), 2 * n_rows):
        yield index, _rows(pair, tokens, len(prompt) + index, n_rows, "target")


def _rows(
    pair: Pair, tokens: array[int], start: int, n_rows: int, whose: str, n_beside: int = 0
) -> Logits:
    """A copy of the logits before tokens `start` to `start + n_rows`, or to the last token."""
    ahead = tokens[start : min(start + n_rows, len(tokens)) - 1]
    with pair.lock.held():
        slot = pair.slots.nearest(tokens[:start])
        session = slot.target if whose == "target" else slot.draft
        assert session is not None
        if whose == "draft" and pair.head is not None and start > 1:
            pair.head.use(slot.target.sequence, is_used=True)
            slot.target.score(tokens[: start - 1])  # whose hidden states a head reads
        if not (n_beside and ahead):
            rows: Logits = session.score(tokens[:start], ahead).copy()
            return rows
        other = [(ahead[0] + 1) % pair.vocab.n_tokens] * n_beside
        parents = [*range(-1, n_beside - 1), -1, *range(n_beside, n_beside + len(ahead) - 1)]
        rows = slot.target.score(tokens[:start], [*other, *ahead], parents)
        return np.delete(rows, range(1, n_beside + 1), axis=0)  # a copy


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
    return Engine(Pair(pair.draft, n_draft_max=1, resources=ExitStack(), lock=pair.lock))
