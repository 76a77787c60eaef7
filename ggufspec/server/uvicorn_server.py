"""Sockets, signals and clients that dawdle: uvicorn, made patient with few. Knows no requests.

uvicorn waits for ever for the rest of a request's head, and for a client that does not read its
answer: here both end. A signal lets what runs go on for a while, then tells it that there is no
more time.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ggufspec.errors import OptionError
from ggufspec.server.worker import Worker

_HEAD_SECONDS = 10.0  # for a request's first line and headers
_STALLED_SECONDS = 60.0  # for a client that does not read
_IDLE_SECONDS = 5  # between requests of one connection
_N_CONNECTIONS = 512
_LAST_WORD_SECONDS = 5  # for those who were told that there is no more time
_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_TOO_SLOW_BODY = (
    b'{"error":{"message":"the head of the request did not arrive in time",'
    b'"type":"timeout_error","param":null,"code":null}}'
)


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address; port 0: any that is free. Raises OptionError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"there is no address {host}: {error.strerror}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise OptionError(
            f"{host} port {port} cannot be had: {error.strerror}; choose another --port, or 0"
        ) from error
    return made


def address_of(listening: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until a signal, or `should_exit`; then gives what runs `grace` seconds to finish."""

    def __init__(
        self, app: ASGIApp, worker: Worker, *, grace: float, log_requests: bool = False
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Patient,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="info" if log_requests else "error",
            access_log=log_requests,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_N_CONNECTIONS,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=int(grace) + _LAST_WORD_SECONDS,
        )
        super().__init__(config)
        self.stopped_by: int | None = None  # the first signal
        self._worker = worker
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these sockets."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, wait for what runs, and tell it at last."""
        self._worker.finish()
        last = asyncio.get_running_loop().call_later(self._grace, self._worker.abort)
        await super().shutdown(sockets)
        last.cancel()
        self._worker.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal ends it gently, a second one at once."""
        if self.stopped_by is None:
            self.stopped_by = sig
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._worker.abort)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but that the signal is not raised once more: we end as we choose."""
        try:
            before = {
                each: signal.signal(each, self.handle_exit)
                for each in (signal.SIGINT, signal.SIGTERM)
            }
        except ValueError:  # not the main thread
            before = {}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


class Patient(H11Protocol):
    """A connection with little patience: for heads that dribble, and answers that nobody reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._hurry("head", _HEAD_SECONDS, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._awaits_head():
            self._hurry("head", _HEAD_SECONDS, self._head_is_late)
        else:
            self._calm("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._hurry("answer", _STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._calm("answer")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._hurry("end", _STALLED_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._calm(name)
        super().connection_lost(exc)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _head_is_late(self) -> None:
        if self._awaits_head() and not self.transport.is_closing():
            self.transport.write(_TOO_SLOW % (len(_TOO_SLOW_BODY), _TOO_SLOW_BODY))
            self.transport.close()
            self._hurry("end", _STALLED_SECONDS, self.transport.abort)

    def _hurry(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        """Once it has begun, the wait is not prolonged by what dribbles in."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, partial(self._over, name, then))

    def _over(self, name: str, then: Callable[[], None]) -> None:
        del self._timers[name]
        then()

    def _calm(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
