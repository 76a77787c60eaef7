"""Comparing two benchmarks: changes, and other possible causes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import measured
import pytest
from measured import two

from ggufspec.bench.difference import changes, compare
from ggufspec.bench.records import BenchResults

KEYS = [(prompt, run) for run in range(2) for prompt in "abc"]


def session(plain: float, ours: float, *, seed: int = 0, spread: float = 0.01) -> BenchResults:
    """A session: rates of plain and of a draft, behind prompts of which each has its own."""
    chance = random.Random(seed)

    def rates(rate: float) -> dict[tuple[str, int], float]:
        found = {}
        for prompt, run in KEYS:
            of_prompt = 1 + "abc".index(prompt)
            found[prompt, run] = rate * of_prompt * math.exp(chance.gauss(0, spread))
        return found

    return two(rates(plain), rates(ours))


def verdicts(before: BenchResults, after: BenchResults) -> dict[str, str]:
    return {row[0]: row[-1] for row in compare(before, after).rows}


@pytest.mark.parametrize(("ours", "verdict"), [(18, "faster"), (12, "slower")])
def test_a_change_is_reported(ours: float, verdict: str) -> None:
    found = verdicts(session(10, 15), session(10, ours, seed=1))
    assert found == {"plain": "no difference shown", "draft 3": verdict}


def test_a_faster_machine_does_not_change_the_verdict() -> None:
    table = compare(session(10, 15), session(7, 10.5, seed=1))
    assert {row[0]: row[-1] for row in table.rows} == {
        "plain": "slower",
        "draft 3": "no difference shown",
    }
    (plain, ours) = changes(session(10, 15), session(7, 10.5, seed=1))
    assert plain.relative is None
    assert (ours.ratio.ratio, ours.relative.ratio) == pytest.approx((0.7, 1.0), rel=0.02)
    assert any("plain itself is 0.70 times as fast" in note for note in table.notes)


def test_texts_are_paired_by_prompt_and_run() -> None:
    before, after = session(10, 15), session(10, 15)
    after.measurements = [each for each in after.measurements if each.prompt != "c"]
    (plain, ours) = changes(before, after)
    for change in (plain.ratio, ours.ratio, ours.relative):
        assert change.n == 4
        assert change.ratio == pytest.approx(1)
    assert any("ratios use the 4 texts in both" in note for note in compare(before, after).notes)


def test_too_few_texts_or_none_in_common_are_reported() -> None:
    one = two({("a", 0): 10}, {("a", 0): 15})
    assert set(verdicts(one, one).values()) == {"too few texts"}
    other = two({("z", 0): 10}, {("z", 0): 15})
    assert set(verdicts(one, other).values()) == {"no text in common"}
    nothing = two({("a", 0): 10}, {("a", 0): 15}, n_generated=0)
    assert verdicts(one, nothing)["draft 3"] == "no text in common"
    assert verdicts(one, BenchResults({}, [])) == {}


def test_other_differences_are_reported() -> None:
    before = measured.lively((3, 8), seed=1)
    after = measured.lively((3, "auto"), seed=2)
    before.machine = {"processor": "slow", "gpus": [], "memory": {"total": 8}}
    after.machine = {"processor": "fast", "gpus": [], "memory": {"total": 16}}
    after.versions, after.interrupted = {"ggufspec": "0.2.0", "numpy": "2"}, True
    after.contenders = [
        replace(each, options={**each.options, "top_k": 5}) if each.name == "draft 3" else each
        for each in after.contenders
    ]
    told = "\n".join(compare(before, after).notes)
    for expected in (
        "only before: draft 8",
        "only after: draft auto",
        'machine differ: processor was "slow", is "fast"; memory.total was 8, is 16',
        'versions differ: ggufspec was "0.1.0", is "0.2.0"; numpy was not given, is "2"',
        "options of draft 3 differ: top_k was not given, is 5",
        "after: interrupted",
    ):
        assert expected in told
    assert "models differ" not in told
    assert "gpus" not in told
