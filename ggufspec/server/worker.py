"""The thread that drives the engine, one round at a time, for all running requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions
from ggufspec.engine.scheduler import Scheduler
from ggufspec.errors import GgufspecError
from ggufspec.server.errors import ApiError, api_error_of, server_stopping, worker_failed
from ggufspec.server.logprobs import TokenLogprobs, logprobs_of
from ggufspec.server.metrics import Metrics
from ggufspec.server.queue import (
    ChoiceDelta,
    ChoiceFinished,
    ParsedRequest,
    QueuedRequest,
    RequestEnded,
    RequestEvent,
    RequestQueue,
    RunningChoice,
    RunningRequest,
)

LOG = logging.getLogger("ggufspec.server")

_N_SEEDS = 2**64


class EngineWorker:
    """Runs as many requests at a time as the engine has slots; free slots go to further choices.

    An error of one request ends that request only. A cancelled request ends within one round.
    """

    def __init__(self, engine: Engine, *, n_waiting_max: int, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._queue = RequestQueue(engine.n_slots, n_waiting_max)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="ggufspec-worker", daemon=True)
        metrics.n_waiting.set_function(lambda: self.n_waiting)
        metrics.n_running.set_function(lambda: self.n_running)

    @property
    def n_waiting(self) -> int:
        """Requests that have not started."""
        return self._queue.n_waiting

    @property
    def n_running(self) -> int:
        """Requests that have started and not ended."""
        return len(self._queue.running)

    @property
    def status(self) -> Literal["ok", "stopping", "failed"]:
        """Whether requests are accepted; "failed" if the thread has died."""
        if self._has_failed:
            return "failed"
        return "stopping" if self._queue.is_closed else "ok"

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def submit(
        self, parsed: ParsedRequest, on_event: Callable[[RequestEvent], None]
    ) -> QueuedRequest:
        """Queue a request. Raises ApiError where the queue is full or closed."""
        queued = QueuedRequest(parsed, on_event)
        self._queue.put(queued)
        return queued

    def cancel(self, queued: QueuedRequest) -> None:
        """Drop a request: from the queue at once, otherwise at the end of the round."""
        queued.is_cancelled = True
        if self._queue.discard(queued):
            self._metrics.generations.labels("cancelled").inc()

    def finish(self) -> None:
        """Refuse new requests and fail those that wait; running ones continue."""
        for queued in self._queue.close(server_stopping):
            self._send_end(queued, server_stopping())

    def abort(self) -> None:
        """As `finish`, and fail the running requests too."""
        self.finish()
        for request in self._queue.running:
            if not request.queued.is_cancelled:
                request.queued.is_cancelled = True
                self._send_end(request.queued, server_stopping())

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the thread to end, after `finish` or `abort`; returns whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            scheduler = self._engine.scheduler()
            while running := self._queue.next_running():
                self._round(scheduler, running)
        except BaseException as error:
            self._has_failed = True
            _log("the engine worker has failed; restart the server", error)
            for queued in self._queue.close(worker_failed):
                self._send_end(queued, worker_failed())
            for request in self._queue.running:
                self._end(request, "failed", error)

    def _round(self, scheduler: Scheduler, running: Sequence[RunningRequest]) -> None:
        for request in running:
            if request.queued.is_cancelled:
                self._end(request, "cancelled")
        self._start_choices(self._queue.running)
        choices = [choice for request in self._queue.running for choice in request.choices]
        by_stream = {choice.stream: choice for choice in choices}
        try:
            errors = dict(scheduler.step(list(by_stream)))
        except Exception as error:
            errors = dict.fromkeys(by_stream, error)
        for choice in choices:
            if choice in choice.owner.choices:  # an earlier choice may have ended the request
                with self._ends_on_error(choice.owner):
                    self._deliver(choice, errors.get(choice.stream))
        for request in self._queue.running:
            if request.is_finished:
                self._end(request, "completed")

    def _start_choices(self, running: Sequence[RunningRequest]) -> None:
        """One choice of each request; then further ones, while slots are free."""
        n_free = self._engine.n_slots - sum(len(request.choices) for request in running)
        for request in running:
            if not request.choices:
                n_free -= 1
                self._start_choice(request)
        while n_free > 0 and (left := [request for request in running if request.pending]):
            n_free -= 1
            self._start_choice(left[0])

    def _start_choice(self, request: RunningRequest) -> None:
        index = request.pending.popleft()
        seed = request.parsed.seed
        if seed is not None:
            seed = (seed + index) % _N_SEEDS
        options: GenerateOptions = {**request.parsed.options, "seed": seed}
        with self._ends_on_error(request):
            stream = self._engine.stream(request.prompt_of(index), **options)
            request.choices.append(RunningChoice(request, index, stream))

    def _deliver(self, choice: RunningChoice, error: Exception | None) -> None:
        """Report what the last round has added to a choice, and whether it is complete."""
        if error is not None:
            raise error
        queued = choice.owner.queued
        for chunk in choice.stream.taken():
            if not choice.index and not choice.tokens:
                self._metrics.time_to_first_token.observe(perf_counter() - queued.arrived_at)
            logprobs = self._logprobs(choice, chunk.tokens)
            choice.tokens += chunk.tokens
            delta = ChoiceDelta(choice.index, chunk.text, chunk.tokens, chunk.drafted, logprobs)
            queued.on_event(delta)
        if choice.stream.is_over:
            self._release(choice)
            queued.on_event(ChoiceFinished(choice.index, choice.stream.completion))

    def _logprobs(self, choice: RunningChoice, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Of the target before sampling, which scores the tokens a second time for them."""
        n_top = choice.owner.parsed.n_top
        if n_top is None or not tokens:
            return []
        engine = self._engine
        before = [*choice.owner.prompt_of(choice.index), *choice.tokens]
        n_together = min(len(tokens), engine.n_draft_max + 1)
        pieces = engine.logits(before, tokens, whose="target", n_together=n_together)
        rows = [row for piece in pieces for row in piece]
        return [
            logprobs_of(row, token, n_top, engine.vocab)
            for row, token in zip(rows, tokens, strict=True)
        ]

    def _release(self, choice: RunningChoice) -> None:
        """Give back what a choice holds, and count its tokens."""
        choice.owner.choices.remove(choice)
        choice.stream.close()
        self._metrics.observe(choice.stream.completion.stats, self._engine.plain_seconds)

    @contextmanager
    def _ends_on_error(self, request: RunningRequest) -> Iterator[None]:
        """Whatever is raised inside ends this request, and none of the others."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, GgufspecError):
                _log("a request failed", error)
            self._end(request, "failed", error)

    def _end(
        self, request: RunningRequest, outcome: str, error: BaseException | None = None
    ) -> None:
        """Release a request and send its last event. Raises no Exception."""
        request.pending.clear()
        for choice in list(request.choices):
            try:
                self._release(choice)
            except Exception as failure:
                _log("a text could not be closed", failure)
        self._queue.remove(request)
        self._metrics.generations.labels(outcome).inc()
        if not request.queued.is_cancelled:
            self._send_end(request.queued, None if error is None else api_error_of(error))

    def _send_end(self, queued: QueuedRequest, error: ApiError | None) -> None:
        try:
            queued.on_event(RequestEnded(error))
        except Exception as failure:
            _log("a client could not be notified", failure)


def _log(what: str, error: BaseException) -> None:
    """The type alone at the default level: the message may quote a prompt or a path."""
    LOG.error("%s: %s", what, type(error).__name__)
    LOG.debug("traceback", exc_info=error)
