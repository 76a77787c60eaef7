"""Rounds add up."""

from __future__ import annotations

import pytest

from ggufspec.decoding.stats import Stats, summarize
from ggufspec.decoding.types import Round


def round_(n_drafted: int, n_accepted: int) -> Round:
    return Round([0] * (n_accepted + 1), n_drafted, n_accepted, 0.25, 0.5, 0.125)


def stats(rounds: list[Round], seconds: float = 4.0) -> Stats:
    return summarize(
        rounds,
        n_prompt=5,
        n_prompt_reused=2,
        n_generated=sum(len(round_.tokens) for round_ in rounds),
        prompt_seconds=1.0,
        generation_seconds=seconds,
        threads={"target": {2: 1.5}, "draft": {1: 0.5}},
    )


def test_counts_and_seconds_add_up() -> None:
    found = stats([round_(3, 3), round_(3, 0), round_(1, 1), round_(0, 0)])
    assert (found.n_rounds, found.n_generated, found.n_drafted, found.n_accepted) == (4, 8, 7, 4)
    assert found.drafted_by_position == (3, 2, 2)
    assert found.accepted_by_position == (2, 1, 1)
    seconds = found.seconds
    assert (seconds.draft, seconds.target, seconds.verify, seconds.other) == (1.0, 2.0, 0.5, 0.5)
    assert seconds.generation == pytest.approx(4.0)
    assert found.tokens_per_second == pytest.approx(2.0)
    assert found.acceptance == pytest.approx(4 / 7)
    assert found.mean_length == 2.0
    assert found.overhead == pytest.approx(0.5)


def test_a_shared_pass_counts_in_part() -> None:
    found = stats([round_(1, 1), round_(1, 1)._replace(n_sharers=4)]).seconds
    assert found.target == pytest.approx(0.5 + 0.125)
    assert found.own == pytest.approx(0.5 + 0.625 + 0.25)


def test_a_tree_is_counted_by_its_nodes_and_by_its_depth() -> None:
    tree = round_(6, 2)._replace(parents=(-1, 0, 1, 0, -1, -1))
    found = stats([tree, round_(1, 1), round_(0, 0)])
    assert (found.n_drafted, found.n_accepted, found.mean_depth) == (7, 3, 2.0)
    assert found.acceptance == pytest.approx(3 / 7)
    assert found.drafted_by_position == (2, 1, 1)
    assert found.accepted_by_position == (2, 1, 0)


def test_nothing_generated_divides_by_nothing() -> None:
    found = stats([], seconds=0.0)
    names = ("tokens_per_second", "acceptance", "mean_length", "mean_depth", "overhead")
    assert [getattr(found, name) for name in names] == [0] * len(names)
