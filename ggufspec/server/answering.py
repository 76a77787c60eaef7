"""Answers one request for text: runs it, and sends the documents that its renderer makes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ggufspec.server.dialects.shared import Renderer
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceEvent, ParsedRequest, RequestEnded, RequestEvent
from ggufspec.server.requests import parse_request
from ggufspec.server.schema import ChatRequest, CompletionRequest, PredictRequest
from ggufspec.server.service import ServerOptions, Service
from ggufspec.server.worker import EngineWorker

Events = AsyncGenerator[Sequence[ChoiceEvent], None]


async def answer(
    body: CompletionRequest | ChatRequest,
    request: Request,
    service: Service,
    make_renderer: Callable[[ParsedRequest], Renderer],
) -> Response:
    """The response, or the beginning of a stream. Raises GgufspecError, ApiError."""
    parsed = await parse(body, service)
    renderer = make_renderer(parsed)
    events = submit(service.worker, parsed, service.options, request.receive)
    if not body.stream:
        await collect(renderer, events)
        # A long echo has hundreds of thousands of numbers: here it would delay other responses.
        return await run_in_threadpool(lambda: JSONResponse(renderer.body()))
    frames = _frames(renderer, events)
    # An error before the first frame sets the status; later errors are sent in the stream.
    return _EventStream(await anext(frames), frames, renderer.framing.media_type)


async def parse(
    body: CompletionRequest | ChatRequest | PredictRequest, service: Service
) -> ParsedRequest:
    """The request for the worker, parsed from a body. Raises GgufspecError."""
    return await run_in_threadpool(parse_request, body, service.engine, service.options)


async def collect(renderer: Renderer, events: Events) -> None:
    """Run a request to its end. Raises ApiError, ClientDisconnect."""
    async with aclosing(events):
        async for together in events:
            for event in together:
                renderer.add(event)


async def _frames(renderer: Renderer, events: Events) -> AsyncGenerator[bytes, None]:
    framing, has_begun = renderer.framing, False
    try:
        async with aclosing(events):
            async for together in events:
                found = [document for event in together for document in renderer.add(event)]
                data = b"".join(map(framing.frame, found)) if together else framing.keep_alive
                if data:
                    has_begun = True
                    yield data
        # A text may have ended before any event was sent: its stream begins here.
        yield b"".join([*map(framing.frame, renderer.end()), framing.end])
    except ApiError as error:
        if not has_begun:
            raise
        yield b"".join(map(framing.frame, renderer.error(error)))


class _EventStream(StreamingResponse):
    """Sends a first frame, then others as they come, and closes their generator at the end.

    Starlette's StreamingResponse would also listen for a disconnect, as `submit` already does.
    """

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None], media_type: str) -> None:
        async def all_frames() -> AsyncGenerator[bytes, None]:
            yield first
            async for frame in frames:
                yield frame

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(all_frames(), headers=headers, media_type=media_type)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            with suppress(ClientDisconnect):
                await self.stream_response(send)


async def submit(
    worker: EngineWorker, parsed: ParsedRequest, options: ServerOptions, receive: Receive
) -> Events:
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
            found: list[ChoiceEvent] = []
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
