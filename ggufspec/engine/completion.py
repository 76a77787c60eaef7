"""What a generation returns: chunks as they come, and the completion in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ggufspec.decoding.stats import Stats
from ggufspec.engine.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length"]


class Chunk(NamedTuple):
    """A piece of the text; `drafted[i]` is true if token i was proposed by the draft.

    `text` may lag behind `tokens`, by part of a character or of a stop string. `logprobs` has one
    entry per token if the generation was begun with `n_top`, else none.
    """

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The result of a generation.

    `tokens` are without the end-of-generation token, but with those of a stop string, which `text`
    leaves out; `finish_reason` is "stop" (the model ended, or a stop string came), "length"
    (max_tokens, or the context is full), None if cut short.
    `advice`: what to change, where drafting does not make this pair faster. `stop`: the stop string
    that ended the text.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
    advice: str | None = None
    stop: str | None = None
