"""What a text needs before it is queued; its caller works it out, beside the passes of others."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from typing_extensions import TypedDict, Unpack

from ggufspec.decoding.sampling import Sampling
from ggufspec.drafting import strategies as drafters
from ggufspec.engine.constraints import sampling_of
from ggufspec.engine.infill import reading_order
from ggufspec.engine.logprobs import TokenLogprobs
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.pair import Pair
from ggufspec.engine.reasoning import ReasoningMarks
from ggufspec.errors import OptionError
from ggufspec.llama.projector import Encoded

# A prompt that is k tokens shorter goes first if it arrives less than k times this many seconds
# later. A large model on a CPU takes about this long for a token.
_SECONDS_OVERTAKEN = 0.03


class Reported(TypedDict, total=False):
    """What is reported beside the text.

    n_top: chunks have log-probabilities of their tokens and of the n_top likeliest tokens at each
    position, before sampling, from the logits that verify the draft; None: no log-probabilities.
    prompt_logprobs: the known log-probabilities of a prefix of the prompt (at least one token);
    those of the other tokens are computed. Needs n_top. is_sampled: they are those after sampling.
    """

    n_top: int | None
    prompt_logprobs: Sequence[TokenLogprobs] | None
    is_sampled: bool


@dataclass(frozen=True)
class PreparedText:
    """A prompt with options that the pair can follow. Its constraint serves one text only."""

    tokens: Sequence[int]  # as Engine.tokenize returns them
    options: CheckedOptions
    sampling: Sampling  # with the constraint, compiled
    n_draft: int  # the most tokens that a round may draft
    n_leaves: int  # the most leaves of a draft; 1: chains only
    prediction: Sequence[int]
    read_as: Sequence[int]  # the prompt as n-grams read it; empty: as it is
    seed: int
    turn: float  # texts are begun, and prompts read, in this order
    n_top: int | None = None  # this and the next two: see Reported
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    is_sampled: bool = False
    images: Sequence[Encoded] = ()  # of the prompt


def prepared(
    pair: Pair,
    tokens: Sequence[int],
    options: CheckedOptions,
    *,
    like: PreparedText | None = None,
    reasoning: ReasoningMarks | None = None,
    **reported: Unpack[Reported],
) -> PreparedText:
    """Compile the constraint, and check what depends on the pair. Raises OptionError, ClosedError.

    `like`: a text with the same options, also is_sampled, whose constraint need not be compiled
    again. The first constraint of a vocabulary reads all its tokens, with progress. `reasoning`:
    see `sampling_of`.
    """
    # Raises OptionError for an unknown one.
    uses_model = drafters.uses_model(options.drafter_name(has_draft=pair.draft is not None))
    is_exact = pair.is_exact and options.sampling.effective_temperature > 0
    if is_exact and options.banned_strings:
        raise OptionError(
            "banned_strings cannot repeat a sampled text exactly: going back draws tokens anew; "
            "leave it out, or load without exact (--exact), or use temperature 0"
        )
    heard = options.progress and partial(options.progress, "vocabulary")
    compiled = like.sampling.constraint if like is not None else None
    seed = secrets.randbits(32) if options.seed is None else int(options.seed)
    if like is not None:
        reported.setdefault("is_sampled", like.is_sampled)
    return PreparedText(
        tokens,
        options,
        sampling_of(
            replace(options, seed=seed), pair.vocab, len(tokens), heard, compiled, reasoning
        ),
        pair.n_draft(options),
        pair.n_leaves(options),
        pair.prediction(options),
        () if options.context_shift else reading_order(tokens, pair.vocab.infill_tokens),
        seed,
        perf_counter() + _SECONDS_OVERTAKEN * len(tokens),
        images=pair.encoded_images(tokens, options.progress, for_draft=uses_model),
        **reported,
    )
