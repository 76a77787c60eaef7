"""A task as the event loop sees it: asked, waited for, given up. Knows no bodies of answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

from starlette.types import Message

from ggufspec.server.errors import TooSlowError
from ggufspec.server.worker import Done, Event, Failed, News, Task, Worker


class Patience(NamedTuple):
    """Seconds that a request may take, and between signs of life while it has nothing to tell."""

    timeout: float
    keep_alive: float


class Waiting(NamedTuple):
    """Nothing new: a sign of life is due."""


class GoneError(Exception):
    """The client went away."""


class Asked:
    """Asks the worker on entry; on exit, however that comes, nobody waits any more."""

    def __init__(
        self,
        worker: Worker,
        task: Task,
        patience: Patience,
        receive: Callable[[], Awaitable[Message]],
    ) -> None:
        self.task = task
        self._worker = worker
        self._patience = patience
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._until = monotonic() + patience.timeout
        self._receive = receive

    def __enter__(self) -> Asked:
        loop = asyncio.get_running_loop()

        def tell(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._ticket = self._worker.ask(self.task, tell)
        self._gone = asyncio.ensure_future(_disconnected(self._receive))
        self._next: asyncio.Future[Event] | None = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._worker.give_up(self._ticket)
        self._gone.cancel()
        if self._next is not None:
            self._next.cancel()

    async def events(self) -> AsyncIterator[News | Waiting]:
        """What the worker tells, up to Done. Raises GgufspecError, GoneError."""
        while True:
            event = await self._event()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Done):
                return

    async def _event(self) -> Event | Waiting:
        left = self._until - monotonic()
        if self._gone.done():
            raise GoneError
        if left <= 0:
            raise TooSlowError(self._patience.timeout)
        if not self._events.empty():
            return self._events.get_nowait()
        if self._next is None:
            self._next = asyncio.ensure_future(self._events.get())
        waited_for: set[asyncio.Future[Any]] = {self._next, self._gone}
        await asyncio.wait(
            waited_for,
            timeout=min(left, self._patience.keep_alive),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._gone.done():
            raise GoneError
        if self._next.done():
            event, self._next = self._next.result(), None
            return event
        return Waiting()


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
