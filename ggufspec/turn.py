"""Whose turn it is with a pair. Knows threads and callbacks; not what is done in a turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ggufspec.errors import OptionError


class Turn:
    """A context manager: one thread at a time. Raises OptionError rather than wait for itself."""

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

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """Within a turn: who has it calls somebody else."""
        self._called_back = threading.get_ident()
        try:
            yield
        finally:
            self._called_back = None

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
