"""Summaries of measurements, their warnings, and the tables of them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import measured
import numpy as np
import pytest
from measured import text, two

from ggufspec.bench import summary, tables
from ggufspec.bench.records import BenchResults, Contender, FirstDifference

Rates = Mapping[tuple[str, int], float]
PROMPTS, RUNS = ("a", "b", "c"), 3


def rates(rate: float, spread: float = 0.0, seed: int = 0) -> dict[tuple[str, int], float]:
    """Each prompt's rate is its own; runs of it differ by a spread."""
    chance = random.Random(seed)
    return {
        (prompt, run): rate * (1 + i) * math.exp(chance.gauss(0, spread))
        for run in range(RUNS)
        for i, prompt in enumerate(PROMPTS)
    }


def quiet() -> BenchResults:
    return two(rates(10, 0.01), rates(15, 0.01, seed=1))


def drafts(**of: float) -> BenchResults:
    """Several drafts by name, each with its speed-up over its own plain decoding."""
    whole = BenchResults({}, [])
    for i, (name, speedup) in enumerate(of.items()):
        made = two(rates(10, 0.01, seed=i), rates(10 * speedup, 0.01, seed=9 + i), n_drafted=40)
        alone = Contender("draft alone", {"drafter": "none", "temperature": 0.0}, "draft")
        texts = [text("draft alone", *key, rate) for key, rate in rates(50).items()]
        for each in (*made.contenders, alone):
            whole.contenders.append(each.of_pair(name))
        for each_text in (*made.measurements, *texts):
            contender = f"{name}: {each_text.contender}"
            whole.measurements.append(replace(each_text, contender=contender))
    return whole


# Several drafts


def test_drafts_are_ranked_by_their_speedup() -> None:
    found = summary.ranked_drafts(drafts(slow=1.1, fast=1.6, none=0.9))
    assert [each.document["draft"] for each in found] == ["fast", "slow", "none"]
    assert found[0].speedup.ratio == pytest.approx(1.6, rel=0.02)
    assert found[0].document["contender"] == "draft 3"
    plain_ms = 1e3 * sum(1 / rate for rate in rates(50).values()) / len(rates(50))
    assert found[0].ms_per_step == pytest.approx(plain_ms)
    assert summary.ranked_drafts(drafts(only=1.6)) == []
    assert tables.ranking(quiet()) is None


@pytest.mark.parametrize(
    ("of", "told"),
    [
        ({"a": 1.1, "b": 1.6}, "Temperature 0: b is the fastest."),
        ({"a": 1.6, "b": 1.6, "c": 1.2}, "not shown to be faster than"),
        ({"a": 0.9, "b": 0.8}, "Temperature 0: no draft is faster than plain decoding."),
    ],
)
def test_the_ranking_says_which_draft_to_use(of: dict[str, float], told: str) -> None:
    table = tables.ranking(drafts(**of))
    assert told in table.notes[0]
    assert len(table.rows) == len(of)
    assert all(len(row) == len(table.columns) for row in table.rows)


# Summaries


def test_a_speedup_compares_the_same_texts() -> None:
    plain, ours = rates(10), {key: 1.5 * rate for key, rate in rates(10).items()}
    del ours["c", 2], plain["a", 0]  # the fastest, and the slowest
    found = {row.contender.name: row for row in summary.summarize(two(plain, ours))}
    assert found["plain"].speedup is None
    speedup = found["draft 3"].speedup
    assert speedup.n == len(PROMPTS)
    assert (speedup.ratio, speedup.low, speedup.high) == pytest.approx((1.5, 1.5, 1.5))


def test_ratios_have_a_geometric_mean() -> None:
    found = summary.ratio_of([math.log(2), math.log(8)])
    assert found.ratio == pytest.approx(4)
    assert (found.low, found.high) == (None, None)  # two values are too few


def test_texts_in_which_nothing_was_written_have_no_speedup() -> None:
    nothing = two({("a", 0): 1.0}, {("a", 0): 1.0}, n_generated=0)
    (_, row) = summary.summarize(nothing)
    assert row.speedup is None
    assert row.median == 0
    assert summary.summarize(two({}, {})) == []


@pytest.mark.parametrize(("n_prompts", "n_runs"), [(3, 3), (40, 1)])
def test_an_interval_covers_the_truth_as_often_as_it_says(n_prompts: int, n_runs: int) -> None:
    chance = np.random.default_rng(n_prompts)
    truth, covered = math.log(1.3), 0
    for _ in range(1000):
        of_prompts = chance.normal(truth, 0.2, n_prompts)
        of_texts = of_prompts[:, None] + chance.normal(0, 0.03, (n_prompts, n_runs))
        logs = {(str(i), run): log for (i, run), log in np.ndenumerate(of_texts)}
        found = summary.ratio_of_texts(logs)
        assert found.low is not None
        assert found.high is not None
        covered += math.log(found.low) < truth < math.log(found.high)
    assert 0.92 < covered / 1000 < 0.98


