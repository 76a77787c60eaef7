"""A request as token ids with options, and the events of its choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggufspec.engine.logprobs import TokenLogprobs
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.prepared import PreparedText
from ggufspec.engine.text import Completion
from ggufspec.server.formats.deltas import ChatParser


class Echo(NamedTuple):
    """A prompt as text, and where in it each of its tokens ends, in characters."""

    text: str
    ends: Sequence[int]


@dataclass(frozen=True)
class ParsedRequest:
    """Prompts as token ids, each to be continued `n` times; choice i gets the seed `seed + i`.

    `n_top`: number of most likely tokens to report at each position; None: no logprobs.
    `parser`: creates the parser of a text; None: the whole text is content. `echo`: the prompts,
    with which the responses begin. `not_enforced`: keywords of the tools' schemas that calls may
    violate. `first`: choice 0, ready to be submitted; None: not prepared.
    """

    prompts: Sequence[Sequence[int]]
    options: CheckedOptions
    n: int = 1
    seed: int | None = None
    n_top: int | None = None
    parser: Callable[[], ChatParser] | None = None
    echo: Sequence[Echo] | None = None
    not_enforced: Sequence[str] = ()
    first: PreparedText | None = None


class ChoiceDelta(NamedTuple):
    """A chunk of a choice. `ends`: where each token ends, in characters of the choice's text."""

    choice_index: int
    text: str
    tokens: Sequence[int]
    drafted: Sequence[bool]
    logprobs: Sequence[TokenLogprobs]
    ends: Sequence[int]


class ChoiceFinished(NamedTuple):
    choice_index: int
    completion: Completion


ChoiceEvent = ChoiceDelta | ChoiceFinished
