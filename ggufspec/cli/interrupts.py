"""Handles Ctrl-C when a command cannot: while modules are imported or llama.cpp computes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ggufspec.cli import INTERRUPTED

if TYPE_CHECKING:
    import socket

_INTERRUPT, _HANDLED = bytes([signal.SIGINT]), b"\0"
_SECONDS_TO_WAKE = 0.2  # from Ctrl-C until readline is woken, which may have missed the signal
_SECONDS = 0.8  # from then until a message explains the delay, or the process ends
_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it
_MESSAGE = b"\nggufspec: interrupted\n"
_IMPORTS = "<frozen importlib."  # start of the file names of Python's own import code

_may_end = threading.Event()  # see end_if_delayed


def end_at_interrupt() -> None:
    """Make Ctrl-C end the process at once, with a message; does nothing if Ctrl-C is ignored."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, lambda number, frame: _end(_MESSAGE))


def end_at_second_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt; a second one ends the process if the first is pending.

    Python handles Ctrl-C only when llama.cpp returns. That can take minutes with a slow GPU, whose
    passes cannot be stopped. Does nothing if Ctrl-C is ignored.
    """
    if not callable(signal.getsignal(signal.SIGINT)):
        return
    import socket

    received, sent = socket.socketpair()
    sent.setblocking(False)
    # Bytes arrive in this order: Python writes the signal's number at once, its handler runs later.
    signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        if frame is not None and frame.f_code.co_filename.startswith(_IMPORTS):
            _end(_MESSAGE)  # some import code swallows exceptions
        sent.send(_HANDLED)
        raise KeyboardInterrupt

    def watch() -> None:
        while byte := received.recv(1):
            # A running server has its own handler; so has a load, which calls `handle` later.
            is_mine = _may_end.is_set() or signal.getsignal(signal.SIGINT) is handle
            if byte == _INTERRUPT and is_mine:
                _wait(received)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, handle)


@contextlib.contextmanager
def end_if_delayed() -> Iterator[None]:
    """Within the block, a Ctrl-C that is not handled within a second ends the process.

    For work of llama.cpp that cannot be stopped, such as writing zeros to a cache of some GiB, and
    whose loss costs nothing.
    """
    _may_end.set()
    try:
        yield
    finally:
        _may_end.clear()


def _wait(received: socket.socket) -> None:
    """Return when the first Ctrl-C is handled; end the process at a second one."""
    from ggufspec.cli import render

    received.settimeout(_SECONDS_TO_WAKE)
    is_woken, byte = False, b""
    while byte != _HANDLED:
        try:
            byte = received.recv(1)
        except TimeoutError:
            if not is_woken:
                _wake_input()
                is_woken = True
                received.settimeout(_SECONDS)
                continue
            if _may_end.is_set():
                _end(_MESSAGE)
            received.settimeout(None)
            render.note("interrupted: waits for the end of a pass; Ctrl-C again ends at once")
        if byte == _INTERRUPT:
            _end()
    received.settimeout(None)


def _wake_input() -> None:
    """Make readline check for signals: it misses one that comes just before it waits for keys."""
    if hasattr(signal, "SIGWINCH") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, signal.SIGWINCH)  # handled only by readline


def _end(message: bytes = b"") -> NoReturn:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be closed
        shown = _SHOW_CURSOR if sys.stderr.isatty() else b""
        os.write(sys.stderr.fileno(), shown + message)
    os._exit(INTERRUPTED)
