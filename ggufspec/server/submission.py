"""Submits a request to the worker and yields its events on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from starlette.requests import ClientDisconnect
from starlette.types import Message

from ggufspec.server.errors import ApiError
from ggufspec.server.events import (
    ChoiceDelta,
    ChoiceFinished,
    ParsedRequest,
    RequestEnded,
    RequestEvent,
)
from ggufspec.server.options import ServerOptions
from ggufspec.server.worker import EngineWorker


async def submit(
    worker: EngineWorker,
    parsed: ParsedRequest,
    options: ServerOptions,
    receive: Callable[[], Awaitable[Message]],
) -> AsyncGenerator[Sequence[ChoiceDelta | ChoiceFinished], None]:
    """The events of a request, up to its end; closing the generator cancels the request.

    Events that arrive together are yielded together; an empty sequence is yielded after
    `keep_alive` seconds without events. `receive` reports a disconnect. Raises ApiError,
    ClientDisconnect.
    """
    loop = asyncio.get_running_loop()
    events: deque[RequestEvent] = deque()
    has_news = asyncio.Event()
    deadline = loop.time() + options.timeout

    def put(event: RequestEvent) -> None:
        events.append(event)
        has_news.set()

    submitted = worker.submit(parsed, put, loop.call_soon_threadsafe)
    disconnected = asyncio.ensure_future(_disconnect(receive))
    disconnected.add_done_callback(lambda _: has_news.set())
    try:
        while True:
            if not events:
                timer = loop.call_later(
                    min(deadline - loop.time(), options.keep_alive), has_news.set
                )
                await has_news.wait()
                timer.cancel()
            has_news.clear()
            # Checked before each event, so that a fast stream delays neither check.
            if disconnected.done():
                raise ClientDisconnect
            if loop.time() >= deadline:
                raise ApiError(
                    504,
                    f"the request took longer than {options.timeout:g} s; ask for fewer tokens, or "
                    "start the server with a larger --timeout",
                    "timeout_error",
                    code="timeout",
                    # OpenAI's clients retry a 504 by default, which would take as long again.
                    headers={"x-should-retry": "false"},
                )
            found: list[ChoiceDelta | ChoiceFinished] = []
            while events:
                event = events.popleft()
                if isinstance(event, RequestEnded):
                    if found:
                        yield found
                    if event.error is not None:
                        raise event.error
                    return
                found.append(event)
            yield found
    finally:
        worker.cancel(submitted)
        disconnected.cancel()


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
