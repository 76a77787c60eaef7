"""Runs the command line, in this process or in one of its own, on models of a few kilobytes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
from patience import PATIENCE

from ggufspec.cli import main
from ggufspec.engine.stream import Stream
from ggufspec.engine.text import Chunk
from ggufspec.llama import build


@dataclass(frozen=True)
class Result:
    """What a command left behind: its exit code, and what it wrote to stdout and to stderr."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        document: dict[str, Any] = json.loads(self.out)
        return document


Command = Callable[..., Result]
ERROR, USAGE, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
# A shell starts jobs in the background with Ctrl-C disabled: enable it, whoever started us.
PREAMBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
ENTRY = "from ggufspec.__main__ import main; main()"
MAIN = PREAMBLE + ENTRY
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def _no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` and `chat` do not tell of this build's own shortcomings, but of those of a test."""
    monkeypatch.setattr(build, "of_processor", lambda: [])


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`ggufspec ...` within this process, which saves the second that a start may take."""

    def call(*args: str | Path, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["ggufspec", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        capfd.readouterr()
        code = main.run()
        return Result(code, *capfd.readouterr())

    return call


@pytest.fixture
def run(command: Command) -> Command:
    """`ggufspec run ...`; one thread is enough for models this small."""
    return lambda *args, **how: command("run", "-t", "1", *args, **how)


@pytest.fixture
def program() -> Command:
    """`ggufspec ...` as a process of its own; bytes in, text out."""

    def call(*args: str | bytes | Path, stdin: bytes = b"", **env: str) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "ggufspec", *args],
            input=stdin,
            capture_output=True,
            env={**os.environ, **env},
            timeout=PATIENCE,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return call


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes any bytes, never ends a text, and has no chat template."""
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "target.gguf")


@pytest.fixture(scope="session")
def draft(target: Path) -> Path:
    """One layer of the target's two: it guesses right now and then."""
    return tiny.write_llama(target.with_name("draft.gguf"), n_layer=1)


class InterruptedStream(Stream):
    """As if Ctrl-C were pressed after the tenth chunk."""

    n_taken = 0

    def __next__(self) -> Chunk:
        self.n_taken += 1
        if self.n_taken == 11:
            raise KeyboardInterrupt
        return super().__next__()


def started(*args: object, code: str = MAIN, **how: Any) -> subprocess.Popen[bytes]:
    """A process of its own, with buffered output as users have it, whatever tests are run with."""
    env = how.pop("env", os.environ)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        bufsize=0,  # what is read ahead of communicate() must not be lost to it
        env={name: value for name, value in env.items() if name != "PYTHONUNBUFFERED"},
        **{**streams, **how},
    )


def is_begun(text: str) -> None:
    """It is the text of a model that writes the alphabet over and over, ten letters or more."""
    assert len(text) >= 10
    assert (LETTERS * (len(text) // len(LETTERS) + 1)).startswith(text)


def check_interrupted(arguments: Sequence[object]) -> None:
    """Run a command until it has two contexts; Ctrl-C then ends it without a traceback."""
    process = started(*arguments)
    try:
        assert process.stderr is not None
        n_contexts = 0
        while n_contexts < 2:
            line = process.stderr.readline()
            assert line, "it ended too early"
            n_contexts += b"sched_reserve: reserve took" in line
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, out) == (INTERRUPTED, b"")
    assert b"Traceback" not in err
    assert err.splitlines()[-1] == b"ggufspec: interrupted"
