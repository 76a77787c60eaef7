"""Texts that fail while another thread computes them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.drafting.pair_profile import PairProfile
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.options import CheckedOptions

GOOD, BAD = [5, 60, 100], [9, 8, 7, 6]
HOW: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "drafter": "none"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    path = tiny.write_llama(tmp_path / "target.gguf")
    with ggufspec.load(path, n_ctx=128, n_slots=2, n_threads=1, tuned=False) as loaded:
        yield loaded


def begun(engine: Engine, prompt: Sequence[int]) -> Generation:
    """A text with a chunk, which has been taken."""
    generation = Generation(engine.pair, engine.tokenize(prompt), CheckedOptions.of(HOW))
    engine.scheduler.advance(generation)
    generation.chunks.clear()
    return generation


def fail_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text after BAD fails in its next round."""
    real = Generation.answer

    def answer(self: Generation, scored: Any) -> None:
        real(self, scored)
        if self.n_prompt == len(BAD):
            self.end()
            raise ValueError("this one")

    monkeypatch.setattr(Generation, "answer", answer)


def test_a_failed_text_that_nobody_asks_for_is_freed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = begun(engine, GOOD), begun(engine, BAD)
    fail_bad(monkeypatch)
    engine.scheduler.step([good])  # and the other one, in the same pass
    assert bad.is_over
    ref = weakref.ref(bad)
    del bad
    gc.collect()
    assert ref() is None
    good.close()


def test_an_error_reaches_its_thread_although_the_text_is_over_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learned is stored in between."""
    is_ending, may_end = threading.Event(), threading.Event()
    real = PairProfile.keep

    def slow(self: PairProfile, *arguments: Any) -> None:
        is_ending.set()
        may_end.wait(10)
        real(self, *arguments)

    good, bad = begun(engine, GOOD), begun(engine, BAD)
    fail_bad(monkeypatch)
    monkeypatch.setattr(PairProfile, "keep", slow)
    with ThreadPoolExecutor(2) as threads:
        computing = threads.submit(engine.scheduler.step, [good])
        assert is_ending.wait(10)
        waiting = threads.submit(engine.scheduler.advance, bad)
        wait([waiting], 0.2)
        may_end.set()
        with pytest.raises(ValueError, match="this one"):
            waiting.result(10)
        computing.result(10)
        good.close()
