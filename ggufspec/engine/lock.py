"""Whose turn it is with a pair. Knows threads and callbacks; not what is done in a turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ggufspec.errors import OptionError


class EngineLock:
    """One thread at a time: `with lock.held():`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._called_back: int | None = None  # the thread that is in a callback of ours

    def check(self) -> None:
        """Raise OptionError in a callback, whose end a turn would wait for forever."""
        if self._called_back == threading.get_ident():
            raise OptionError(
                "this engine is reading a prompt: its own progress callback cannot ask it for a "
                "text, or close it"
            )

    def held(self) -> threading.Lock:
        """The lock to hold meanwhile. Raises OptionError rather than wait for itself.

        Python's own, held by a `with` of the caller: in an `__enter__` of ours, Ctrl-C could come
        between taking it and knowing that it has to be given back.
        """
        self.check()
        return self._lock

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """Within a turn: who has it calls somebody else."""
        self._called_back = threading.get_ident()
        try:
            yield
        finally:
            self._called_back = None
