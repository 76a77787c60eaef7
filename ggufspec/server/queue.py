"""The queue of requests for text: those that wait, those that run, and the events they cause."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from ggufspec.engine.options import GenerateOptions
from ggufspec.engine.stream import Completion, Stream
from ggufspec.server.errors import ApiError, queue_full
from ggufspec.server.logprobs import TokenLogprobs

_MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class ParsedRequest:
    """Prompts as token ids, each to be continued `n` times; choice i gets the seed `seed + i`.

    `n_top`: how many of the most likely tokens to report at each position; None: no logprobs.
    `has_tools`: whether the text may contain tool calls.
    """

    prompts: Sequence[Sequence[int]]
    options: GenerateOptions
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
class QueuedRequest:
    """A request in the queue. `on_event` is called on the worker's thread."""

    parsed: ParsedRequest
    on_event: Callable[[RequestEvent], None]
    arrived_at: float = field(default_factory=perf_counter)
    is_cancelled: bool = False


@dataclass(eq=False)
class RunningChoice:
    """A choice that is being generated."""

    owner: RunningRequest
    index: int
    stream: Stream
    tokens: list[int] = field(default_factory=list)


class RunningRequest:
    """A request that has left the queue: its choices in progress, and those not yet started."""

    def __init__(self, queued: QueuedRequest) -> None:
        self.queued = queued
        self.parsed = queued.parsed
        self.started_at = perf_counter()
        self.choices: list[RunningChoice] = []
        self.pending = deque(range(len(self.parsed.prompts) * self.parsed.n))

    def prompt_of(self, index: int) -> Sequence[int]:
        """The prompt of one of its choices."""
        return self.parsed.prompts[index // self.parsed.n]

    @property
    def is_finished(self) -> bool:
        """Whether all choices are complete."""
        return not self.pending and not self.choices


class RequestQueue:
    """At most `n_waiting_max` requests that wait, behind at most `n_slots` that run.

    Requests start in the order of arrival.
    """

    def __init__(self, n_slots: int, n_waiting_max: int) -> None:
        self._n_slots = n_slots
        self._n_waiting_max = n_waiting_max
        self._waiting: deque[QueuedRequest] = deque()
        self._running: list[RunningRequest] = []
        self._closed: Callable[[], ApiError] | None = None
        self._changed = threading.Condition()
        self._n_ended = 0
        self._seconds = 0.0  # of those that have ended

    @property
    def n_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def running(self) -> list[RunningRequest]:
        """Requests that have started, oldest first; a copy."""
        with self._changed:
            return list(self._running)

    @property
    def is_closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closed is not None

    def put(self, queued: QueuedRequest) -> None:
        """Append a request. Raises ApiError where the queue is full or closed."""
        with self._changed:
            if self._closed is not None:
                raise self._closed()
            n_free = self._n_slots - len(self._running)
            if len(self._waiting) >= self._n_waiting_max + max(n_free, 0):
                mean = self._seconds / self._n_ended if self._n_ended else 1.0
                seconds = mean * (len(self._waiting) + 1) / self._n_slots
                raise queue_full(len(self._waiting), min(seconds, _MAX_RETRY_SECONDS))
            self._waiting.append(queued)
            self._changed.notify_all()

    def discard(self, queued: QueuedRequest) -> bool:
        """Remove a request that has not started; returns whether it was there."""
        with self._changed:
            if queued not in self._waiting:
                return False
            self._waiting.remove(queued)
            return True

    def next_running(self) -> list[RunningRequest]:
        """Start what has a free slot, and return all that run: blocks until there are some.

        Empty once the queue is closed and nothing runs.
        """
        with self._changed:
            while not (self._running or self._waiting or self._closed):
                self._changed.wait()
            n_free = self._n_slots - len(self._running)
            for _ in range(min(n_free, len(self._waiting))):
                self._running.append(RunningRequest(self._waiting.popleft()))
            return list(self._running)

    def remove(self, request: RunningRequest) -> None:
        """A running request has ended."""
        with self._changed:
            self._running.remove(request)
            self._n_ended += 1
            self._seconds += perf_counter() - request.started_at

    def close(self, reason: Callable[[], ApiError]) -> list[QueuedRequest]:
        """Refuse new requests from now on, with `reason()`; returns those that were waiting."""
        with self._changed:
            self._closed = reason
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return waiting
