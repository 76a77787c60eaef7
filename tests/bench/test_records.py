"""What a benchmark keeps is read again as it was, and nothing else is."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
import pytest

from ggufspec.bench import difference, plot_data, summary, tables
from ggufspec.bench.records import BenchResults, read_results
from ggufspec.errors import OptionError

ODD = [
    *(None, True, "", "plain", -1, 0, 1, 2**60, 10**400, 1e-300, 1e300, float("nan"), "\ud800"),
    *(float("inf"), [], {}, [[]], [1, 2, 3, 4, 5], {"name": 1}, 0.5),
]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    for before in (BenchResults.of_document(measured.document(), "it"), measured.lively()):
        path = tmp_path / "results.json"
        path.write_text(json.dumps(before.to_document()))
        assert read_results(path) == before


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON in UTF-8"),
        (b"[]", "names no format"),
        (b'{"format": "else-2"}', "'else-2', not 'ggufspec-bench-1'"),
        (b'{"format": "ggufspec-bench-1"}', "it has no 'settings'"),
        (b"[" * 100_000, "recursion"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_file_of_another_kind_is_refused(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=told) as caught:
        read_results(path)
    assert "it.json" in str(caught.value)
    assert "ggufspec bench --json" in str(caught.value)


def test_an_unreadable_file_is_reported(
    tmp_path: Path,
) -> None:
    with pytest.raises(OptionError, match="No such file"):
        read_results(tmp_path / "none.json")
    with pytest.raises(OptionError, match="directory"):
        read_results(tmp_path)
    with pytest.raises(OptionError, match="larger than 100 bytes"):
        read_results(measured.RECORDED, max_bytes=100)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("measurements", 0, "run"), -1, r"measurements\[0\].run is -1; it must be a whole number"),
        (("measurements", 0, "run"), True, "run is True"),
        (("measurements", 0, "generation_seconds"), float("nan"), "is nan; it must be a number"),
        (("measurements", 0, "generation_seconds"), -1.0, "a number of at least 0"),
        (("measurements", 0, "accepted_by_position"), [1], "0 positions .* 1 of accepted"),
        (("measurements", 0, "tokens"), [1, 2], "2 tokens; its counts require 48"),
        (("measurements", 0, "n_accepted"), 9, "9 accepted tokens of 0 drafted"),
        (("measurements", 0, "rounds"), [[1, 2, 3]], r"rounds\[0\] has no 'draft_seconds'"),
        (("measurements", 0, "contender"), "nobody", "'nobody' is named"),
        (("measurements", 0), 1, r"measurements\[0\] is 1; it must be an object"),
        (("contenders", 0, "baseline"), "nobody", "'nobody' is named"),
        (("contenders", 1, "name"), "plain", "'plain' occurs twice"),
        (("contenders", 0, "model"), "target", "pair, draft or baseline"),
        (("contenders", 0, "options"), {"temperature": "hot"}, "temperature is 'hot'"),
        (("settings",), {"x": [float("inf")]}, "settings is inf"),
        (("settings",), {"x": "\ud800"}, "a text in Unicode"),
        (("interrupted",), 0, "interrupted is 0; it must be true or false"),
    ],
)
def test_an_error_names_its_place(path: Any, value: object, told: str) -> None:
    document = measured.document()
    _put(document, (path,) if isinstance(path, str) else path, value)
    with pytest.raises(OptionError, match=told):
        BenchResults.of_document(document, "it")


def test_a_text_that_was_measured_twice_is_refused() -> None:
    document = measured.document()
    document["measurements"].append(document["measurements"][0])
    with pytest.raises(OptionError, match="twice"):
        BenchResults.of_document(document, "it")


def test_any_file_is_refused_or_can_be_printed() -> None:
    chance = random.Random(1)
    whole = json.dumps(measured.document())
    other = BenchResults.of_document(json.loads(whole), "it")
    n_usable = 0
    for _ in range(400):
        document = json.loads(whole)
        for _ in range(chance.choice((1, 1, 2, 4))):
            _mutate(document, chance)
        try:
            found = BenchResults.of_document(document, "it")
        except OptionError:
            continue
        n_usable += 1
        summary.warnings_of(found)
        tables.overview(found)
        tables.positions(found)
        tables.by_category(found)
        difference.compare(found, other)
        for draws in (
            plot_data.speedup_lines,
            plot_data.acceptances,
            plot_data.pass_costs,
            plot_data.rate_bars,
            plot_data.timelines,
        ):
            draws(found)  # type: ignore[operator]
    assert n_usable > 30


def _mutate(document: dict[str, Any], chance: random.Random) -> None:
    """Replace or remove something somewhere."""
    path: list[Any] = []
    here: Any = document
    while isinstance(here, (dict, list)) and here and (not path or chance.random() < 0.8):
        path.append(chance.choice(list(here) if isinstance(here, dict) else range(len(here))))
        here = here[path[-1]]
    if chance.random() < 0.2:
        above = _at(document, path[:-1])
        del above[path[-1]]
    else:
        _put(document, path, copy.deepcopy(chance.choice(ODD)))


def _at(document: Any, path: Sequence[Any]) -> Any:
    for name in path:
        document = document[name]
    return document


def _put(document: Any, path: Sequence[Any], value: object) -> None:
    _at(document, path[:-1])[path[-1]] = value
