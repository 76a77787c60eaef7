"""Starts worker processes on this machine, exchanges lines of JSON, and reports how they end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, Protocol

# Ctrl-C is handled by the parent. On POSIX the worker has a separate session, so that Ctrl-C in a
# terminal does not reach it even while its interpreter starts; elsewhere it ignores the signal. It
# gets the parent's sys.path, which does not depend on its working directory.
_CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[1:]; "
    "from ggufspec.batch.worker import main; main()"
)
_N_LAST_BYTES = 4096
_LINE_WIDTH = 300


class WorkerEvent(NamedTuple):
    """A message of worker `number`. `message` None: its process has ended; no event follows.

    `number` None: a request to stop the batch.
    """

    number: int | None
    message: dict[str, Any] | None


class WorkerProcess(Protocol):
    """The process of a worker. `pid` and `node` are valid once the worker is ready.

    `node`: name of its machine; empty: this machine.
    """

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str: ...

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; does nothing once the process has ended."""

    def kill(self) -> None:
        """End the process at once; its last event follows."""

    def close(self) -> None:
        """Kill the process if it runs, and release its resources."""

    def end_reason(self) -> str:
        """How the process ended; call it only after its last event."""


StartWorker = Callable[[int, Mapping[str, Any], "SimpleQueue[WorkerEvent]"], WorkerProcess]
"""Starts a worker with (number, task, event queue). The task: a BatchPlan and a profile as JSON."""


class LocalProcess:
    """A WorkerProcess on this machine."""

    node = ""

    def __init__(
        self, number: int, task: Mapping[str, Any], events: SimpleQueue[WorkerEvent]
    ) -> None:
        self._errors: IO[bytes] | None = None
        if not task["verbose"]:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # ignored on Windows
        )
        self._reader = threading.Thread(target=self._read, args=(number, events), daemon=True)
        self._reader.start()
        self.send(task)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):  # stdin may hold an unread message
                    pipe.close()

    def end_reason(self) -> str:
        """The exit code or signal, and the last line of stderr."""
        code = self._process.wait()
        how = f"exited with code {code}"
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        if code == -9:
            how += " (out of memory?)"
        said = ""
        if self._errors is not None:
            size = self._errors.seek(0, 2)
            self._errors.seek(max(size - _N_LAST_BYTES, 0))
            said = last_line(self._errors.read().decode(errors="replace"))
        return f"its worker process {how}{f': {said}' if said else ''}"

    def _read(self, number: int, events: SimpleQueue[WorkerEvent]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                events.put(WorkerEvent(number, json.loads(line)))
            except ValueError:
                break  # the process ended while it wrote this line
        events.put(WorkerEvent(number, None))


def last_line(text: str) -> str:
    """The last line that is not blank, shortened; "" if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return textwrap.shorten(lines[-1], _LINE_WIDTH, placeholder=" ...") if lines else ""


def prompt_seed(seed: int, index: int, turn: int = 0) -> int:
    """The seed of one text, derived from the batch's seed and the text's place in the file."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def timeout_error(seconds: float) -> str:
    """The error in the record of a prompt that took longer than its timeout."""
    return f"it took longer than {seconds:g} seconds (--timeout)"
