"""Waits, interrupts and measures in ways that do not depend on how fast or busy the machine is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType

import pytest

from ggufspec.engine.engine import Engine
from ggufspec.llama.log import log

PATIENCE = 60.0  # seconds; only a test that fails waits that long


def comes_true(asked: Callable[[], object], within: float = PATIENCE) -> bool:
    """Whether it is true before the time is over."""
    until = time.monotonic() + within
    while not asked():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie, by /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def child_seconds() -> float:
    """Processor time of the child processes that have ended."""
    return sum(os.times()[2:4])


@contextmanager
def at_most(seconds: float = PATIENCE) -> Iterator[None]:
    """What takes longer fails; so does what is then done to leave it, second by second."""

    def give_up(number: int, frame: FrameType | None) -> None:
        pytest.fail("it hangs")

    with _alarms(give_up, seconds, 1):
        yield


@contextmanager
def ctrl_c_in_a_batch() -> Iterator[None]:
    """Ctrl-C comes as soon as llama.cpp computes, and has to end what is done here."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if log.inside:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    with _alarms(interrupt, 0.002, 0.002), pytest.raises(KeyboardInterrupt):
        yield


@contextmanager
def _alarms(
    heard: Callable[[int, FrameType | None], None], first: float, interval: float
) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, heard)
    signal.setitimer(signal.ITIMER_REAL, first, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_child_of_a_fork(act: Callable[[], object]) -> str:
    """What it returns or raises there; fails if it hangs."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(int(PATIENCE))
        try:
            found = str(act())
        except BaseException as error:
            found = repr(error)
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        found = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "it hangs"
    return found


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Within the block, the engine's thread does nothing else."""
    begun, ends = Event(), Event()

    def wait() -> None:
        begun.set()
        ends.wait()

    done = engine.scheduler.call(wait)
    assert begun.wait(PATIENCE)
    try:
        yield
    finally:
        ends.set()
        done.result(PATIENCE)