def test_of_few_prompts_each_text_counts() -> None:
    found = summary.ratio_of_texts({("a", run): 0.1 * run for run in range(4)})
    assert found.n == 4


def test_a_row_adds_up_its_texts() -> None:
    counts = {"n_drafted": 4, "n_rounds": 10}
    one = text("draft", rate=10, n_accepted=3, drafted_by_position=[3, 1], **counts)
    one = replace(one, accepted_by_position=[2, 1])
    other = text("draft", run=1, rate=20, n_accepted=1, drafted_by_position=[4], **counts)
    other = replace(other, accepted_by_position=[1])
    (row,) = summary.summarize(
        BenchResults({}, [Contender("draft", {})], measurements=[one, other])
    )
    assert (row.n_texts, row.n_runs, row.median, row.low, row.high) == (2, 2, 15, 10, 20)
    assert row.accepted == 4 / 8
    assert row.by_position == (3 / 7, 1)
    assert row.mean_length == 80 / 20
    assert row.ms_per_token == pytest.approx(1e3 * (4 + 2) / 80)
    assert (row.mean_seconds, row.first_token_seconds) == pytest.approx((3.5, 0.6))


# Warnings


def test_a_quiet_benchmark_has_no_warnings() -> None:
    assert summary.warnings_of(quiet()) == []


def test_noise_is_reported_with_its_worst() -> None:
    noisy = two(rates(10, 0.01), rates(40, 0.3))
    (told,) = summary.warnings_of(noisy)
    assert told.startswith("noise")
    assert "draft 3" in told
    assert "--runs" in told


def test_drift_is_reported() -> None:
    results = quiet()
    results.measurements = [
        replace(each, generation_seconds=each.generation_seconds / 0.7 ** (each.run / 2))
        for each in results.measurements
    ]
    (told,) = [each for each in summary.warnings_of(results) if each.startswith("drift")]
    assert "slower" in told


def test_an_interruption_is_reported() -> None:
    (told,) = summary.warnings_of(replace(quiet(), interrupted=True))
    assert told.startswith("interrupted: texts are missing")
    (told,) = summary.warnings_of(replace(quiet(), interrupted=True), 7)
    assert told.startswith("interrupted: 7 of 25 texts are missing")


def test_an_uncertain_speedup_is_reported() -> None:
    chance = random.Random(3)
    wide = {key: rate * math.exp(chance.gauss(0, 0.05)) for key, rate in rates(10).items()}
    (told,) = summary.warnings_of(two(rates(10), wide))
    assert "not shown to be faster than plain: draft 3" in told
    few = two({("a", 0): 10, ("b", 0): 10}, {("a", 0): 20, ("b", 0): 21})
    (told,) = summary.warnings_of(few)
    assert "too few texts" in told


def test_texts_that_differ_from_plain_are_reported() -> None:
    results = quiet()
    results.measurements = [
        replace(each, tokens=[1, 2 + (each.contender != "plain" and each.prompt == "a")])
        for each in results.measurements
    ]
    (told,) = summary.warnings_of(results)
    assert told.startswith("draft 3 differs from plain in 3 of 9 texts")
    results.divergences = [FirstDifference("draft 3", "a", 1, 0.01, 0.02)]
    assert "near-tie" in summary.warnings_of(results)[0]
    for rounding in (0.02, None):
        results.divergences.append(FirstDifference("draft 3", "b", 1, 2.0, rounding))
        assert "ggufspec audit" in summary.warnings_of(results)[0]
        results.divergences.pop()
    warm = [
        replace(each, options={**each.options, "temperature": 0.7}) for each in results.contenders
    ]
    assert summary.warnings_of(replace(results, contenders=warm)) == []  # drawn by chance


# Tables


def test_categories_have_a_geometric_mean() -> None:
    results = two({("a", 0): 10, ("b", 0): 10}, {("a", 0): 20, ("b", 0): 80})
    assert tables.by_category(results) is None
    results.measurements = [replace(t, category=f"of {t.prompt}") for t in results.measurements]
    found = tables.by_category(results)
    assert list(found.columns) == ["", "of a", "of b", "geometric mean"]
    assert found.rows == [["draft 3", "2.00", "8.00", "4.00"]]


def test_positions_are_shown_as_far_as_each_contender_went() -> None:
    found = tables.positions(BenchResults.of_document(measured.document(), "it"))
    by_name = {row[0]: row[1:] for row in found.rows}
    assert "plain" not in by_name
    assert by_name["draft 2"][2:] == [""] * (len(found.columns) - 3)
    assert tables.positions(quiet()) is None


def test_odd_names_stay_in_their_cells() -> None:
    name = 'a|b,"c"\nd'
    whole = tables.overview(two(rates(10), rates(15), name=name))
    lines = tables.to_markdown(whole).splitlines()
    assert len(lines) == 4
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(whole.columns) + 1}
    assert 'a\\|b,"c" d' in lines[-1]
