"""Texts that fail: their consumers hear it, and nothing else does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation

GOOD, BAD = [5, 60, 100], [9, 8, 7, 6]
HOW: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "drafter": "none"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    path = tiny.write_llama(tmp_path / "target.gguf")
    with ggufspec.load(path, n_ctx=128, n_slots=2, n_threads=1, tuned=False) as loaded:
        yield loaded


def test_a_failed_text_is_freed_and_its_error_is_raised_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Generation.answer
    failed: list[weakref.ref[Generation]] = []

    def answer(self: Generation, scored: Any) -> None:
        real(self, scored)
        if self.n_prompt == len(BAD) and self.rounds:
            failed.append(weakref.ref(self))
            raise ValueError("this one")

    monkeypatch.setattr(Generation, "answer", answer)
    good, bad = engine.stream(GOOD, **HOW), engine.stream(BAD, **HOW)
    with pytest.raises(ValueError, match="this one"):
        bad.finish()
    assert bad.finish().finish_reason is None
    assert len(good.finish().tokens) == 100
    del bad
    gc.collect()
    assert [ref() for ref in failed] == [None]
    assert len(engine.pair.slots.free) == 2
