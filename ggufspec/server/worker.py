"""The thread that drives the engine, one round at a time, for all requests in its queue."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from time import perf_counter
from typing import Any, Literal, TypeVar

from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.logprobs import PromptScores
from ggufspec.engine.slots import Slot
from ggufspec.errors import GgufspecError
from ggufspec.server.errors import ApiError, api_error_of, log_error, server_stopping, worker_failed
from ggufspec.server.events import (
    ChoiceDelta,
    ChoiceFinished,
    Echo,
    ParsedRequest,
    RequestEnded,
    RequestEvent,
)
from ggufspec.server.metrics import Metrics

ROUND_SECONDS_MAX = 120.0  # half of it may be needed for a piece of a prompt, on a CPU
_MAX_RETRY = 60.0  # maximum seconds in Retry-After
_EXITS = (SystemExit, KeyboardInterrupt)
_N_SEEDS = 2**64

WorkerStatus = Literal["ok", "stopping", "stalled", "failed"]
T = TypeVar("T")
RunSoon = Callable[..., object]  # (function, *arguments), as asyncio's call_soon_threadsafe


@dataclass(eq=False)
class RunningChoice:
    owner: TextRequest
    index: int
    generation: Generation
    echo: Echo | None = None  # the prompt, which is sent first, with its log-probabilities
    n_echoed: int = 0  # its characters
    has_tokens: bool = False


class TextRequest:
    """A queued or running request, with its choices in progress and its pending choices.

    `run_soon` is called from any thread, and calls `on_event`.
    """

    def __init__(
        self, parsed: ParsedRequest, on_event: Callable[[RequestEvent], None], run_soon: RunSoon
    ) -> None:
        self.parsed = parsed
        self.on_event = on_event
        self.run_soon = run_soon
        self.arrived_at = self.started_at = perf_counter()
        self.is_cancelled = False
        self.choices: list[RunningChoice] = []
        self.pending = deque(range(len(parsed.prompts) * parsed.n))

    def prompt_of(self, index: int) -> Sequence[int]:
        return self.parsed.prompts[index // self.parsed.n]


class EngineWorker:
    """Runs as many requests at a time as the engine has slots; free slots go to further choices.

    Requests start in the order of arrival; at most `n_waiting_max` wait. An error of one request
    ends that request only. A cancelled request ends within one round.
    """

    def __init__(self, engine: Engine, *, n_waiting_max: int, metrics: Metrics) -> None:
        self._engine = engine
        self._scores = PromptScores(engine.vocab)
        self._n_waiting_max = n_waiting_max
        self._metrics = metrics
        self._waiting: deque[TextRequest] = deque()
        self._jobs: list[tuple[Slot, Callable[[], Any], Future[Any]]] = []
        self._running: list[TextRequest] = []
        self._events: list[tuple[TextRequest, RequestEvent]] = []  # not sent yet
        self._refuse: Callable[[], ApiError] | None = None  # the error if refused
        self._changed = threading.Condition()
        self._round_began_at: float | None = None  # None: between rounds
        self._n_ended = 0
        self._ended_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="ggufspec-worker", daemon=True)
        metrics.n_waiting.set_function(lambda: self.n_waiting)
        metrics.n_running.set_function(lambda: self.n_running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def status(self) -> WorkerStatus:
        """Whether requests are accepted: "failed" if the thread has died, "stalled" while one round
        takes longer than ROUND_SECONDS_MAX.
        """
        began_at = self._round_began_at
        is_dead = self._thread.ident is not None and not self._thread.is_alive()
        if self._refuse is worker_failed or (is_dead and self._refuse is None):
            return "failed"
        if began_at is not None and perf_counter() - began_at > ROUND_SECONDS_MAX:
            return "stalled"
        return "ok" if self._refuse is None else "stopping"

    def start(self) -> None:
        """Start the thread; may be called once."""
        self._thread.start()

    def submit(
        self,
        parsed: ParsedRequest,
        on_event: Callable[[RequestEvent], None],
        run_soon: RunSoon = lambda function, *arguments: function(*arguments),
    ) -> TextRequest:
        """Queue a request. Raises ApiError if the queue is full or closed."""
        request = TextRequest(parsed, on_event, run_soon)
        with self._changed:
            if self._refuse is not None:
                raise self._refuse()
            n_waiting, n_slots = len(self._waiting), self._engine.n_slots
            if n_waiting >= self._n_waiting_max + max(n_slots - len(self._running), 0):
                mean = self._ended_seconds / self._n_ended if self._n_ended else 1.0
                seconds = min(mean * (n_waiting + 1) / n_slots, _MAX_RETRY)
                raise ApiError(
                    429,
                    f"the queue is full: requests that wait: {n_waiting}; retry after the seconds "
                    "in Retry-After",
                    "rate_limit_error",
                    code="queue_full",
                    headers={"Retry-After": str(max(1, math.ceil(seconds)))},
                )
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def call(self, slot: Slot, work: Callable[[], T]) -> Future[T]:
        """Schedule `work` between two rounds, once no text uses the slot. Raises ApiError."""
        done: Future[T] = Future()
        with self._changed:
            if self._refuse is not None:
                raise self._refuse()
            self._jobs.append((slot, work, done))
            self._changed.notify_all()
        return done

    def cancel(self, request: TextRequest) -> None:
        """Drop a request: from the queue at once, otherwise at the end of the round."""
        with self._changed:
            request.is_cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)
                self._metrics.generations.labels("cancelled").inc()

    def finish(self) -> None:
        """Refuse new requests and fail waiting ones; running ones continue."""
        self._close(server_stopping)

    def abort(self) -> None:
        """Do the same as `finish`, and fail running requests, too."""
        self.finish()
        for request in list(self._running):
            if not request.is_cancelled:
                request.is_cancelled = True
                _send([(request, RequestEnded(server_stopping()))])

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the thread to end, after `finish` or `abort`; returns whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._start_requests():
                self._round_began_at = perf_counter()
                self._do_jobs()
                if self._running:
                    self._round()
                self._round_began_at = None
        except BaseException as error:
            self._round_began_at = None
            log_error("the engine worker has failed; restart the server", error)
            self._close(worker_failed)
            for request in list(self._running):
                self._end(request, "failed", error)
            self._send_events()

    def _close(self, reason: Callable[[], ApiError]) -> None:
        with self._changed:
            if self._refuse is not worker_failed:
                self._refuse = reason
            waiting, self._waiting = self._waiting, deque()
            jobs, self._jobs = self._jobs, []
            self._changed.notify_all()
        for _, _, done in jobs:
            if done.set_running_or_notify_cancel():
                done.set_exception(reason())
        _send([(request, RequestEnded(reason())) for request in waiting])

    def _start_requests(self) -> bool:
        """Wait for requests and start them; False once the queue is closed and nothing runs."""
        with self._changed:
            while not (self._running or self._waiting or self._jobs or self._refuse):
                self._changed.wait()
            n_free = self._engine.n_slots - len(self._running)
            for _ in range(min(n_free, len(self._waiting))):
                request = self._waiting.popleft()
                request.started_at = perf_counter()
                self._running.append(request)
            return bool(self._running or self._jobs)

    def _do_jobs(self) -> None:
        with self._changed:
            ready = [job for job in self._jobs if not (self._running and job[0].n_users)]
            self._jobs = [job for job in self._jobs if job not in ready]
        for _, work, done in ready:
            if not done.set_running_or_notify_cancel():
                continue
            try:
                with self._engine.pair.lock.held():
                    done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
                if isinstance(error, _EXITS):
                    raise

    def _round(self) -> None:
        for request in list(self._running):
            if request.is_cancelled:
                self._end(request, "cancelled")
        self._start_choices()
        choices = [choice for request in self._running for choice in request.choices]
        by_generation = {choice.generation: choice for choice in choices}
        errors = self._step(list(by_generation))
        for choice in choices:
            if choice in choice.owner.choices:  # an earlier choice may have ended the request
                with self._ends_on_error(choice.owner):
                    self._deliver(choice, errors.get(choice.generation))
        for request in list(self._running):
            if not request.pending and not request.choices:
                self._end(request, "completed")
        self._send_events()

    def _step(self, generations: Sequence[Generation]) -> dict[Generation, BaseException]:
        """Run a round of all generations. Returns the failed ones with their errors."""
        try:
            return dict(self._engine.scheduler.step(generations))
        except _EXITS:
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            cut = [each for each in generations if each.is_over and each.finish_reason is None]
            if cut or len(generations) == 1:
                return dict.fromkeys(cut or generations, error)
        errors: dict[Generation, BaseException] = {}
        for generation in generations:  # one by one, to find which one fails
            errors |= self._step([generation])
        return errors

    def _start_choices(self) -> None:
        """Start a choice of each request without one, then pending choices while slots are free."""
        n_free = self._engine.n_slots - sum(len(request.choices) for request in self._running)
        for request in [each for each in self._running if not each.choices]:
            n_free -= 1
            self._start_choice(request)
        while n_free > 0 and (left := [request for request in self._running if request.pending]):
            n_free -= 1
            self._start_choice(left[0])

    def _start_choice(self, request: TextRequest) -> None:
        with self._ends_on_error(request):
            parsed, index = request.parsed, request.pending.popleft()
            prompt, n_top = request.prompt_of(index), parsed.n_top
            has_scores = parsed.echo is not None and n_top is not None
            options = parsed.options
            if parsed.seed is not None:
                options = replace(options, seed=(parsed.seed + index) % _N_SEEDS)
            generation = Generation(
                self._engine.pair,
                prompt,
                options,
                n_top=n_top,
                prompt_logprobs=self._scores.known(prompt, n_top or 0) if has_scores else None,
            )
            generation.arrived_at = request.arrived_at
            echo = None if parsed.echo is None else parsed.echo[index // parsed.n]
            request.choices.append(choice := RunningChoice(request, index, generation, echo))
            self._echo(choice)

    def _echo(self, choice: RunningChoice) -> None:
        """Send the prompt once its log-probabilities are known."""
        generation, parsed = choice.generation, choice.owner.parsed
        if choice.echo is None or generation.is_scoring:
            return
        tokens, found = choice.owner.prompt_of(choice.index), generation.prompt_logprobs or ()
        if found and parsed.n_top is not None:
            self._scores.keep(tokens, parsed.n_top, found)
        text, ends = choice.echo
        delta = ChoiceDelta(choice.index, text, tokens, [False] * len(tokens), found, ends)
        self._events.append((choice.owner, delta))
        choice.echo, choice.n_echoed = None, len(text)

    def _deliver(self, choice: RunningChoice, error: BaseException | None) -> None:
        """Report the text that the last round added to a choice, and the end of the choice."""
        if error is not None:
            raise error
        self._echo(choice)
        request, generation = choice.owner, choice.generation
        while generation.chunks:
            chunk = generation.chunks.popleft()
            if not choice.index and not choice.has_tokens:
                self._metrics.time_to_first_token.observe(perf_counter() - request.arrived_at)
            choice.has_tokens = True
            ends = [choice.n_echoed + end for end in chunk.ends]
            self._events.append((request, ChoiceDelta(choice.index, *chunk)._replace(ends=ends)))
        if generation.is_over:
            self._release(choice)
            self._events.append((request, ChoiceFinished(choice.index, generation.completion)))

    def _release(self, choice: RunningChoice) -> None:
        choice.owner.choices.remove(choice)
        choice.generation.close()
        stats = choice.generation.completion.stats
        if stats.seconds.prompt:  # else it ended before its prompt was processed
            self._metrics.observe(stats, self._engine.pair.plain_seconds)

    @contextmanager
    def _ends_on_error(self, request: TextRequest) -> Iterator[None]:
        """A context in which an exception ends only this request."""
        try:
            yield
        except _EXITS:
            raise
        except BaseException as error:
            if not isinstance(error, GgufspecError):
                log_error("a request failed", error)
            self._end(request, "failed", error)

    def _end(self, request: TextRequest, outcome: str, error: BaseException | None = None) -> None:
        """Release a request and send its last event. Raises no Exception."""
        request.pending.clear()
        for choice in list(request.choices):
            try:
                self._release(choice)
            except _EXITS:
                raise
            except BaseException as failure:
                log_error("a text could not be closed", failure)
        with self._changed:
            self._running.remove(request)
        self._n_ended += 1
        self._ended_seconds += perf_counter() - request.started_at
        self._metrics.generations.labels(outcome).inc()
        if not request.is_cancelled:
            ended = RequestEnded(None if error is None else api_error_of(error))
            self._events.append((request, ended))

    def _send_events(self) -> None:
        events, self._events = self._events, []
        _send(events)


def _send(events: Sequence[tuple[TextRequest, RequestEvent]]) -> None:
    """Report events in one call per `run_soon`, since each call wakes an event loop."""
    for run_soon, together in groupby(events, key=lambda each: each[0].run_soon):
        try:
            run_soon(_report, [*together])
        except RuntimeError:
            pass  # the event loop is closed, so all connections are
        except Exception as failure:
            log_error("clients could not be notified", failure)


def _report(events: Sequence[tuple[TextRequest, RequestEvent]]) -> None:
    for request, event in events:
        try:
            request.on_event(event)
        except Exception as failure:
            log_error("a client could not be notified", failure)
