"""What the worker is given for a request, and the events that it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggufspec.engine.completion import Completion
from ggufspec.engine.logprobs import TokenLogprobs
from ggufspec.engine.options import CheckedOptions
from ggufspec.server.errors import ApiError
from ggufspec.server.formats.deltas import ChatParser


@dataclass(frozen=True)
class ParsedRequest:
    """Prompts as token ids, each to be continued `n` times; choice i gets the seed `seed + i`.

    `n_top`: how many of the most likely tokens to report at each position; None: no logprobs.
    `parser`: makes what parses a text; None: it has no parts. `echo`: texts of the prompts, to
    begin the responses with; `writes`: whether anything follows.
    """

    prompts: Sequence[Sequence[int]]
    options: CheckedOptions
    n: int = 1
    seed: int | None = None
    n_top: int | None = None
    parser: Callable[[], ChatParser] | None = None
    echo: Sequence[str] | None = None
    writes: bool = True


class ChoiceDelta(NamedTuple):
    """More text of one choice."""

    choice_index: int
    text: str
    tokens: Sequence[int]
    drafted: Sequence[bool]
    logprobs: Sequence[TokenLogprobs]


class ChoiceFinished(NamedTuple):
    """One choice is complete."""

    choice_index: int
    completion: Completion


class RequestEnded(NamedTuple):
    """The last event: all choices are complete, or the request has failed."""

    error: ApiError | None


RequestEvent = ChoiceDelta | ChoiceFinished | RequestEnded
