"""What a worker makes of a prompt, without a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from ggufspec.batch.worker import answer, known_profile
from ggufspec.common.prompts import Prompt
from ggufspec.drafting import profile_store
from ggufspec.engine import calibration
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.stream import Stream

TASK = {"seed": 0, "timeout": None, "chat": None, "system": None}
OPTIONS = CheckedOptions(max_tokens=8, n_draft=2)


class Recorder:
    """An engine that keeps its streams."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streams: list[Stream] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def begin(self, *args: Any, **options: Any) -> Stream:
        self.streams.append(self.engine.begin(*args, **options))
        return self.streams[-1]


def test_no_token_of_another_prompt_is_reused(pair: tuple[Path, Path]) -> None:
    """Else a text would be computed in batches that depend on its worker's earlier prompts."""
    reused: list[list[int]] = []
    with load(*pair, n_threads=1, tuned=False) as engine:
        for texts in (("hello hello",), ("hello hello", "more"), ("hello hello you",)):
            recorder = Recorder(engine)
            kind = "turns" if len(texts) > 1 else "prompt"
            record = answer(cast(Engine, recorder), Prompt(0, kind, turns=texts), TASK, OPTIONS)
            assert record["error"] is None
            reused.append([each.completion.stats.n_prompt_reused for each in recorder.streams])
    assert [each[0] for each in reused] == [0, 0, 0]
    assert reused[1][1] > 0, "the second turn reuses the first"


def test_a_profile_measured_beside_busy_programs_serves_one_batch(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"settings": {"n_draft": "auto", "drafter": None}, "profile": None}

    def stored() -> list[profile_store.Record]:
        return [each for each in profile_store.records() if each.facts["about"] == "batch"]

    def profile(task: dict[str, Any]) -> dict[str, object]:
        with load(*pair, n_threads=1, flash_attention="off") as engine:
            found = known_profile(engine, task, lambda *_: None)
            assert found is not None
            return found

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "undisturbed", lambda measure, n_threads: None)
        first = profile(task)
    assert profile({**task, "profile": first}) == first, "of the batch's next worker"
    assert not stored()
    assert profile(task) != first
    assert len(stored()) == 1
