"""A process that answers requests: it is started once, and a failed start says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from ggufspec.common.child import LimitedProcess
from ggufspec.errors import GgufspecError

ECHO = """
from ggufspec.common.child import answer_requests
def main(): answer_requests(lambda asked: asked, n_bytes_max=2**30)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LimitedProcess]:
    def make(source: str) -> LimitedProcess:
        (tmp_path / "answering.py").write_text(source)
        return LimitedProcess("answering")

    monkeypatch.syspath_prepend(tmp_path)
    return make


def test_the_first_requests_of_several_threads_start_one_process(
    made: Callable[[str], LimitedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    popen, getpid = subprocess.Popen, os.getpid

    def counted(*args: object, **how: object) -> subprocess.Popen[bytes]:
        started.append(args)
        return popen(*args, **how)  # type: ignore[call-overload, no-any-return]

    def slow() -> int:
        time.sleep(0.01)  # another thread has its turn
        return getpid()

    monkeypatch.setattr(subprocess, "Popen", counted)
    monkeypatch.setattr(os, "getpid", slow)
    process, together = made(ECHO), Barrier(4)

    def ask(i: int) -> int:
        together.wait()
        return int(process.ask(i, seconds=5))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == [0, 1, 2, 3]
    process.close()
    assert len(started) == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit(3)", "it ended with status 3"),
    ],
)
def test_a_process_that_cannot_start_says_why(
    made: Callable[[str], LimitedProcess], source: str, said: str
) -> None:
    process = made(source)
    for _ in range(2):
        with pytest.raises(GgufspecError, match=f"did not start: .*{said}"):
            process.ask("a", seconds=5)


def test_a_missing_interpreter_is_named(
    made: Callable[[str], LimitedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(GgufspecError, match=r"did not start: .*/nowhere/python"):
        made(ECHO).ask("a", seconds=5)
