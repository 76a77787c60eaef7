"""A worker's process as its parent sees it: pipes, and what became of it. Decides nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

# Ctrl-C is the parent's to judge, also while the worker imports what it needs; and as the parent
# finds modules, so does the worker, wherever it was started.
_CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[1:]; "
    "from ggufspec.batch.worker import main; main()"
)
_N_LAST_BYTES = 4096


class Event(NamedTuple):
    """What the worker of that number says; None: it is dead, and says nothing more.

    No number: somebody wants the batch to stop.
    """

    number: int | None
    message: dict[str, Any] | None


class LocalProcess:
    """A process that was started on this machine, told its task, and is heard by `events`."""

    node = ""  # this machine

    def __init__(self, number: int, task: Mapping[str, Any], events: SimpleQueue[Event]) -> None:
        self._errors: IO[bytes] | None = None
        if not task["verbose"]:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._ears = threading.Thread(target=self._listen, args=(number, events), daemon=True)
        self._ears.start()
        self.tell(task)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Mapping[str, Any]) -> None:
        """Say something; one that is dead hears nothing, and is known to be dead by its event."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """It has nothing that would have to be saved."""
        self._process.kill()

    def bury(self) -> None:
        """Kill it if need be, and give back what the system holds for it."""
        self.kill()
        self._process.wait()
        self._ears.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was never heard is in its buffer
                    pipe.close()

    def why(self) -> str:
        """Of one that is dead: how it died, and the last that it said."""
        code = self._process.wait()
        how = f"exited with code {code}"
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        if code == -9:
            how += " (was there too little memory?)"
        said = self._last_line()
        return f"its worker {how}{f': {said}' if said else ''}"

    def _last_line(self) -> str:
        if self._errors is None:
            return ""
        size = self._errors.seek(0, 2)
        self._errors.seek(max(size - _N_LAST_BYTES, 0))
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").split("\n")]
        return next((line for line in reversed(lines) if line), "")

    def _listen(self, number: int, events: SimpleQueue[Event]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                events.put(Event(number, json.loads(line)))
            except ValueError:
                break  # it died in the midst of it
        events.put(Event(number, None))
