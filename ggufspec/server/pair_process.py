"""The process of one pair: `ggufspec serve` on a socket of this machine, and requests to it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import httpx2

BROKEN = httpx2.TransportError  # what `ask` raises if the process has ended
Headers = Iterable[tuple[bytes, bytes]]
JSON_TYPE = [(b"content-type", b"application/json")]
_NOT_INHERITED = ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE", "LLAMA_ARG_MODELS_")
_START_SECONDS = 1.0  # after its first answer, lines may still be notes of its start
_END_SECONDS = 15.0  # after that, it is killed
_REPORT_SECONDS = 5.0  # from a broken connection to the end of its process
_FOLDERS = re.compile(r"(?<!\S)(?:[A-Za-z]:|[~.]+)?[/\\]\S*[/\\]")  # of a path in a message


class PairProcess:
    """Owns the process. It ends when its stdin ends, so also if this process is killed.

    `command_line`: of `serve`, without an address. `folder`: for its socket. `tell` is called with
    each line of its stderr, in another thread.
    """

    def __init__(
        self, command_line: Sequence[str], folder: Path, tell: Callable[[str], None]
    ) -> None:
        self._loop, self._tell = asyncio.get_running_loop(), tell
        self._last_line, self._last_at = "", 0.0  # of stderr
        self._answered_at = 0.0  # when it began to listen
        self._secret = secrets.token_hex(16)
        self._path, self._port = folder / f"{secrets.token_hex(4)}.sock", 0
        self.answered: asyncio.Future[bool] = self._loop.create_future()  # false: it has ended
        self.ended = asyncio.Event()
        has_paths = hasattr(socket, "AF_UNIX") and sys.platform != "win32"
        host = str(self._path) if has_paths else "127.0.0.1"
        self._transport = httpx2.AsyncHTTPTransport(
            verify=False, limits=httpx2.Limits(), uds=host if has_paths else None
        )
        address = ("--host", host, "--port", "0", "--grace", "0", "--of-router")
        inherited = os.environ.items()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ggufspec", "serve", *command_line, *address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: text for name, text in inherited if not name.startswith(_NOT_INHERITED)}
            | {"GGUFSPEC_API_KEY": self._secret},
            start_new_session=True,  # Ctrl-C is for the router, whose texts may end first
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        errors = threading.Thread(target=self._read_errors, daemon=True)
        errors.start()
        threading.Thread(target=self._watch, args=(errors,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def reason(self) -> str:
        """Why it has ended, without folders of this machine."""
        status = self._process.poll() or 0
        how = f"status {status}"
        if status < 0:
            with suppress(ValueError):
                how = signal.Signals(-status).name
        if self._last_at < self._answered_at + _START_SECONDS:
            return how
        return f"{_FOLDERS.sub('', self._last_line.removeprefix('ggufspec: '))} ({how})"

    @asynccontextmanager
    async def ask(
        self, method: str, target: bytes, headers: Headers = (), body: bytes = b""
    ) -> AsyncIterator[httpx2.Response]:
        """The response, whose body is read in the block; leaving the block cancels the request.

        Raises BROKEN if the connection breaks.
        """
        own = [(b"authorization", b"Bearer %b" % self._secret.encode()), (b"connection", b"close")]
        address = f"http://localhost:{self._port}" if self._port else "http://localhost"
        url = httpx2.URL(address).copy_with(raw_path=target)
        request = httpx2.Request(method, url, headers=[*headers, *own], content=body)
        response = await self._transport.handle_async_request(request)
        try:
            yield response
        finally:
            await response.aclose()

    async def has_ended(self) -> bool:
        """Whether it ends soon, after a connection broke."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.ended.wait(), _REPORT_SECONDS)
        return self.ended.is_set()

    def close(self) -> None:
        """Ask it to end: its texts end with an error."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        """End it, and wait for that."""
        self.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._path.unlink(missing_ok=True)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if text := line.decode("utf-8", "replace").strip():
                    self._last_line, self._last_at = text, monotonic()
                    self._tell(text)

    def _watch(self, errors: threading.Thread) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            url = lines.readline().decode().strip()
            self._call(self._hear, url)
            self._process.wait()
        errors.join(1.0)  # the last lines; a process of its own may hold the pipe
        self._call(self._hear, "")
        self._call(self.ended.set)

    def _call(self, function: Callable[..., object], *arguments: str) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _hear(self, url: str) -> None:
        if not self.answered.done():
            self._port = urlsplit(url).port or 0
            self._answered_at = monotonic() if url else self._answered_at
            self.answered.set_result(bool(url))
