"""Sends llama.cpp's log to the logger `ggufspec.llama` during calls that ggufspec makes."""

from __future__ import annotations

import atexit
import ctypes
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import llama_cpp

from ggufspec import _native
from ggufspec.common.facts import LogFormatter

logger = logging.getLogger("ggufspec.llama")
logger.addHandler(logging.NullHandler())  # silent unless the application wants it

# enum ggml_log_level in ggml.h
_LEVELS = {1: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}  # others: INFO
_CONTINUED = 5
_N_KEPT = 200

Result = TypeVar("Result")


class _Log:
    """Replaces llama-cpp-python's log callback, which still gets lines of other calls."""

    def __init__(self) -> None:
        self.interrupted = False  # Ctrl-C was pressed within `listening`
        # The running calls of ggufspec, of all threads: a number could not be changed by several
        # at once. Changed in try and finally: in an __exit__, a Ctrl-C at its start would leave a
        # call that has ended.
        self.inside: set[object] = set()
        self._lines: deque[tuple[int, str]] = deque(maxlen=_N_KEPT)
        self._partial = ""
        self._level = logging.INFO
        previous = llama_cpp.llama_log_callback()
        previous_data = ctypes.c_void_p()
        llama_cpp.llama_log_get(ctypes.byref(previous), ctypes.byref(previous_data))
        self._previous = previous
        self._callback = llama_cpp.llama_log_callback(self._receive)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p())
        # llama.cpp also logs when its own threads and statics end, after Python has.
        silent = llama_cpp.llama_log_callback(_native.silent_log)
        atexit.register(llama_cpp.llama_log_set, silent, ctypes.c_void_p())

    def hear(self, set_callback: Callable[..., object]) -> None:
        """Also receive the lines of another library, through its function that sets a callback."""
        set_callback(self._callback, None)

    def _receive(self, level: int, text: bytes, data: int | None) -> None:
        if not self.inside:
            self._previous(level, text, data)
            return
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.INFO)
            # What llama.cpp logs about a batch that was asked to end is no error.
            if any(getattr(each, "is_stopped", False) for each in tuple(self.inside)):
                self._level = logging.DEBUG
        *complete, self._partial = (self._partial + text.decode("utf-8", "replace")).split("\n")
        for line in complete:
            if line.strip():
                self._lines.append((self._level, line.rstrip()))
                logger.log(self._level, "%s", line.rstrip())

    def during(self, call: Callable[..., Result], *arguments: object, of: object = None) -> Result:
        """Keep the lines that llama.cpp logs during a call; returns its result.

        `of`: the native context whose batch it runs.
        """
        running = object() if of is None else of
        try:
            self.inside.add(running)
            return call(*arguments)
        finally:
            self.inside.discard(running)

    def clear(self) -> None:
        self._lines.clear()

    def complaints(self) -> str:
        """The last errors since the last clear; if there are none, the last warnings."""
        found = [line for level, line in self._lines if level >= logging.ERROR]
        found = found or [line for level, line in self._lines if level >= logging.WARNING]
        return "\n".join(f"  llama.cpp: {line}" for line in (found or [""])[-4:] if line)


log = _Log()


@contextmanager
def listening() -> Iterator[_Log]:
    """Keep only the lines that llama.cpp logs within the block. Ctrl-C takes effect after it."""
    log.clear()
    with _interrupts_held(log):
        running = object()
        try:
            log.inside.add(running)
            yield log
        finally:
            log.inside.discard(running)


@contextmanager
def _interrupts_held(log: _Log) -> Iterator[None]:
    """Delay Ctrl-C until the end of the block.

    Within llama.cpp, Python handles it in a callback, where ctypes prints and drops exceptions.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def note(number: int, frame: object) -> None:
        log.interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        interrupted, log.interrupted = log.interrupted, False
        if interrupted:
            before(signal.SIGINT, None)


def show_log() -> None:
    """Print ggufspec's log on stderr, and llama.cpp's without its debug lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(message)s"))
    package = logging.getLogger("ggufspec")
    package.addHandler(handler)
    package.setLevel(logging.DEBUG)
    logger.setLevel(logging.INFO)  # each pass logs a dozen debug lines
