"""Tables of passes keep what every process adds, and nothing that cannot be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from ggufspec.drafting import profile_store
from ggufspec.llama.kernel_offer import Placed
from ggufspec.measure import table
from ggufspec.measure.table import Row

ABOUT: dict[str, object] = {"about": "passes", "model": "a", "n_bytes": 10, "types": ["Q4_0"]}
ROW, OTHER = Row("q4_0", "own", 1, 32), Row("", "on", 4, 512)


def test_rows_are_added_to_those_that_are_known() -> None:
    assert table.recall(ABOUT) == {}
    assert table.add(ABOUT, {ROW: 0.5})
    assert table.add(ABOUT, {OTHER: 0.25})
    assert table.recall(ABOUT) == {ROW: 0.5, OTHER: 0.25}
    assert table.add(ABOUT, {ROW: 1.0})
    assert table.recall(ABOUT)[ROW] == 0.5, "what has decided stays"
    assert table.add(ABOUT, {ROW: 1.0}, replaces=True)
    assert table.recall(ABOUT) == {ROW: 1.0, OTHER: 0.25}
    assert table.recall({**ABOUT, "model": "b"}) == {}
    assert not table.add(ABOUT, {}), "there is nothing to store"


@pytest.mark.parametrize(
    "row",
    [
        ["q4_0", "own", 1, 32],
        ["q4_0", "own", 1, 32, "1.0"],
        ["q4_0", "own", 0, 32, 1.0],
        ["q4_0", "own", 1, -1, 1.0],
        ["q4_0", "own", 1, 32, 0.0],
        ["q4_0", "own", True, 32, 1.0],
        [None, "own", 1, 32, 1.0],
        5,
    ],
)
def test_rows_that_cannot_be_right_are_left_out(row: object) -> None:
    profile_store.remember(ABOUT, {"rows": [row, [*OTHER, 0.25]]})
    assert table.recall(ABOUT) == {OTHER: 0.25}
    profile_store.remember(ABOUT, {"rows": row})
    assert table.recall(ABOUT) == {}


def test_seconds_lie_on_a_line_between_the_depths_around() -> None:
    rows = {Row("", "on", 1, depth): each for depth, each in ((32, 1.0), (512, 3.0), (1024, 7.0))}
    rows |= {Row("", "on", 2, 32): 2.0, Row("q4_0", "on", 1, 0): 9.0, Row("", "off", 1, 0): 9.0}
    at: dict[float, float] = {0: 1.0, 32: 1.0, 272: 2.0, 512: 3.0, 768: 5.0, 5000: 7.0}
    for depth, expected in at.items():
        assert table.seconds(rows, (), "on", depth) == {1: pytest.approx(expected), 2: 2.0}
        assert table.curve(rows, (), "on", depth).keys() == ({1, 2} if depth < 33 else {1})


def test_the_key_has_what_passes_depend_on(target: Path, tmp_path: Path) -> None:
    other = tiny.write_llama(tmp_path / "other.gguf", seed=1)
    ways: list[dict[str, Any]] = [{}, {"n_threads": 7}, {"type_k": "q8_0"}, {"type_v": "q8_0"}]
    placed = [Placed(), Placed(("CUDA0",), 1), Placed(("CUDA0",), 2), Placed(("CUDA1",), 1)]
    keys = [table.key(target, Placed(), **way) for way in ways]
    keys += [table.key(target, each) for each in placed[1:]] + [table.key(other, Placed())]
    assert len({json.dumps(each, sort_keys=True) for each in keys}) == len(keys)
    assert table.key(target, Placed((), 5)) == table.key(target, Placed()), "there is no device"


def test_nothing_is_stored_for_a_file_that_is_gone(tmp_path: Path) -> None:
    assert not table.add(table.key(tmp_path / "gone.gguf", Placed()), {ROW: 0.5})
    assert [*table.records()] == []


def test_other_models_of_the_same_types_are_found() -> None:
    table.add(ABOUT, {ROW: 0.5})
    for change in ({"types": ["Q8_0"]}, {"n_threads": 3}, {"about": "other"}):
        table.add({**ABOUT, "model": "b", **change}, {ROW: 1.0})
    assert [*table.of_same_types({**ABOUT, "model": "c", "n_bytes": 99})] == [({ROW: 0.5}, 10)]
    assert [*table.of_same_types(ABOUT)] == [], "itself"
