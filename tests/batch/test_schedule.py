"""Who is next, what is tried again, and how records come into order: without a process."""

from __future__ import annotations

from ggufspec.batch.order import InOrder
from ggufspec.batch.schedule import Schedule
from ggufspec.batch.settings import as_json, differences, prompt_seed
from ggufspec.batch.totals import totals


def test_prompts_go_out_in_order_and_it_is_over_when_all_are_back() -> None:
    schedule = Schedule([3, 5], n_retries=0)
    assert [schedule.take(), schedule.take()] == [(3, 1), (5, 1)]
    assert not schedule.has_next
    schedule.finish(5)
    assert not schedule.is_over
    schedule.finish(3)
    assert schedule.is_over


def test_one_that_comes_back_is_the_next_until_its_attempts_are_used_up() -> None:
    schedule = Schedule([0, 1], n_retries=2)
    schedule.take()
    assert schedule.give_back(0)
    assert schedule.take() == (0, 2)
    assert schedule.give_back(0)
    assert schedule.take() == (0, 3)
    assert not schedule.give_back(0)
    schedule.finish(0)
    assert schedule.take() == (1, 1)


def test_without_retries_the_first_death_is_the_last() -> None:
    schedule = Schedule([0], n_retries=0)
    schedule.take()
    assert not schedule.give_back(0)


def test_what_is_early_waits() -> None:
    order: InOrder[str] = InOrder([0, 1, 4])
    assert list(order.push(4, "e")) == []
    assert list(order.push(0, "a")) == ["a"]
    assert list(order.push(1, "b")) == ["b", "e"]


def test_seeds_are_the_texts_own() -> None:
    seeds = [prompt_seed(s, i, t) for s in range(3) for i in range(20) for t in range(2)]
    assert len(set(seeds)) == len(seeds)
    assert prompt_seed(1, 2) == prompt_seed(1, 2, 0) == 1809754618


def test_differences_are_told_by_name() -> None:
    before = {"seed": 1, "gone": None, "old": 2, "same": {"a": 1}}
    assert differences(before, {"seed": 2, "same": {"a": 1}, "new": "x" * 99}) == [
        "seed was 1, is 2",
        f'new was null, is "{"x" * 56}...',
        "old was 2, is null",
    ]


def test_settings_are_what_json_reads_back() -> None:
    assert as_json({"a": (1, float("-inf")), 5: 0.5}) == {"a": [1, "-inf"], "5": 0.5}


def test_totals() -> None:
    counts = {"n_generated": 6, "n_rounds": 2, "n_drafted": 8, "n_accepted": 4}
    found = totals([{"error": None, "attempts": 2, **counts}, {"error": "no"}])
    assert (found.n_prompts, found.n_failed, found.n_retried, found.n_generated) == (2, 1, 1, 6)
    assert (found.acceptance, found.mean_length) == (0.5, 3.0)
    assert totals([]).acceptance == totals([]).mean_length == 0
