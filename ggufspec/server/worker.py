"""The one thread that owns the engine, and the queue before it. Knows no HTTP and no JSON.

Requests are served in the order they came. Whoever asked is told by a callback, in the worker's
thread; who has gone away is noticed within one round.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from ggufspec.engine import Engine
from ggufspec.errors import GgufspecError
from ggufspec.request import GenerateOptions
from ggufspec.server.logprobs import TokenLogprobs, logprobs_of
from ggufspec.server.metrics import Metrics
from ggufspec.server.problems import BusyError, InternalError, StoppingError
from ggufspec.stream import Completion

LOG = logging.getLogger("ggufspec.server")

_LONGEST_RETRY_SECONDS = 60.0
_N_SEEDS = 2**64


@dataclass(frozen=True)
class Task:
    """Prompts, each to be continued `n` times; text i has the seed `seed + i`.

    `n_top`: how many of the likeliest tokens are told at each place; None: no log-probabilities.
    """

    prompts: Sequence[Sequence[int]]
    options: GenerateOptions
    n: int = 1
    seed: int | None = None
    n_top: int | None = None

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


class Piece(NamedTuple):
    """More of a text: of the first, second ... of its task."""

    which: int
    text: str
    tokens: Sequence[int]
    drafted: Sequence[bool]
    logprobs: Sequence[TokenLogprobs]


class Ended(NamedTuple):
    """A text is complete."""

    which: int
    completion: Completion


class Done(NamedTuple):
    """All texts of the task are."""


class Failed(NamedTuple):
    """Nothing more will come."""

    error: GgufspecError


News = Piece | Ended | Done
Event = News | Failed


class Ticket:
    """A task in the queue, and who is to hear of it."""

    def __init__(self, task: Task, tell: Callable[[Event], None]) -> None:
        self.task = task
        self.tell = tell
        self.asked_at = perf_counter()
        self.is_given_up = False

    def check(self) -> None:
        """Raise _GivenUp once nobody waits any more."""
        if self.is_given_up:
            raise _GivenUp


class Worker:
    """A queue of at most `n_waiting_max` tasks behind the running one."""

    def __init__(self, engine: Engine, *, n_waiting_max: int, metrics: Metrics) -> None:
        self._engine = engine
        self._n_waiting_max = n_waiting_max
        self._metrics = metrics
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="ggufspec-worker", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Tasks whose turn has not come."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """1 while a task is worked on."""
        return int(self._running is not None)

    @property
    def is_stopping(self) -> bool:
        """Whether nothing new is taken."""
        return self._stopping

    def ask(self, task: Task, tell: Callable[[Event], None]) -> Ticket:
        """Put a task into the queue. Raises BusyError, StoppingError."""
        ticket = Ticket(task, tell)
        with self._changed:
            if self._stopping:
                raise StoppingError
            is_free = self._running is None and not self._waiting
            if not is_free and len(self._waiting) >= self._n_waiting_max:
                seconds = self._metrics.mean_task_seconds * (len(self._waiting) + 1)
                raise BusyError(len(self._waiting), min(seconds, _LONGEST_RETRY_SECONDS))
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: it leaves the queue, or ends within a round."""
        with self._changed:
            ticket.is_given_up = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._metrics.ended("cancelled", 0.0)

    def finish(self) -> None:
        """Take nothing new, and tell those who wait; what runs goes on."""
        with self._changed:
            self._stopping = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for ticket in waiting:
            ticket.tell(Failed(StoppingError()))

    def abort(self) -> None:
        """The same, and what runs is told too."""
        self.finish()
        running = self._running
        if running is not None and not running.is_given_up:
            running.is_given_up = True
            running.tell(Failed(StoppingError()))

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the thread to end, after `finish` or `abort`; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (ticket := self._next()) is not None:
            started_at, how = perf_counter(), "failed"
            try:
                self._serve(ticket)
                how = "done"
            except _GivenUp:
                how = "cancelled"
            except GgufspecError as error:
                ticket.tell(Failed(error))
            except Exception as error:
                # Here alone: whatever one request meets, the next one must be served.
                LOG.error("a request failed: %s", type(error).__name__)
                LOG.debug("it was", exc_info=error)
                ticket.tell(Failed(InternalError()))
            finally:
                self._running = None
                self._metrics.ended(how, perf_counter() - started_at)

    def _next(self) -> Ticket | None:
        """The next task; None when there will be none."""
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait()
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _serve(self, ticket: Ticket) -> None:
        task, index = ticket.task, 0
        for prompt in task.prompts:
            for _ in range(task.n):
                ticket.check()
                seed = None if task.seed is None else (task.seed + index) % _N_SEEDS
                self._write(ticket, index, prompt, seed)
                index += 1
        ticket.tell(Done())

    def _write(self, ticket: Ticket, index: int, prompt: Sequence[int], seed: int | None) -> None:
        """One text. Raises _GivenUp, GgufspecError."""

        def heard(whose: str, done: int, total: int) -> None:
            ticket.check()

        options: GenerateOptions = {**ticket.task.options, "progress": heard, "seed": seed}
        stream = self._engine.stream(prompt, **options)
        text: list[int] = []
        try:
            for chunk in stream:
                ticket.check()
                if not index and not text:
                    self._metrics.first_text(perf_counter() - ticket.asked_at)
                found = self._logprobs(ticket.task, prompt, text, chunk.tokens)
                text += chunk.tokens
                ticket.tell(Piece(index, chunk.text, chunk.tokens, chunk.drafted, found))
        finally:
            self._metrics.wrote(stream.completion.stats, self._engine.plain_seconds)
        ticket.tell(Ended(index, stream.completion))

    def _logprobs(
        self, task: Task, prompt: Sequence[int], before: Sequence[int], tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Of the target itself, before sampling: it reads the tokens a second time for that."""
        if task.n_top is None or not tokens:
            return []
        engine = self._engine
        n_together = min(len(tokens), engine.n_draft_max + 1)
        pieces = engine.logits([*prompt, *before], tokens, whose="target", n_together=n_together)
        rows = [row for piece in pieces for row in piece]
        return [
            logprobs_of(row, token, task.n_top, engine.vocab)
            for row, token in zip(rows, tokens, strict=True)
        ]


class _GivenUp(Exception):
    """Nobody waits for this text any more."""
