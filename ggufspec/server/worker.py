"""The one thread that owns the engine, and the queue before it. Knows no HTTP and no JSON.

Requests are begun in the order they came, as many at once as the engine has slots; what is free
then goes to further texts of those that run. All that is under way shares passes. Whoever asked is
told by a callback, in the worker's thread; who has gone away is noticed within one round.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Completion, Generation
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.scheduler import Scheduler
from ggufspec.errors import GgufspecError
from ggufspec.server.errors import BusyError, InternalError, StoppingError
from ggufspec.server.logprobs import TokenLogprobs, logprobs_of
from ggufspec.server.metrics import Metrics

LOG = logging.getLogger("ggufspec.server")

_LONGEST_RETRY_SECONDS = 60.0
_N_SEEDS = 2**64


@dataclass(frozen=True)
class Task:
    """Prompts, each to be continued `n` times; text i has the seed `seed + i`.

    `n_top`: how many of the likeliest tokens are told at each place; None: no log-probabilities.
    """

    prompts: Sequence[Sequence[int]]
    options: CheckedOptions
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


class Text:
    """One of the texts of a ticket, under way."""

    def __init__(self, job: Job, which: int, prompt: Sequence[int], generation: Generation) -> None:
        self.job = job
        self.which = which
        self.prompt = prompt
        self.generation = generation
        self.tokens: list[int] = []


class Job:
    """A ticket that has been begun: the texts that are left of it, and those under way."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.started_at = perf_counter()
        self.writing: list[Text] = []
        task = ticket.task
        self.left = deque(enumerate(prompt for prompt in task.prompts for _ in range(task.n)))

    @property
    def is_over(self) -> bool:
        """Whether all its texts are written."""
        return not self.left and not self.writing


class Worker:
    """A queue of at most `n_waiting_max` tasks behind those that run."""

    def __init__(self, engine: Engine, *, n_waiting_max: int, metrics: Metrics) -> None:
        self._engine = engine
        self._n_waiting_max = n_waiting_max
        self._metrics = metrics
        self._waiting: deque[Ticket] = deque()
        self._running: list[Job] = []
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
        """Tasks that are worked on."""
        return len(self._running)

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
            n_slots = self._engine.n_slots
            n_free = n_slots - len(self._running)
            if len(self._waiting) >= self._n_waiting_max + max(n_free, 0):
                seconds = self._metrics.mean_task_seconds * (len(self._waiting) + 1) / n_slots
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
        for job in list(self._running):
            if not job.ticket.is_given_up:
                job.ticket.is_given_up = True
                job.ticket.tell(Failed(StoppingError()))

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the thread to end, after `finish` or `abort`; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        scheduler = Scheduler(self._engine)
        while self._wait():
            self._begin_texts()
            texts = [text for job in self._running for text in job.writing]
            by_generation = {text.generation: text for text in texts}
            try:
                errors = scheduler.step(list(by_generation))
            except Exception as error:  # the thread lives on for who comes next
                errors = [(generation, error) for generation in by_generation]
            failed = {by_generation[generation]: error for generation, error in errors}
            for text in texts:
                if text in text.job.writing:  # not of a job that has failed just now
                    self._hear(text, failed.get(text))
            for job in [job for job in self._running if job.is_over]:
                job.ticket.tell(Done())
                self._end(job, "done")

    def _wait(self) -> bool:
        """For something to do. False when there will be nothing."""
        with self._changed:
            while not (self._running or self._waiting or self._stopping):
                self._changed.wait()
            n_free = self._engine.n_slots - len(self._running)
            for _ in range(min(n_free, len(self._waiting))):
                self._running.append(Job(self._waiting.popleft()))
            return bool(self._running)

    def _begin_texts(self) -> None:
        """One of each task; then, where there is room, more of those that have more."""
        n_free = self._engine.n_slots - sum(len(job.writing) for job in self._running)
        for job in [job for job in self._running if not job.writing]:
            n_free -= 1
            self._begin(job)
        while n_free > 0 and (hungry := [job for job in self._running if job.left]):
            n_free -= 1
            self._begin(hungry[0])

    def _begin(self, job: Job) -> None:
        """The next text of a task."""
        task = job.ticket.task
        which, prompt = job.left.popleft()
        seed = None if task.seed is None else (task.seed + which) % _N_SEEDS
        try:
            job.ticket.check()
            generation = Generation(self._engine, prompt, task.options, seed=seed)
        except Exception as error:
            self._fail(job, error)
        else:
            job.writing.append(Text(job, which, prompt, generation))

    def _hear(self, text: Text, error: Exception | None) -> None:
        """A round of a text has gone by: tell what there is, and whether it has ended."""
        ticket, generation = text.job.ticket, text.generation
        try:
            ticket.check()
            if error is not None:
                raise error
            while generation.chunks:
                chunk = generation.chunks.popleft()
                if not text.which and not text.tokens:
                    self._metrics.first_text(perf_counter() - ticket.asked_at)
                found = self._logprobs(ticket.task, text.prompt, text.tokens, chunk.tokens)
                text.tokens += chunk.tokens
                ticket.tell(Piece(text.which, chunk.text, chunk.tokens, chunk.drafted, found))
        except Exception as failure:
            self._fail(text.job, failure)
            return
        if generation.is_over:
            self._let_go(text)
            ticket.tell(Ended(text.which, generation.completion))

    def _fail(self, job: Job, error: Exception) -> None:
        """Whatever one request meets, the others are served."""
        how = "failed"
        if isinstance(error, _GivenUp):
            how = "cancelled"
        elif isinstance(error, GgufspecError):
            job.ticket.tell(Failed(error))
        else:
            LOG.error("a request failed: %s", type(error).__name__)
            LOG.debug("it was", exc_info=error)
            job.ticket.tell(Failed(InternalError()))
        self._end(job, how)

    def _end(self, job: Job, how: str) -> None:
        for text in list(job.writing):
            self._let_go(text)
        job.left.clear()
        with self._changed:
            if job in self._running:
                self._running.remove(job)
        self._metrics.ended(how, perf_counter() - job.started_at)

    def _let_go(self, text: Text) -> None:
        text.job.writing.remove(text)
        text.generation.close()
        self._metrics.wrote(text.generation.completion.stats, self._engine.plain_seconds)

    def _logprobs(
        self, task: Task, prompt: Sequence[int], before: Sequence[int], tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Of the target itself, before sampling: it reads the tokens a second time for that."""
        if task.n_top is None or not tokens:
            return []
        engine = self._engine
        n_together = min(len(tokens), engine.n_draft_max + 1)
        known = [*prompt, *before]
        pieces = scoring.logits(engine, known, tokens, whose="target", n_together=n_together)
        rows = [row for piece in pieces for row in piece]
        return [
            logprobs_of(row, token, task.n_top, engine.vocab)
            for row, token in zip(rows, tokens, strict=True)
        ]


class _GivenUp(Exception):
    """Nobody waits for this text any more."""
