"""Starts servers for a benchmark and streams their responses, for little processor time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any

_HOST = "127.0.0.1"
_START_SECONDS = 300.0
_TEXT_SECONDS = 600.0
OURS = (sys.executable, "-m", "ggufspec", "serve")


def free_port() -> int:
    """A port that no program listens on."""
    with socket.create_server((_HOST, 0)) as tried:
        port: int = tried.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server that is ready; it is stopped at the end. Raises SystemExit."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(process, port, command)
        yield process
    finally:
        process.terminate()
        process.wait()


def data_lines(port: int, path: str, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The data of each event of a streamed response, unparsed. Raises ValueError for an error."""
    with closing(HTTPConnection(_HOST, port, timeout=_TEXT_SECONDS)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read()[:400]!r}")
        for line in response:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield line[6:]


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, command: Sequence[str]) -> None:
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with closing(HTTPConnection(_HOST, port, timeout=5)) as connection:
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except (OSError, HTTPException):
                pass  # not listening yet
        time.sleep(0.05)
    raise SystemExit(f"the server did not start: {' '.join(command)}")
