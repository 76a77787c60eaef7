"""A uvicorn server that stops gracefully and cuts off slow clients."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ggufspec.errors import OptionError
from ggufspec.server.errors import LOG

HEAD_SECONDS = 10.0  # to send the first line and headers of a request
STALLED_SECONDS = 60.0  # after which a client that does not read is cut off
# Between requests on one connection. httpx, and so OpenAI's client, closes connections after 5 s
# of idling: a server with the same limit would cut off requests that are just being sent.
_IDLE_SECONDS = 15
_N_CONNECTIONS = 512
_N_RESERVED_FILES = 64  # for models, child processes, and connections that are being accepted
_N_WANTED_FILES = 1024
_BACKLOG = 128  # connections that asyncio accepts in one turn, before it handles any
_POLL_SECONDS = 0.05  # while running texts finish
_NOTICE_SECONDS = 60.0  # between two log lines about too many connections
_FIRST_BYTES = b"HTTP/1.1 "  # of every response
_PROBE_SECONDS = 0.1  # between the first two; before each further byte twice as long
AFTER_GRACE_SECONDS = 5  # for sending the last events to requests that were aborted


def _last_response(status: bytes, kind: bytes, message: bytes) -> bytes:
    body = b'{"error":{"message":"%s","type":"%s","param":null,"code":null}}' % (message, kind)
    return (
        b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (status, len(body), body)
    )


_HEAD_TIMEOUT = _last_response(
    b"408 Request Timeout",
    b"timeout_error",
    b"the headers of the request did not arrive in time; send them faster",
)
_NOT_HTTP = _last_response(
    b"400 Bad Request",
    b"invalid_request_error",
    b"the request is not valid HTTP/1.1: send a request line, a Host header, and a body of the "
    b"announced length or in chunks",
)
_TOO_MANY = _last_response(
    b"503 Service Unavailable", b"server_error", b"too many connections; retry later"
)


def is_path(host: str) -> bool:
    """Whether an address is the path of a Unix socket, as in llama.cpp's server."""
    return host.endswith(".sock")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, not listening yet; port 0: a free port. Raises OptionError."""
    address: tuple[Any, ...] | str = host
    if is_path(host):
        if not hasattr(socket, "AF_UNIX"):
            raise OptionError(f"this system has no Unix sockets: --host {host} cannot be used")
        family, protocol = socket.AF_UNIX, 0
    else:
        try:
            family, _, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise OptionError(
                f"the address {host} does not exist ({error.strerror}); choose another --host"
            ) from error
    # asyncio sends small parts at once (TCP_NODELAY) only if the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if os.name == "posix":  # on Windows it would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unavailable(host, port, error) from error
    return bound


def url_of(bound: socket.socket) -> str:
    if isinstance(name := bound.getsockname(), str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Stoppable(Protocol):
    """The requests that a server works on."""

    def finish(self) -> None:
        """Refuse new requests; running ones continue."""

    def abort(self) -> None:
        """End the running requests, too."""


class GracefulServer(uvicorn.Server):
    """Serves until a signal or `should_exit`; running requests then have `grace` seconds to end.

    `on_listening` is called with the URL once connections are accepted, `on_signal` at the first
    signal.
    """

    def __init__(
        self,
        app: ASGIApp,
        texts: Stoppable,
        *,
        grace: float,
        on_listening: Callable[[str], None] = lambda url: None,
        on_signal: Callable[[], None] = lambda: None,
        log_requests: bool = False,
    ) -> None:
        n_files = _raised_file_limit()
        n_connections = max(min(_N_CONNECTIONS, n_files - _N_RESERVED_FILES), 4)
        config = uvicorn.Config(
            app,
            http=partial(ImpatientProtocol, n_connections_max=n_connections),  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="info" if log_requests else "error",
            access_log=log_requests,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=AFTER_GRACE_SECONDS,
        )
        super().__init__(config)
        self.stopped_by: int | None = None  # the first signal
        self._texts = texts
        self._grace = grace
        self._on_listening, self._on_signal = on_listening, on_signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Raises OptionError if another process has taken the port since `bind`."""
        asyncio.get_running_loop().set_exception_handler(_log_accept_failures)
        try:
            await super().startup(sockets)
        except OSError as error:
            name = sockets[0].getsockname() if sockets else ("the address", 0)
            host, port = (name, 0) if isinstance(name, str) else name[:2]  # a path has no port
            raise _unavailable(host, port, error) from error
        for listening in sockets or ():
            self._on_listening(url_of(listening))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for running ones, and abort them after `grace` seconds.

        Until then connections are accepted, and new requests get status 503 with the reason.
        """
        self._texts.finish()
        began = monotonic()
        while self.server_state.tasks:
            if monotonic() - began >= self._grace:
                break
            await self.on_tick(0)
            await asyncio.sleep(_POLL_SECONDS)
        self._texts.abort()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        for connection in list(self.server_state.connections):
            if isinstance(connection, ImpatientProtocol):
                connection.check()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops gracefully, the second one aborts running requests.

        Unlike uvicorn, does not raise signals again at the end: the caller chooses the exit code.
        """
        if self.stopped_by is None:
            self.stopped_by = sig
            self._on_signal()
        else:
            self._grace = 0.0
        self.should_exit = True


