"""llama.cpp's log: lines of ggufspec's own calls go to a logger, all others to where they went."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import llama_cpp
import pytest

from ggufspec.llama.log import listening, log


def calls(inside: Callable[[], None]) -> None:
    log.during(inside)


def listens(inside: Callable[[], None]) -> None:
    with listening():
        inside()


class At:
    """Traces this thread: calls `act` before the nth instruction of some functions."""

    def __init__(self, n: int, codes: set[CodeType], act: Callable[[], None]) -> None:
        self.n_left, self._codes, self._act = n, codes, act

    def __call__(self, frame: FrameType, event: str, _: Any) -> At | None:
        if frame.f_code not in self._codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.n_left -= 1
            if self.n_left == 0:
                self._act()
        return self


@pytest.mark.parametrize("mine", [calls, listens])
def test_calls_that_begin_in_two_threads_at_once_leave_the_log_to_others(
    mine: Callable[[Callable[[], None]], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the other thread does between two instructions of this one."""
    codes = {type(log).during.__code__, listening.__wrapped__.__code__}  # type: ignore[attr-defined]
    caplog.set_level(logging.DEBUG, "ggufspec.llama")
    tracing = sys.gettrace()
    with ThreadPoolExecutor(1) as threads:
        for n in count(1):
            begun, ends = threading.Event(), threading.Event()
            other: list[Any] = []

            def call(begun: threading.Event = begun, ends: threading.Event = ends) -> None:
                begun.set()
                ends.wait(10)

            def act(other: list[Any] = other, call: Any = call, begun: Any = begun) -> None:
                other.append(threads.submit(log.during, call))
                assert begun.wait(10)

            at = At(n, codes, act)
            sys.settrace(at)
            try:
                mine(lambda: None)
            finally:
                sys.settrace(tracing)
            ends.set()
            for each in other:
                each.result(10)
            if at.n_left > 0:
                break
            caplog.clear()
            missing = str(tmp_path / "missing.gguf").encode()
            assert not llama_cpp.llama_model_load_from_file(
                missing, llama_cpp.llama_model_default_params()
            )
            assert not caplog.messages, f"between the instructions {n - 1} and {n}"
    assert n > 10
