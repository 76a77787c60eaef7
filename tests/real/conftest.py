"""These tests run where GGUFSPEC_REAL_MODELS names a folder that has the files of real models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from real_models import FILES, VARIABLE, Load, MakeLlama, PathOf, Program

import ggufspec
from ggufspec.engine.engine import Engine


@pytest.fixture(scope="session")
def path_of() -> PathOf:
    """The file of a model; without it, the test is skipped."""

    def find(name: str) -> Path:
        if not os.environ.get(VARIABLE):
            pytest.skip(f"{VARIABLE} names no folder of real models")
        path = Path(os.environ[VARIABLE]).expanduser() / FILES[name]
        if not path.exists():
            pytest.skip(f"{path} is not there")
        return path

    return find


@pytest.fixture(scope="session")
def load(path_of: PathOf) -> Iterator[Load]:
    """An engine with an empty cache; each is loaded once."""
    made: dict[str, Engine] = {}
    with ExitStack() as stack:

        def load(target: str, draft: str | None = None, **how: Any) -> Engine:
            key = repr((target, draft, sorted(how.items())))
            if key not in made:
                files = [path_of(name) for name in (target, draft) if name]
                engine = ggufspec.load(*files, tuned=False, **{"n_ctx": 256, **how})
                made[key] = stack.enter_context(engine)
            made[key].forget()
            return made[key]

        yield load


@pytest.fixture
def llama() -> Iterator[MakeLlama]:
    """`llama_cpp.Llama` with the target, the context, the threads and the batches of an engine."""
    with ExitStack() as stack:

        def make(engine: Engine, **how: Any) -> Any:
            context = engine.pair.target
            options: dict[str, Any] = {
                "n_ctx": context.n_ctx,
                "n_batch": context.n_batch,
                "n_ubatch": context.n_batch,
                "n_threads": context.n_threads,
                "n_threads_batch": context.n_threads,
                "flash_attn": context.options.flash_attention == "on",
                "verbose": False,
                **how,
            }
            return stack.enter_context(closing(llama_cpp.Llama(str(context.model.path), **options)))

        yield make


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """`ggufspec ...` as a process, which has to succeed; returns its stdout."""

    def call(*args: object) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ggufspec", *map(str, args)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(ggufspec.__file__).parents[1])},
            timeout=600,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout.decode()

    return call
