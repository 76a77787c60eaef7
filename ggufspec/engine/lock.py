"""The lock of an engine: one thread at a time, and no deadlock from a progress callback."""

from __future__ import annotations

import os
import threading

from ggufspec.common.progress import NamedProgress
from ggufspec.errors import ClosedError, OptionError


class EngineLock:
    """One thread at a time: `with lock.held():`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._called_back: int | None = None  # the thread that runs a progress callback

    def check(self) -> None:
        """Raise OptionError in a progress callback, which would wait for the lock forever."""
        if self._called_back == threading.get_ident():
            raise OptionError(
                "a progress callback cannot use the engine that calls it: generate, stream and "
                "close wait until the prompt is processed. Call them after the callback returns"
            )

    def held(self) -> threading.Lock:
        """The lock, for a `with` statement. Raises OptionError in a progress callback, and
        ClosedError in a process that was forked while it was held.

        It is Python's own lock: in an `__enter__` written in Python, Ctrl-C could come after the
        lock is taken and before the `with` statement would release it.
        """
        self.check()
        if self._pid != os.getpid():
            if self._lock.locked():  # forever: the thread that would release it is not here
                raise ClosedError(
                    "this process was forked while another thread used the engine; load the "
                    "engine again here, or start processes by multiprocessing's spawn method"
                )
            self._pid = os.getpid()
        return self._lock

    def callback(self, progress: NamedProgress | None) -> NamedProgress | None:
        """The same callback, marked as running while it is called with the lock held."""
        if progress is None:
            return None

        def call(whose: str, done: int, total: int) -> None:
            self._called_back = threading.get_ident()
            try:
                progress(whose, done, total)
            finally:
                self._called_back = None

        return call
