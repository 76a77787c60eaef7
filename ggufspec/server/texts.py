"""The requests for text of a server: which come in, their choices, and their events."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ggufspec.engine.engine import Engine
from ggufspec.engine.handle import Handle
from ggufspec.engine.logprobs import PromptScores
from ggufspec.engine.prepared import PreparedText
from ggufspec.engine.slots import Slot
from ggufspec.errors import GgufspecError
from ggufspec.server.errors import ApiError, api_error_of, engine_failed, log_error, server_stopping
from ggufspec.server.events import ChoiceDelta, ChoiceEvent, ChoiceFinished, Echo, ParsedRequest
from ggufspec.server.metrics import Metrics

ROUND_SECONDS_MAX = 120.0  # half of it may be needed for a piece of a prompt, on a CPU
_MAX_RETRY = 60.0  # maximum seconds in Retry-After
_N_SEEDS = 2**64

Events = AsyncGenerator[Sequence[ChoiceEvent], None]
Status = Literal["ok", "stopping", "stalled", "failed"]
T = TypeVar("T")


@dataclass(eq=False)
class _Choice:
    index: int
    handle: Handle
    echo: Echo | None  # the prompt, which is sent first, with its log-probabilities
    n_echoed: int = 0  # its characters


class _Request:
    """A request for text, with its choices under way and those that have not been submitted."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self.parsed = parsed
        self.arrived_at = perf_counter()
        self.has_tokens = False  # of its first choice
        self.choices: list[_Choice] = []
        self.pending = deque(range(len(parsed.prompts) * parsed.n))
        self.news = asyncio.Event()
        self.error: BaseException | None = None  # why it ends early

    @property
    def has_begun(self) -> bool:
        """Whether one of its texts got a slot."""
        is_later = len(self.choices) + len(self.pending) < len(self.parsed.prompts) * self.parsed.n
        return is_later or any(each.handle.generation for each in self.choices)

    def end(self, error: BaseException) -> None:
        self.error = self.error or error
        self.news.set()


