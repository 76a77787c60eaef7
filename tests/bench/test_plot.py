"""Plots of benchmarks: what they show, and that any results can be drawn."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path

import measured
import pytest

from ggufspec.bench import plot_data, summary
from ggufspec.bench.plot import check, draw
from ggufspec.bench.records import BenchResults, RoundTiming
from ggufspec.errors import CacheError, OptionError


def texts(results: BenchResults, folder: Path, name: str = "it.svg") -> list[str]:
    """All texts of the picture: paths of letters follow each as a comment."""
    path = folder / name
    draw(results, path)
    return texts_in(path)


def texts_in(path: Path) -> list[str]:
    return re.findall(r"<!-- (.*?) -->", path.read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture with all subplots."""
    path = tmp_path_factory.mktemp("pictures") / "it.svg"
    draw(measured.lively(), path)
    return path


# What is shown


def test_speedups_are_lines_by_length() -> None:
    (line,) = plot_data.speedup_lines(measured.lively())
    assert line.lengths == [1, 3, 8]
    assert line.name == ""
    assert line.auto is not None
    both = plot_data.speedup_lines(
        measured.lively((1, 3), drafters=("model", "ngram"), temperatures=(0.0, 0.7))
    )
    assert [line.name for line in both] == [
        *("model, T 0", "ngram, T 0", "model, T 0.7", "ngram, T 0.7")
    ]
    assert [line.number for line in both] == [0, 1, 2, 3]
    assert plot_data.speedup_lines(measured.lively(("auto",))) == []
    assert plot_data.speedup_lines(measured.lively((4,))) == []  # a point is no line


def test_of_many_contenders_the_fastest_are_shown() -> None:
    results = measured.lively(
        (1, 2), drafters=("model", "ngram"), rules=("a", "b"), temperatures=(0.0, 0.5), n_runs=1
    )
    slow = [each.name for each in results.contenders if "ngram, b" in each.name]
    results.measurements = [
        replace(each, generation_seconds=9 * each.generation_seconds)
        if each.contender in slow
        else each
        for each in results.measurements
    ]
    found = plot_data.series_names(results)
    assert len(found) == plot_data.MAX_LINES
    assert not [name for name in found if "ngram, b" in name]


def test_a_pass_has_the_cost_of_its_stair() -> None:
    results = measured.lively((1, 2, 3, 4), noise=0.0)
    sizes, seconds = plot_data.pass_costs(results)
    assert sizes == [1, 2, 3, 4, 5]
    assert [round(1e3 * each) for each in seconds] == [27, 38, 44, 36, 55]
    results.measurements[0] = replace(
        results.measurements[0], rounds=[RoundTiming(1, 7, 0, 0.1, 9.9)] * 4, n_rounds=4
    )
    assert plot_data.pass_costs(results)[0] == sizes  # four passes are too few
    alone = [each for each in results.measurements if each.contender == "draft alone"]
    assert plot_data.pass_costs(replace(results, measurements=alone)) == ([], [])


def test_acceptance_is_shown_of_auto_and_of_lengths_far_apart() -> None:
    found = plot_data.acceptances(measured.lively((1, 2, 3, 4, 5, 6, 7, 8, "auto")))
    assert [each.name for each in found] == ["auto", "8", "4", "2"]
    for each in found:
        assert all(0 <= share <= 1 for share in each.shares)
    assert [len(each.shares) for each in found[1:]] == [8, 4, 2]
    many = plot_data.acceptances(measured.lively((2, 4, "auto"), drafters=("a", "b"), rules=("c",)))
    assert [(each.number, each.name) for each in many] == [
        *((0, "auto"), (0, "4"), (1, "auto"), (1, "4"))
    ]


def test_the_timeline_has_the_best_and_plain_for_the_same_prompt() -> None:
    results = measured.lively()
    race = plot_data.timelines(results)
    assert race.plain.name == "plain"
    assert race.best.name == "draft 3"  # a pass over four is cheap
    for written in (race.plain, race.best):
        assert (written.tokens[0], written.seconds[0]) == (0, 0)
        assert written.tokens[-1] == race.n_tokens == 48
        assert list(written.seconds) == sorted(written.seconds)
    without = [replace(each, rounds=[]) for each in results.measurements]
    assert plot_data.timelines(replace(results, measurements=without)) is None


