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

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the lock."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Raise OptionError in a progress callback, which would wait for the lock forever.

        Raises ClosedError in a process that was forked since: llama.cpp's threads, and threads that
        hold locks, do not exist there.
        """
        if self.is_forked:
            raise ClosedError(
                "this process was forked after the engine was loaded, and cannot use it: load the "
                "engine here, or start processes by multiprocessing's spawn method"
            )
        if self._called_back == threading.get_ident():
            raise OptionError(
                "a progress callback cannot use the engine that calls it: generate, stream and "
                "close wait until the prompt is processed. Call them after the callback returns"
            )

    def held(self) -> threading.Lock:
        """The lock, for a `with` statement. Raises what `check` raises.

        It is Python's own lock: in an `__enter__` written in Python, Ctrl-C could come after the
        lock is taken and before the `with` statement would release it.
        """
        self.check()
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
