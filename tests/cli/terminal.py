"""Runs the command at a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from cli.conftest import MAIN
from patience import PATIENCE

# A session of its own has no terminal that sends it Ctrl-C.
_OWN_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"


class Terminal:
    """`ggufspec ...` at a terminal of its own. `talk`: its stderr goes there too."""

    def __init__(
        self,
        *args: str | Path,
        width: int = 100,
        height: int = 30,
        talk: bool = False,
        **env: str,
    ) -> None:
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL + MAIN, *map(str, args)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if talk else subprocess.PIPE,
            start_new_session=True,
            env={**clean, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **env},
        )
        os.close(theirs)
        self._ours = ours
        self.data = b""

    def read_until(self, wanted: bytes | None, seconds: float = PATIENCE) -> bytes:
        """All that came so far, up to `wanted` and perhaps more; None: to the end."""
        deadline = time.monotonic() + seconds
        while wanted is None or wanted not in self.data:
            assert time.monotonic() < deadline, self.data
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    if more := os.read(self._ours, 65536):
                        self.data += more
                        continue
                break
        return self.data

    def type(self, keys: str) -> None:
        """As if these keys were pressed; Ctrl-C ("\\x03") is a signal then."""
        os.write(self._ours, keys.encode())

    def press(self, keys: str, until: str) -> str:
        """What is shown after these keys, up to a text."""
        self.data = b""
        self.type(keys)
        shown = self.read_until(until.encode()).decode()
        assert until in shown, "it has ended"
        return shown

    def enter(self, line: str, until: str, end: str = "\r") -> str:
        """What is shown after a line, up to the next prompt; before it, keys may be lost."""
        shown = self.press(line + end, until)
        self.data = shown.rpartition(until)[2].encode()
        return shown + self.read_until(b"> ").decode()

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def end(self) -> tuple[int, str, str]:
        """Exit code, what was left on the terminal, and stderr."""
        self.read_until(None)
        code = self.process.wait(PATIENCE)
        os.close(self._ours)
        err = ""
        if self.process.stderr is not None:
            err = self.process.stderr.read().decode()
            self.process.stderr.close()
        return code, self.data.decode(), err
