"""A uvicorn server that stops gracefully and cuts off slow clients."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ggufspec.errors import OptionError
from ggufspec.server.worker import EngineWorker

HEAD_SECONDS = 10.0  # for the first line and the headers of a request
STALLED_SECONDS = 60.0  # for a client that does not read its response
_IDLE_SECONDS = 5  # between requests on one connection
_N_CONNECTIONS = 512
_AFTER_GRACE_SECONDS = 5  # for sending the last events to requests that were aborted
_HEAD_TIMEOUT_BODY = (
    b'{"error":{"message":"the headers of the request did not arrive in time; send them faster",'
    b'"type":"timeout_error","param":null,"code":null}}'
)
_HEAD_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_HEAD_TIMEOUT_BODY), _HEAD_TIMEOUT_BODY)
)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to that address, not listening yet; port 0: a free one. Raises OptionError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise OptionError(
            f"the address {host} does not exist ({error.strerror}); choose another --host"
        ) from error
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unavailable(host, port, error) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket, with its real port."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class GracefulServer(uvicorn.Server):
    """Serves until a signal or `should_exit`; running requests then have `grace` seconds to end.

    `on_listening` is called with the URL once connections are accepted.
    """

    def __init__(
        self,
        app: ASGIApp,
        worker: EngineWorker,
        *,
        grace: float,
        on_listening: Callable[[str], None] = lambda url: None,
        log_requests: bool = False,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=ImpatientProtocol,
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
            timeout_graceful_shutdown=int(grace) + _AFTER_GRACE_SECONDS,
        )
        super().__init__(config)
        self.stopped_by: int | None = None  # the first signal
        self._worker = worker
        self._grace = grace
        self._on_listening = on_listening
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Raises OptionError if another process has taken the port since `bind`."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        try:
            await super().startup(sockets)
        except OSError as error:
            self._worker.abort()
            host, port = sockets[0].getsockname()[:2] if sockets else ("the address", 0)
            raise _unavailable(host, port, error) from error
        for listening in sockets or ():
            self._on_listening(url_of(listening))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for running ones, and abort them after `grace` seconds."""
        self._worker.finish()
        timer = asyncio.get_running_loop().call_later(self._grace, self._worker.abort)
        await super().shutdown(sockets)
        timer.cancel()
        self._worker.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops gracefully, the second one aborts running requests.

        Unlike uvicorn's, signals are not raised again at the end: the caller chooses the exit code.
        """
        if self.stopped_by is None:
            self.stopped_by = sig
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._worker.abort)
        self.should_exit = True


class ImpatientProtocol(H11Protocol):
    """A connection that is closed if a request's head, or reading a response, takes too long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer("head", HEAD_SECONDS, self._head_timeout)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._awaits_head():
            self._start_timer("head", HEAD_SECONDS, self._head_timeout)
        else:
            self._stop_timer("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("response", STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("response")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_timer("close", STALLED_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        super().connection_lost(exc)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _head_timeout(self) -> None:
        if self._awaits_head() and not self.transport.is_closing():
            self.transport.write(_HEAD_TIMEOUT)
            self.transport.close()
            self._start_timer("close", STALLED_SECONDS, self.transport.abort)

    def _start_timer(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        """A timer that runs already is not restarted, so single bytes do not prolong it."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, partial(self._expire, name, then))

    def _expire(self, name: str, then: Callable[[], None]) -> None:
        del self._timers[name]
        then()

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def _unavailable(host: str, port: int, error: OSError) -> OptionError:
    if error.errno == errno.EADDRNOTAVAIL:
        return OptionError(f"{host} is not an address of this machine; choose another --host")
    return OptionError(
        f"{host} port {port} is not available ({error.strerror}); choose another --port, or 0 for "
        "a free one"
    )