def test_of_many_bars_the_fastest_are_shown_and_what_they_are_compared_with() -> None:
    results = measured.lively(tuple(range(1, 9)), drafters=("a", "b", "c"), n_runs=1)
    shown, n_more = plot_data.rate_bars(results)
    assert len(shown) == 16
    assert n_more == 2 + 24 - 16
    rows = [row for row, _ in shown]
    assert [row.contender.name for row in rows[:2]] == ["plain", "draft alone"]
    left_out = {each.name for each in results.contenders} - {row.contender.name for row in rows}
    slowest = min(row.median for row in rows if row.speedup)
    rates = {row.contender.name: row.median for row in summary.summarize(results)}
    assert max(rates[name] for name in left_out) <= slowest


# The file


def test_a_subplot_without_data_is_left_out(whole: Path, tmp_path: Path) -> None:
    for title in (
        "Speed-up by draft length",
        "Time of a target pass",
        "Drafts accepted up to a position",
        "One text over time",
        "large with small",
        "a made one  ·  4 threads  ·  3 prompts, 2 runs  ·  ggufspec 0.1.0",
    ):
        assert title in texts_in(whole)
    bare = measured.two({("a", 0): 10}, {("a", 0): 15})
    found = texts(bare, tmp_path)
    assert "Tokens/s" in found
    assert "Speed-up by draft length" not in found
    assert "Time of a target pass" not in found
    assert "One text over time" not in found
    assert "nothing was measured" in texts(replace(bare, measurements=[]), tmp_path)


@pytest.mark.parametrize(
    "results",
    [
        replace(measured.lively((4,), n_prompts=1, n_runs=1, has_draft=False), interrupted=True),
        measured.lively((2, 4, "auto"), chance=0.0),
        measured.lively(
            (1, 2, "auto"), drafters=("a" * 40, "b"), rules=("c", "d"), temperatures=(0.0, 0.5)
        ),
    ],
    ids=["one", "nothing accepted", "many"],
)
def test_all_kinds_of_results_can_be_drawn(results: BenchResults, tmp_path: Path) -> None:
    draw(results, tmp_path / "it.svg")
    assert (tmp_path / "it.svg").read_text().rstrip().endswith("</svg>")
    assert os.listdir(tmp_path) == ["it.svg"]


def test_names_may_have_any_characters(tmp_path: Path) -> None:
    odd = "$x^{2$_\\frac <b>&-- 模型 \x1b[31m\n\udcff e" + "l" * 99 + ".gguf"
    results = measured.lively(("auto",), models={"": {"target": odd, "draft": odd}})
    results.machine = {"cpu": odd}
    results.measurements = [replace(each, prompt=odd) for each in results.measurements]
    found = texts(results, tmp_path)
    assert any(text.startswith("$x^{2$_\\frac &lt;b") or "$x^{2$" in text for text in found)
    strange = {"": {"target": 5, "target_threads": "x"}}
    assert texts(replace(results, models=strange, machine={"cpu": []}), tmp_path)


def test_the_same_results_make_the_same_picture(whole: Path, tmp_path: Path) -> None:
    draw(measured.lively(), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == whole.read_bytes()


def test_a_png_takes_the_place_of_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "it.PNG"
    path.write_text("before")
    draw(measured.lively((1, 2)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path) == ["it.PNG"]


def test_what_cannot_be_drawn_is_reported_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path / "it.svg")
    with pytest.raises(OptionError, match=r"name a file with the suffix .png or .svg"):
        check(tmp_path / "it.pdf")
    with pytest.raises(CacheError, match="No such file or directory"):
        check(tmp_path / "none" / "it.svg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=re.escape("pip install 'ggufspec[plot]'")):
        check(tmp_path / "it.svg")
