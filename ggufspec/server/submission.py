"""Submits a request to the worker and yields its events on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message

from ggufspec.server.errors import ApiError
from ggufspec.server.options import ServerOptions
from ggufspec.server.worker import (
    ChoiceDelta,
    ChoiceFinished,
    EngineWorker,
    ParsedRequest,
    RequestEnded,
    RequestEvent,
)


async def submit(
    worker: EngineWorker,
    parsed: ParsedRequest,
    options: ServerOptions,
    receive: Callable[[], Awaitable[Message]],
) -> AsyncGenerator[ChoiceDelta | ChoiceFinished | None, None]:
    """The events of a request, up to its end; closing the generator cancels the request.

    None: nothing has happened for `keep_alive` seconds. `receive` reports a client that
    disconnects. Raises ApiError, ClientDisconnect.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[RequestEvent] = asyncio.Queue()
    deadline = monotonic() + options.timeout

    def put(event: RequestEvent) -> None:
        with suppress(RuntimeError):  # the loop is closed, and with it the connection
            loop.call_soon_threadsafe(events.put_nowait, event)

    submitted = worker.submit(parsed, put)
    disconnected = asyncio.ensure_future(_disconnect(receive))
    pending: asyncio.Future[RequestEvent] = asyncio.ensure_future(events.get())
    try:
        while True:
            # Checked before each event: a fast stream must not postpone either.
            if disconnected.done():
                raise ClientDisconnect
            left = deadline - monotonic()
            if left <= 0:
                raise ApiError(
                    504,
                    f"the request took longer than {options.timeout:g} s; ask for fewer tokens, or "
                    "start the server with a larger --timeout",
                    "timeout_error",
                    code="timeout",
                    # OpenAI's clients retry a 504 by default, and it would take as long again.
                    headers={"x-should-retry": "false"},
                )
            waited_for: set[asyncio.Future[Any]] = {pending, disconnected}
            await asyncio.wait(
                waited_for,
                timeout=min(left, options.keep_alive),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not pending.done():
                if not disconnected.done():
                    yield None
                continue
            event = pending.result()
            if isinstance(event, RequestEnded):
                if event.error is not None:
                    raise event.error
                return
            pending = asyncio.ensure_future(events.get())
            yield event
    finally:
        worker.cancel(submitted)
        disconnected.cancel()
        pending.cancel()


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
