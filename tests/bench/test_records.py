"""What a benchmark keeps is read again as it was, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measured
import pytest

from ggufspec.bench.records import BenchResults, Contender, read_results
from ggufspec.errors import OptionError


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    for before in (BenchResults.of_document(measured.document(), "it"), measured.lively()):
        path = tmp_path / "results.json"
        path.write_text(json.dumps(before.to_document()))
        assert read_results(path) == before


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON in UTF-8"),
        (b"[]", "names no format"),
        (b'{"format": "else-2"}', "'else-2', not 'ggufspec-bench-1'"),
        (b'{"format": "ggufspec-bench-1"}', "it has no 'contenders'"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_file_of_another_kind_is_refused(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=told) as caught:
        read_results(path)
    assert "it.json" in str(caught.value)
    assert "ggufspec bench --json" in str(caught.value)


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        read_results(tmp_path / "none.json")


TEXT = ("measurements", -1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*TEXT, "generation_seconds"), "fast"),
        ((*TEXT, "generation_seconds"), float("nan")),
        ((*TEXT, "generation_seconds"), 1e-320),
        ((*TEXT, "n_generated"), True),
        ((*TEXT, "category"), "\ud800"),
        ((*TEXT, "tokens"), [[1]]),
        ((*TEXT, "rounds"), 3),
        ((*TEXT, "rounds"), [["a", 1, 1, 0.1, 0.1]]),
        ((*TEXT, "accepted_by_position"), [1] * 50),
        (TEXT, 7),
        (("contenders", 0, "options"), {"temperature": "hot"}),
        (("memory",), {"peak_rss_bytes": "\x1b[2J\ud800"}),
        (("machine",), [1]),
    ],
    ids=str,
)
def test_a_damaged_file_is_refused_in_one_line(path: Any, value: object) -> None:
    document = measured.document()
    *above, last = path
    place: Any = document
    for name in above:
        place = place[name]
    place[last] = value
    with pytest.raises(OptionError, match="is not as `ggufspec bench --json` writes it") as caught:
        BenchResults.of_document(json.loads(json.dumps(document)), "it.json")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("options", "is_greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 0.0, "samplers": ["top_k"]}, True),
        ({"temperature": 0.0, "samplers": ["temp"]}, True),
    ],
)
def test_a_contender_is_greedy_where_nothing_is_drawn(
    options: dict[str, object], is_greedy: bool
) -> None:
    assert Contender("draft 2", options).is_greedy == is_greedy
