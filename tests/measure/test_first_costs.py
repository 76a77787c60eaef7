"""The first drafts of a pair cost what the tables of its models say."""

from __future__ import annotations

from pathlib import Path

import pytest

import ggufspec
from ggufspec.llama.model import Model
from ggufspec.measure import attention, table
from ggufspec.measure.attention import UsualText
from ggufspec.measure.disturbed import Watch
from ggufspec.measure.table import Row, Table


def test_what_kernels_took_where_attention_is_not_measured(target: Path) -> None:
    with ggufspec.load(target, n_threads=1, flash_attention="off") as engine:
        model = engine.pair.target.model
        about, types = table.key_of(model), " ".join(model.kernels.types)
    seconds = {1: 10.0, 2: 11.0, 4: 12.0, 8: 20.0}
    assert table.add(about, {Row(types, "own", n, 0): each for n, each in seconds.items()})
    with ggufspec.load(target, n_threads=1, n_draft_max=11, flash_attention="off") as engine:
        curve = engine.pair.profile.costs.curve
    assert [round(seconds / curve[0], 6) for seconds in curve] == pytest.approx(
        [1, 1.1, 1.15, 1.2, 1.4, 1.6, 1.8, 2, 2.2, 2.4, 2.6, 2.8]
    )


def test_what_the_chosen_attention_took_at_the_depth_of_the_text(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {
        ("on", 32): (1.0, 1.2, 1.6, 2.0),
        ("on", 512): (3.0, 3.0, 3.0, 3.0),
        ("off", 32): (0.5, 0.6, 0.8, 1.0),
        ("off", 512): (1.5, 1.8, 2.4, 3.0),
        ("own", 32): (1.9, 1.9, 1.9, 1.9),
        ("own", 512): (1.9, 1.9, 1.9, 1.9),
    }

    def times(model: Model, text: UsualText, watch: Watch) -> Table:
        return {
            Row(" ".join(model.kernels.types), way, n, depth): 0.01 * each
            for (way, depth), of in seconds.items()
            for n, each in zip((1, 2, 4, 8), of, strict=True)
        } | {Row(" ".join(model.kernels.types), way, 1, 0): 0.001 for way in ("own", "on", "off")}

    monkeypatch.setattr(attention, "time_passes", times)
    with ggufspec.load(target, draft, n_threads=1, n_draft_max=8, n_ctx=128) as engine:
        costs = engine.pair.profile.costs
    assert engine.attention is not None
    assert engine.attention.startswith("flash attention off")
    assert [seconds / costs.curve[0] for seconds in costs.curve] == pytest.approx(
        [1, 1.2, 1.4, 1.6, 1.7, 1.8, 1.9, 2, 2.1]
    )
    assert costs.step / costs.curve[0] == pytest.approx(1)
