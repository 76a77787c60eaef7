"""What a worker makes of a prompt, without a process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ggufspec.batch import worker
from ggufspec.common.prompts import Prompt
from ggufspec.decoding.stats import Stats
from ggufspec.engine.load import load

TASK = {"settings": {"max_tokens": 8, "n_draft": 2}, "seed": 0, "timeout": None} | dict.fromkeys(
    ("chat", "system")
)


def test_nothing_of_another_prompt_is_remembered(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a text would be computed in other batches, by what its worker wrote before."""
    reused: list[list[int]] = []
    counts = worker._counts

    def spy(stats: Sequence[Stats]) -> dict[str, Any]:
        reused.append([each.n_prompt_reused for each in stats])
        return counts(stats)

    monkeypatch.setattr(worker, "_counts", spy)
    with load(*pair, n_threads=1, tuned=False) as engine:
        for texts in (("hello hello",), ("hello hello", "more"), ("hello hello you",)):
            kind = "turns" if len(texts) > 1 else "prompt"
            assert worker.answer(engine, Prompt(0, kind, turns=texts), TASK)["error"] is None
    assert [each[0] for each in reused] == [0, 0, 0]
    assert reused[1][1] > 0, "but of the turn before, it is"
