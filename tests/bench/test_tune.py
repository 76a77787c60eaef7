"""Speed-ups by costs and acceptance; which settings are tried and chosen."""

from __future__ import annotations

import pytest

from ggufspec.bench import tune
from ggufspec.drafting.cost_model import CostModel


def costs(*seconds: float, step: float) -> CostModel:
    made = CostModel(len(seconds))
    for i, each in enumerate(seconds):
        made.observe_target(i + 1, each)
    made.observe_draft(1, step)
    return made


STAIRS = costs(1.0, 1.4, 1.9, 1.4, 3.0, step=0.1)


@pytest.mark.parametrize(
    ("chance", "n_draft", "expected"),
    [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 2, 1.75), (0.8, 0, 1.0)],
)
def test_where_passes_cost_the_same_the_speedup_is_by_expected_tokens(
    chance: float, n_draft: int, expected: float
) -> None:
    flat = costs(1.0, 1.0, 1.0, 1.0, 1.0, step=0.1)
    assert tune.speedup(flat, chance, n_draft) * (1 + 0.1 * n_draft) == pytest.approx(expected)


def test_a_speedup_is_tokens_over_seconds() -> None:
    assert tune.speedup(STAIRS, 1.0, 3) == pytest.approx(4 / (1.4 + 0.3))
    assert tune.speedup(STAIRS, 0.5, 1) == pytest.approx(1.5 / (1.4 + 0.1))
    assert tune.speedup(STAIRS, 0.7, 0) == 1.0


def test_the_best_length_is_where_a_stair_is_low() -> None:
    assert tune.best_length(STAIRS, 0.9) == (3, pytest.approx(3.439 / 1.7))
    assert tune.best_length(STAIRS, 0.1) == (0, 1.0)
    assert tune.best_length(costs(1.0, step=0.1), 0.9) == (0, 1.0)


def test_the_break_even_acceptance_has_a_speedup_of_one() -> None:
    for n_draft in (1, 2, 3, 4):
        needed = tune.break_even_acceptance(STAIRS, n_draft)
        assert needed is not None
        assert tune.speedup(STAIRS, needed, n_draft) == pytest.approx(1.0, abs=1e-3)
    assert tune.break_even_acceptance(costs(1.0, 1.9, step=0.2), 1) is None


@pytest.mark.parametrize(
    ("usual", "n_most", "ladders"),
    [
        (6, 12, [[6, 3, 1], [6, 12]]),
        (1, 6, [[1], [1, 2, 4, 6]]),
        (4, 2, [[4, 2, 1], [4]]),
    ],
)
def test_threads_go_down_by_halves_and_up_to_the_most(
    usual: int, n_most: int, ladders: list[list[int]]
) -> None:
    assert tune.thread_ladders(usual, n_most) == ladders


@pytest.mark.parametrize(
    ("usual", "n_tokens", "ladders"),
    [
        (512, 8192, [[256, 128, 64, 32], [1024, 2048]]),
        (100, 300, [[50], [200]]),
    ],
)
def test_batches_go_down_by_halves_and_up_by_doubles(
    usual: int, n_tokens: int, ladders: list[list[int]]
) -> None:
    assert tune.batch_ladders(usual, n_tokens) == ladders


def test_what_is_hardly_faster_than_the_usual_is_not_chosen() -> None:
    assert tune.choose({2: 1.0, 4: 0.98}, 2) == 2
    assert tune.choose({2: 1.0, 4: 0.9}, 2) == 4
