"""Handles Ctrl-C where no command can: while modules are imported, while llama.cpp computes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ggufspec.cli.exits import INTERRUPTED

if TYPE_CHECKING:
    import socket

_INTERRUPT, _HANDLED = bytes([signal.SIGINT]), b"\0"
_SECONDS_TO_WAKE = 0.2  # until a prompt is told of a signal that it has not heard
_SECONDS = 0.8  # from then on, until a message says why nothing happens
_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it
_MESSAGE = b"\nggufspec: interrupted\n"
_IMPORTS = "<frozen importlib."  # start of the file names of Python's own import code


def end_at_interrupt() -> None:
    """Have Ctrl-C end the process at once, with a message; does nothing where it is ignored."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, lambda number, frame: _end(_MESSAGE))


def end_at_second_interrupt() -> None:
    """Have Ctrl-C raise KeyboardInterrupt, and a second one end what cannot handle the first yet.

    Python handles Ctrl-C when llama.cpp returns. That can take minutes with a slow GPU, whose
    passes cannot be stopped. Does nothing where Ctrl-C is ignored.
    """
    if not callable(signal.getsignal(signal.SIGINT)):
        return
    import socket

    received, sent = socket.socketpair()
    sent.setblocking(False)
    # In this order: Python writes the number of a signal at once, and calls its handler later.
    signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        if frame is not None and frame.f_code.co_filename.startswith(_IMPORTS):
            _end(_MESSAGE)  # Python would lose an exception in some of this code
        sent.send(_HANDLED)
        raise KeyboardInterrupt

    def watch() -> None:
        while byte := received.recv(1):
            # A server has a handler of its own while it runs, and so has a load.
            if byte == _INTERRUPT and signal.getsignal(signal.SIGINT) is handle:
                _wait(received)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, handle)


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
            received.settimeout(None)
            render.note("interrupted: waits for the end of a pass; Ctrl-C again ends at once")
        if byte == _INTERRUPT:
            _end()
    received.settimeout(None)


def _wake_input() -> None:
    """Have readline look for signals: one that came just before it waits for keys is not heard."""
    if hasattr(signal, "SIGWINCH") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, signal.SIGWINCH)  # which only readline handles


def _end(message: bytes = b"") -> NoReturn:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be closed
        shown = _SHOW_CURSOR if sys.stderr.isatty() else b""
        os.write(sys.stderr.fileno(), shown + message)
    os._exit(INTERRUPTED)
