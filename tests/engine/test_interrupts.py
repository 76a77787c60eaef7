"""Ctrl-C at any moment: the text ends, and the engine writes the next one."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tiny
from head_pairs import Interrupted
from patience import PATIENCE, at_most, comes_true, ctrl_c_in_a_batch, in_child_of_a_fork

import ggufspec
from ggufspec.llama.threadpool import are_needed

ENDLESS: Any = {"context_shift": True, "ignore_eos": True}
SHORT: Any = {"max_tokens": 2, "temperature": 0.0, "n_draft": 1}


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """It calls functions of ours too, and from there no Ctrl-C gets out."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such alarm")
@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("are_apart", [False, True])
def test_ctrl_c_at_any_moment_leaves_an_engine_that_writes(
    tmp_path: Path, *, are_apart: bool
) -> None:
    model = tiny.write_llama(tmp_path / "model.gguf")
    with at_most(), ggufspec.load(model, model, n_ctx=64, n_threads=1) as engine:
        engine.pair.are_apart = are_apart
        expected = engine.generate("another", **SHORT).tokens
        for at in count(1, 2):
            interrupted = Interrupted(at)
            sys.setprofile(interrupted)
            try:
                with suppress(KeyboardInterrupt):
                    engine.generate("hello", **SHORT)
            finally:
                sys.setprofile(None)
            if interrupted.is_late:
                break
            assert engine.generate("another", **SHORT).tokens == expected, interrupted.where
    assert at > 100


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("no_garbage_collection")
def test_hundreds_of_ctrl_c_leave_no_lock_behind(tmp_path: Path) -> None:
    """Also between two instructions of Python, where its Condition would stay locked."""
    uses: list[Callable[[ggufspec.Engine], object]] = [
        lambda engine: engine.generate("hello", **SHORT),
        lambda engine: list(engine.stream("hello", **SHORT)),
        lambda engine: engine.generate_batch(["hello", "another"], **SHORT),
        lambda engine: engine.forget(),
    ]
    draw = random.Random(5)
    path = tiny.write_llama(tmp_path / "model.gguf")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    n_heard = 0
    try:
        with ggufspec.load(path, n_ctx=64, n_slots=2, n_threads=1) as engine:
            for _ in range(600):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 + draw.random() * 0.002)
                    draw.choice(uses)(engine)
                    time.sleep(0.01)
                except KeyboardInterrupt:
                    n_heard += 1
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            assert comes_true(lambda: len(engine.pair.slots.free) == 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_heard > 500, "the others came where nothing gets out, such as __del__"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such alarm")
@pytest.mark.parametrize("write", [tiny.write_llama, tiny.write_qwen35])
def test_ctrl_c_ends_a_batch_that_takes_long(
    write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, n = write(tmp_path / "model.gguf"), 10_000
    with ggufspec.load(model, n_ctx=n + 100, n_batch=n, n_threads=1) as engine:
        expected = engine.generate("another text", **SHORT).tokens
        text = engine.tokenize("another text")
        caplog.clear()
        with ctrl_c_in_a_batch():
            engine.generate([*text, *[5] * n], **SHORT)
        assert engine.pair.target.n_cells() <= len(text)
        assert engine.generate("another text", **SHORT).tokens == expected
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_cannot_use_the_engine(tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "model.gguf")

    def fresh(n_threads: int) -> str:
        with ggufspec.load(model, n_threads=n_threads) as engine:
            return engine.generate("hello", **SHORT).text

    uses = {
        "generate": lambda engine: engine.generate("hello", **SHORT),
        "stream": lambda engine: engine.stream("hello", **SHORT),
        "tokenize": lambda engine: engine.tokenize("hello"),
        "render": lambda engine: engine.render([{"role": "user", "content": "hello"}], "{{ 1 }}"),
        "forget": lambda engine: engine.forget(),
    }
    for n_threads in (1, 2):
        with (
            ggufspec.load(model, n_threads=n_threads, tuned=False) as engine,
            engine.stream("hello", **ENDLESS) as begun,
        ):
            next(begun)
            for use in (*uses.values(), lambda _: list(begun), lambda _: begun.close()):
                found = in_child_of_a_fork(lambda use=use: use(engine))  # type: ignore[misc]
                assert "ClosedError" in found
                assert "was forked" in found
                assert "spawn" in found
            assert in_child_of_a_fork(engine.close) == "None"
            next(begun)
    expected = fresh(2)
    assert in_child_of_a_fork(lambda: fresh(1)) == expected
    if are_needed():  # pools of threads, which a new context has of its own
        assert in_child_of_a_fork(lambda: fresh(2)) == expected
    else:
        assert "was forked" in in_child_of_a_fork(lambda: fresh(2))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_ends(tmp_path: Path) -> None:
    """With Python's own end, where objects are destroyed."""
    model = tiny.write_llama(tmp_path / "model.gguf")
    program = f"""
import os, sys, ggufspec
with ggufspec.load({str(model)!r}, n_threads=2) as engine:
    text = engine.generate("hello", temperature=0, max_tokens=4).text
    if not (pid := os.fork()):
        sys.exit(7)
    ended = os.waitpid(pid, 0)[1]
    assert engine.generate("hello", temperature=0, max_tokens=4).text == text
    print(os.waitstatus_to_exitcode(ended))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_no_compiled_code_is_imported_while_a_text_is_written(tmp_path: Path) -> None:
    """There a Ctrl-C may be lost: Cython forgets what an import of its own raises."""
    model = tiny.write_llama(tmp_path / "model.gguf")
    code = (
        "import sys, ggufspec\n"
        "with ggufspec.load(sys.argv[1], sys.argv[1], n_threads=1) as engine:\n"
        "    before = set(sys.modules)\n"
        "    engine.generate('hello', max_tokens=2, seed=1)\n"
        "print(*(name for name in set(sys.modules) - before if not name.startswith('ggufspec')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, model], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_ctrl_c_while_the_vocabulary_is_read_leaves_an_engine_that_writes(tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []

    def interrupt(what: str, done: int, total: int) -> None:
        reported.append((what, done, total))
        if reported == [("vocabulary", 0, total)]:
            raise KeyboardInterrupt

    asked: Any = {"choices": ["yes", "no"], "progress": interrupt, "temperature": 0.0}
    with ggufspec.load(tiny.write_llama(tmp_path / "model.gguf"), n_threads=1) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate("hello", **asked)
        n = engine.vocab.n_tokens
        assert reported == [("vocabulary", 0, n)]
        assert engine.generate("hello", **asked).text in ("yes", "no")
        assert ("vocabulary", n, n) in reported
        reported.clear()
        engine.generate("hello again", **asked)
        assert "vocabulary" not in {what for what, _, _ in reported}, "it is read once"
