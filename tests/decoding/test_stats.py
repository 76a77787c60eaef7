"""Rounds add up."""

from __future__ import annotations

import pytest

from ggufspec.bench.report import speedups, summarize_runs
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
        decode_seconds=2.0,
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


def test_nothing_generated_divides_by_nothing() -> None:
    found = stats([], seconds=0.0)
    assert (found.tokens_per_second, found.acceptance, found.mean_length, found.overhead) == (
        0,
        0,
        0,
        0,
    )


def test_a_row_tells_medians_and_the_spread() -> None:
    plain = [stats([round_(0, 0)] * 4, seconds) for seconds in (4.0, 16.0, 8.0)]
    fast = [stats([round_(3, 3)] * 2, seconds) for seconds in (4.0, 4.0, 2.0)]
    row = summarize_runs("plain", plain)
    assert (row.tokens_per_second, row.tokens_per_second_spread) == (0.5, (0.25, 1.0))
    assert row.accepted is None
    assert summarize_runs("speculative", fast).accepted == 1.0
    assert speedups(plain, fast) == [2.0, 8.0, 8.0]