class _Connection(h11.Connection):
    """Leaves out the first `n_sent` bytes of the next response, which were sent before."""

    n_sent = 0

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        parts = super().send_with_data_passthrough(event)
        if parts:
            parts[0], self.n_sent = parts[0][self.n_sent :], 0
        return parts


class ImpatientProtocol(H11Protocol):
    """A connection that is closed if a request's head, or reading a response, takes too long.

    While it waits for a request, it is also closed if there are too many connections. A client that
    sends nothing more after its request (a half-closed connection) gets its response. One that has
    closed the connection looks the same until bytes are sent to it: so it gets the first bytes of
    the response early, one by one.
    """

    def __init__(self, *args: Any, n_connections_max: int = _N_CONNECTIONS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: _Connection = _Connection(h11.SERVER)
        self._n_connections_max = n_connections_max
        self.waits_since = monotonic()
        self._head_by = self._read_by = math.inf  # limits for the client, by `monotonic`
        self._half_closed_at = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._n_connections_max and not self._has_made_room():
            transport.write(_TOO_MANY)
            transport.abort()
            return
        self._head_by = monotonic() + HEAD_SECONDS

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.awaits_head:
            self._head_by, self.waits_since = math.inf, monotonic()
        elif self._head_by == math.inf:  # so single bytes do not prolong it
            self._head_by = monotonic() + HEAD_SECONDS

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: while a whole request is being answered."""
        self._half_closed_at = monotonic()
        return not self.awaits_head and not self.cycle.more_body

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed_at < math.inf and self.awaits_head:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP in the form of all errors, unless a response has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_NOT_HTTP[self.conn.n_sent :])
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_by = min(self._read_by, monotonic() + STALLED_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._read_by = math.inf

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._read_by = min(self._read_by, monotonic() + STALLED_SECONDS)

    def check(self) -> None:
        """Cut the client off if it took too long."""
        now = monotonic()
        if now > self._read_by:
            self.transport.abort()
        elif now > self._head_by and self.awaits_head and not self.transport.is_closing():
            self.transport.write(_HEAD_TIMEOUT)
            self.transport.close()
            self._read_by = now + STALLED_SECONDS
        elif not self.awaits_head and not self.cycle.response_started:
            n, waited = self.conn.n_sent, now - self._half_closed_at
            if n < len(_FIRST_BYTES) and waited >= _PROBE_SECONDS * (2**n - 1):
                self.transport.write(_FIRST_BYTES[n : n + 1])
                self.conn.n_sent += 1

    def _has_made_room(self) -> bool:
        """Close the other connection that is idle for longest; false if no other one is idle."""
        _notice(f"more than {self._n_connections_max} connections: idle ones are closed")
        others = [each for each in self.connections if isinstance(each, ImpatientProtocol)]
        idle = [
            each
            for each in others
            if each is not self and each.awaits_head and not each.transport.is_closing()
        ]
        if not idle:
            return False
        min(idle, key=lambda each: each.waits_since).transport.abort()
        return True

    @property
    def awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


def watchdog(seconds: float) -> threading.Timer:
    """A timer that ends the process some seconds after its start, unless it is cancelled."""

    def end() -> None:
        LOG.error("the engine has not stopped within %g s; ending the process", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    return timer


def _raised_file_limit() -> int:
    """Raise the limit of open files if possible; returns the limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _N_WANTED_FILES
    n_files, n_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if n_files < _N_WANTED_FILES:
        n_wanted = min(n_most, _N_WANTED_FILES) if n_most >= 0 else _N_WANTED_FILES
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_wanted, n_most))
            n_files = n_wanted
    return n_files


def _log_accept_failures(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log one line for failed accepts, each of which asyncio would report with a traceback."""
    if isinstance(error := context.get("exception"), OSError) and "accept" in context["message"]:
        _notice(f"connections cannot be accepted: {error.strerror}")
    else:
        loop.default_exception_handler(context)


def _notice(text: str) -> None:
    """Log a line, unless one like it was logged in the last minute."""
    now, kind = monotonic(), text.partition(":")[0]
    if now - _noticed_at.get(kind, -math.inf) > _NOTICE_SECONDS:
        _noticed_at[kind] = now
        LOG.warning(text)


_noticed_at: dict[str, float] = {}


def _unavailable(host: str, port: int, error: OSError) -> OptionError:
    if is_path(host):
        return OptionError(
            f"the socket {host} cannot be made ({error.strerror or error}); remove the file if no "
            "server uses it, or choose another --host"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return OptionError(f"{host} is not an address of this machine; choose another --host")
    return OptionError(
        f"{host} port {port} is not available ({error.strerror}); choose another --port, or 0 for "
        "a free one"
    )
