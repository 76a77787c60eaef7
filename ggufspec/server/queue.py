"""Requests for text, queued and running, and the events that they cause."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from ggufspec.engine.generation import Completion, Generation
from ggufspec.engine.options import CheckedOptions
from ggufspec.server.errors import ApiError
from ggufspec.server.logprobs import TokenLogprobs


@dataclass(frozen=True)
class ParsedRequest:
    """Prompts as token ids, each to be continued `n` times; choice i gets the seed `seed + i`.

    `n_top`: how many of the most likely tokens to report at each position; None: no logprobs.
    `has_tools`: whether the text may contain tool calls.
    """

    prompts: Sequence[Sequence[int]]
    options: CheckedOptions
    n: int = 1
    seed: int | None = None
    n_top: int | None = None
    has_tools: bool = False


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


@dataclass(eq=False)
class RunningChoice:
    """A choice that is being generated."""

    owner: TextRequest
    index: int
    generation: Generation
    tokens: list[int] = field(default_factory=list)


class TextRequest:
    """A request in the queue, then running: its choices in progress, and those not yet started.

    `on_event` is called on the worker's thread.
    """

    def __init__(self, parsed: ParsedRequest, on_event: Callable[[RequestEvent], None]) -> None:
        self.parsed = parsed
        self.on_event = on_event
        self.arrived_at = self.started_at = perf_counter()
        self.is_cancelled = False
        self.choices: list[RunningChoice] = []
        self.pending = deque(range(len(parsed.prompts) * parsed.n))

    def prompt_of(self, index: int) -> Sequence[int]:
        """The prompt of one of its choices."""
        return self.parsed.prompts[index // self.parsed.n]
