"""Ends the process at a second Ctrl-C where the first one cannot be handled yet."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import NoReturn

from ggufspec.cli import render
from ggufspec.cli.exits import INTERRUPTED

_INTERRUPT, _HANDLED = bytes([signal.SIGINT]), b"\0"
_SECONDS = 1.0  # until a message says why nothing happens
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


def end_at_second_interrupt() -> None:
    """Install it for the rest of the process; Ctrl-C raises KeyboardInterrupt as before.

    Python handles Ctrl-C when llama.cpp returns. That can take minutes with a slow GPU, whose
    passes cannot be stopped. Does nothing where Ctrl-C is ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    received, sent = socket.socketpair()
    sent.setblocking(False)
    # In this order: Python writes the number of a signal at once, and calls its handler later.
    signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        sent.send(_HANDLED)
        raise KeyboardInterrupt

    def watch() -> None:
        while byte := received.recv(1):
            # A server has a handler of its own while it runs, and so has a load.
            if byte == _INTERRUPT and signal.getsignal(signal.SIGINT) is handle:
                _wait(received)

    signal.signal(signal.SIGINT, handle)
    threading.Thread(target=watch, daemon=True).start()


def _wait(received: socket.socket) -> None:
    """Return when the first Ctrl-C is handled; end the process at a second one."""
    received.settimeout(_SECONDS)
    byte = b""
    while byte != _HANDLED:
        try:
            byte = received.recv(1)
        except TimeoutError:
            received.settimeout(None)
            render.note("interrupted: waits for the end of a pass; Ctrl-C again ends at once")
        if byte == _INTERRUPT:
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
            os._exit(INTERRUPTED)
    received.settimeout(None)
