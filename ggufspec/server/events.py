"""What the worker runs: requests and jobs; and the events that it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ggufspec.engine.completion import Completion
from ggufspec.engine.logprobs import TokenLogprobs
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.slots import Slot
from ggufspec.server.errors import ApiError
from ggufspec.server.formats.deltas import ChatParser


@dataclass(frozen=True)
class ParsedRequest:
    """Prompts as token ids, each to be continued `n` times; choice i gets the seed `seed + i`.

    `n_top`: number of most likely tokens to report at each position; None: no logprobs.
    `parser`: creates the parser of a text; None: the whole text is content. `echo`: texts of the
    prompts, with which the responses begin; `writes`: whether generated text follows.
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
    choice_index: int
    text: str
    tokens: Sequence[int]
    drafted: Sequence[bool]
    logprobs: Sequence[TokenLogprobs]


class ChoiceFinished(NamedTuple):
    choice_index: int
    completion: Completion


class RequestEnded(NamedTuple):
    """The last event: all choices are complete, or the request has failed."""

    error: ApiError | None


ChoiceEvent = ChoiceDelta | ChoiceFinished
RequestEvent = ChoiceEvent | RequestEnded


@dataclass(eq=False)
class SlotJob:
    """Work on a slot that no text uses."""

    slot: Slot
    work: Callable[[], Any]
    done: Future[Any]

    def run(self, lock: AbstractContextManager[object]) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            with lock:
                self.done.set_result(self.work())
        except BaseException as error:
            self.done.set_exception(error)
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                raise

    def fail(self, error: ApiError) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)