class Texts:
    """Writes the texts of requests, in one event loop; the engine's thread computes them.

    At most `n_waiting_max` requests wait. A request has as many choices submitted as the engine has
    slots. An error of one request ends that request only.
    """

    def __init__(self, engine: Engine, *, n_waiting_max: int, metrics: Metrics) -> None:
        self._engine, self._scheduler = engine, engine.scheduler
        self._scores = PromptScores(engine.vocab)
        self._n_waiting_max = n_waiting_max
        self._metrics = metrics
        self._open: list[_Request] = []
        self._told: deque[tuple[_Request, Handle]] = deque()  # not heard yet
        self._woken: asyncio.AbstractEventLoop | None = None  # will hear soon
        self._is_stopping = False
        self._n_ended = 0
        self._ended_seconds = 0.0
        metrics.observe_queue(lambda: self.n_waiting, lambda: self.n_running)

    @property
    def n_waiting(self) -> int:
        return len(self._open) - self.n_running

    @property
    def n_running(self) -> int:
        return sum([each.has_begun for each in self._open])

    @property
    def status(self) -> Status:
        """Whether requests are accepted: "failed" if the engine's thread has died, "stalled" while
        one round takes longer than ROUND_SECONDS_MAX.
        """
        if self._scheduler.has_failed:
            return "failed"
        began_at = self._scheduler.round_began_at
        if began_at is not None and perf_counter() - began_at > ROUND_SECONDS_MAX:
            return "stalled"
        return "stopping" if self._is_stopping else "ok"

    async def events(
        self, parsed: ParsedRequest, receive: Receive, *, timeout: float, keep_alive: float
    ) -> Events:
        """The events of a request, up to its end; closing the generator cancels the request.

        Events that arrive together are yielded together; an empty sequence is yielded after
        `keep_alive` seconds without events. `receive` reports a disconnect. Raises ApiError, also
        after `timeout` seconds, and ClientDisconnect.
        """
        loop = asyncio.get_running_loop()
        request, deadline, outcome = self._admitted(parsed), loop.time() + timeout, "cancelled"
        news = request.news
        disconnected = asyncio.ensure_future(disconnect(receive))
        disconnected.add_done_callback(lambda _: news.set())
        try:
            while True:
                await self._submit_choices(request)
                # Checked before events, so that a fast stream delays neither check.
                if disconnected.done():
                    raise ClientDisconnect
                if request.error is not None:
                    raise request.error
                if loop.time() >= deadline:
                    raise timed_out(timeout)
                news.clear()
                if found := self._taken(request):
                    yield found
                elif request.error is not None:
                    raise request.error
                elif not (request.choices or request.pending):
                    outcome = "completed"
                    return
                else:
                    timer = loop.call_later(min(deadline - loop.time(), keep_alive), news.set)
                    await news.wait()
                    timer.cancel()
                    if loop.time() >= timer.when():
                        yield ()
        except (ApiError, ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            outcome = "failed"
            if not isinstance(error, GgufspecError):
                log_error("a request failed", error)
            raise api_error_of(error) from error
        finally:
            disconnected.cancel()
            self._close(request, outcome)

    def call(self, slot: Slot, work: Callable[[], T]) -> Future[T]:
        """Have the engine's thread call `work`, once no text uses the slot. Raises ApiError."""
        self._check_open()
        return self._scheduler.call(work, lambda: not slot.is_used)

    def finish(self) -> None:
        """Refuse new requests and end waiting ones; running ones continue."""
        self._is_stopping = True
        for request in self._open:
            if not request.has_begun:
                request.end(server_stopping())

    def abort(self) -> None:
        """Do the same as `finish`, and end running requests, too."""
        self._is_stopping = True
        for request in self._open:
            request.end(server_stopping())

    def _check_open(self) -> None:
        if self._scheduler.has_failed:
            raise engine_failed()
        if self._is_stopping:
            raise server_stopping()

    def _admitted(self, parsed: ParsedRequest) -> _Request:
        """Add a request. Raises ApiError if the queue is full or closed."""
        self._check_open()
        n_waiting, n_slots = self.n_waiting, self._engine.n_slots
        if n_waiting >= self._n_waiting_max + max(n_slots - self.n_running, 0):
            mean = self._ended_seconds / self._n_ended if self._n_ended else 1.0
            seconds = min(mean * (n_waiting + 1) / n_slots, _MAX_RETRY)
            raise queue_full(n_waiting, seconds)
        request = _Request(parsed)
        self._open.append(request)
        return request

    def _close(self, request: _Request, outcome: str) -> None:
        request.pending.clear()
        for choice in request.choices:
            if not choice.handle.has_ended:
                self._scheduler.cancel(choice.handle)
        self._open.remove(request)
        self._n_ended += 1
        self._ended_seconds += perf_counter() - request.arrived_at
        self._metrics.generations.labels(outcome).inc()

    async def _submit_choices(self, request: _Request) -> None:
        """Submit choices, as many at a time as there are slots."""
        loop, parsed = asyncio.get_running_loop(), request.parsed
        while request.pending and len(request.choices) < self._engine.n_slots:
            index = request.pending.popleft()
            is_prepared = index == 0 and parsed.first is not None and parsed.echo is None
            text = (
                self._prepared(parsed, index)
                if is_prepared
                else await run_in_threadpool(self._prepared, parsed, index)
            )
            handle = Handle(text, group=request, on_news=partial(self._tell, loop, request))
            echo = None if parsed.echo is None else parsed.echo[index // parsed.n]
            request.choices.append(_Choice(index, handle, echo))
            self._scheduler.submit(handle)

    def _prepared(self, parsed: ParsedRequest, index: int) -> PreparedText:
        """The text of a choice. Raises OptionError."""
        tokens, options, n_top = parsed.prompts[index // parsed.n], parsed.options, parsed.n_top
        if parsed.seed is not None:
            options = replace(options, seed=(parsed.seed + index) % _N_SEEDS)
        known = None
        if parsed.echo is not None and n_top is not None:
            known = self._scores.known(tokens, n_top)
        if index or parsed.first is None:
            return self._engine.prepare_tokens(
                tokens, options, n_top=n_top, prompt_logprobs=known, like=parsed.first
            )
        seed = parsed.first.seed if options.seed is None else options.seed
        first = replace(parsed.first, sampling=parsed.first.sampling.begun(seed))
        return replace(first, options=options, seed=seed, n_top=n_top, prompt_logprobs=known)

    def _tell(self, loop: asyncio.AbstractEventLoop, request: _Request, handle: Handle) -> None:
        """In the engine's thread: there are chunks, or the text has ended."""
        self._told.append((request, handle))
        if self._woken is not loop:  # once for all texts of a pass: waking a loop takes long
            self._woken = loop
            with suppress(RuntimeError):  # it is closed, so all connections are
                loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self._woken = None
        while self._told:
            request, handle = self._told.popleft()
            request.news.set()
            if handle.has_ended and request not in self._open:
                for choice in [each for each in request.choices if each.handle is handle]:
                    request.choices.remove(choice)
                    self._observe(handle)

    def _observe(self, handle: Handle) -> None:
        stats = handle.completion.stats
        if stats.seconds.prompt:  # else it ended before its prompt was processed
            self._metrics.observe(stats, self._engine.pair.plain_seconds)

    def _taken(self, request: _Request) -> Sequence[ChoiceEvent]:
        """The events that have come since the last call."""
        found: list[ChoiceEvent] = []
        for choice in list(request.choices):
            handle = choice.handle
            has_ended = handle.has_ended  # read first: chunks may be added until then
            found += self._echo(request, choice)
            while (chunk := handle.take()) is not None:
                if not choice.index and not request.has_tokens:
                    self._metrics.time_to_first_token.observe(perf_counter() - request.arrived_at)
                    request.has_tokens = True
                ends = [choice.n_echoed + end for end in chunk.ends]
                found.append(ChoiceDelta(choice.index, *chunk)._replace(ends=ends))
            if has_ended:
                request.choices.remove(choice)
                self._observe(handle)
                if (error := handle.take_error()) is not None:
                    request.end(error)
                    return found
                found.append(ChoiceFinished(choice.index, handle.completion))
        return found

    def _echo(self, request: _Request, choice: _Choice) -> Sequence[ChoiceEvent]:
        """The prompt, once its log-probabilities are known."""
        generation, parsed = choice.handle.generation, request.parsed
        if choice.echo is None or generation is None or generation.is_scoring:
            return ()
        tokens, found = choice.handle.text.tokens, generation.prompt_logprobs or ()
        if found and parsed.n_top is not None:
            self._scores.keep(tokens, parsed.n_top, found)
        (text, ends), choice.echo = choice.echo, None
        choice.n_echoed = len(text)
        return [ChoiceDelta(choice.index, text, tokens, [False] * len(tokens), found, ends)]


def queue_full(n_waiting: int, seconds: float) -> ApiError:
    return ApiError(
        429,
        f"the queue is full: requests that wait: {n_waiting}; retry after the seconds in "
        "Retry-After",
        "rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the request took longer than {seconds:g} s; ask for fewer tokens, or start the server "
        "with a larger --timeout",
        "timeout_error",
        code="timeout",
        # OpenAI's clients retry a 504 by default, which would take as long again.
        headers={"x-should-retry": "false"},
    )


async def disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
