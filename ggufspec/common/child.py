"""Child processes: calls that may crash, requests with limits, and clean ends by SIGTERM."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ggufspec.errors import GgufspecError

SECONDS = 60.0  # time limit of a trial; it has to start an interpreter and load libllama
_READY = b"ready\n"  # written to stderr by the child once it can answer
_STACK_BYTES = 64 * 1024 * 1024
_WALL_FACTOR = 4  # a busy machine may give the process a quarter of a core
_EXIT_TIME = 1  # exit status of a process that faulthandler ends
_LAST_SECONDS = 10.0  # for a clean end, after that of stdin


def call(
    module: str, function: str, *arguments: str, is_limited: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Call `module.function(*arguments)` in a child, so that a crash of llama.cpp ends only that.

    Its threads of OpenMP sleep while they wait: beside other programs, spinning ones would take up
    to a minute instead of seconds. Ctrl-C ends the child, too, which llama.cpp itself may not
    notice for long. Raises OSError if no process can be started, if `is_limited`
    subprocess.TimeoutExpired after SECONDS.
    """
    return subprocess.run(
        _command(module, function, *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"OMP_WAIT_POLICY": "passive", **os.environ, "GGML_NO_BACKTRACE": "1"},
        timeout=SECONDS if is_limited else None,
        check=False,
    )


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM raises SystemExit, so that `finally` blocks run."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with_stdin() -> None:
    """End this process as SIGTERM does once stdin ends: when a process that holds it has ended.

    So no child is left if that process is killed. Unlike a process group, this works on all
    systems; a thread waits, which costs nothing.
    """

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class LimitExceededError(Exception):
    """A request took too much time or memory, or crashed the process; the message says which."""


class LimitedProcess:
    """A process that is started at the first request, and again after a limit has ended it.

    Several threads may use it, one at a time; a forked process starts one of its own.
    """

    def __init__(self, module: str) -> None:
        """`module`: a module whose function `main` calls `answer_requests`."""
        self._module = module
        self._locks: dict[int, threading.Lock] = {}  # per pid: a fork may copy a lock that is held
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # process that started `_process`
        self._end: Callable[[], object] = lambda: None

    def ask(self, request: Any, *, seconds: float) -> Any:
        """The answer to a request, after at most `seconds` of processor time.

        Raises LimitExceededError; TypeError, ValueError or RecursionError if the request is not
        JSON; GgufspecError if the process does not start.
        """
        data = json.dumps([seconds, request]).encode() + b"\n"
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._pid != os.getpid():  # not started, or started before a fork
                self._process, self._pid = None, os.getpid()
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(data)
                process.stdin.flush()
                if (reply := process.stdout.readline()).endswith(b"\n"):
                    return json.loads(reply)
            except (OSError, ValueError):
                pass  # the process has ended, or was closed
            except BaseException:
                self._end()  # interrupted: else the next request would read this one's reply
                raise
            status = process.wait()
            self._end()
        is_slow = status in (_EXIT_TIME, -getattr(signal, "SIGPROF", 0))
        raise LimitExceededError(
            f"takes longer than {seconds:g} s" if is_slow else "takes too much memory"
        )

    def close(self) -> None:
        """End the process; a later request starts it again. May be called twice."""
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            try:
                process = subprocess.Popen(
                    _command(self._module, "main"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
                )
            except OSError as error:
                raise self._not_started(str(error)) from error
            self._end = weakref.finalize(self, _end, process, os.getpid())
            assert process.stderr is not None
            if not (said := process.stderr.read()).endswith(_READY):
                last = said.decode(errors="replace").strip().rpartition("\n")[2]
                raise self._not_started(last or f"it ended with status {process.wait()}")
            self._process = process
        return self._process

    def _not_started(self, reason: str) -> GgufspecError:
        return GgufspecError(
            f"the process for {self._module} did not start: {reason}; if a module is missing, "
            "install ggufspec again"
        )


def answer_requests(answer: Callable[[Any], Any], *, n_bytes_max: int) -> None:
    """Answer each line of stdin on stdout, with a deep stack, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (n_bytes_max, n_bytes_max))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer_requests, args=(answer,))
    thread.start()
    sys.stderr.buffer.write(_READY)
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    thread.join()


def _answer_requests(answer: Callable[[Any], Any]) -> None:
    set_timer = getattr(signal, "setitimer", lambda which, seconds: None)
    timer = getattr(signal, "ITIMER_PROF", 0)
    for line in sys.stdin.buffer:
        seconds, request = json.loads(line)
        # Both timers end the process even inside native code.
        set_timer(timer, seconds)
        faulthandler.dump_traceback_later(_WALL_FACTOR * seconds, exit=True)
        try:
            reply = json.dumps(answer(request))
        except BaseException:  # such as MemoryError, and panics of native code
            os._exit(_EXIT_TIME + 1)
        faulthandler.cancel_dump_traceback_later()
        set_timer(timer, 0)
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


def _command(module: str, function: str, *arguments: str) -> list[str]:
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; "
    return [sys.executable, "-c", f"{code}{function}(*{arguments!r})"]


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    if pid == os.getpid():  # not in a forked process
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):  # closing flushes a request that was not written
            pipe.close()  # type: ignore[union-attr]
