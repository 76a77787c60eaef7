"""The cost of passes is learned from measurements, and interpolated between them."""

from __future__ import annotations

import json

import pytest

from ggufspec.drafting import cost_model
from ggufspec.drafting.cost_model import CostModel, Start


def costs_of(**known: float) -> CostModel:
    costs = CostModel(8)
    for name, seconds in known.items():
        costs.observe_target(int(name[1:]), seconds)
    return costs


def test_sizes_between_known_ones_lie_on_a_line() -> None:
    assert list(costs_of(n1=1.0, n4=2.5).curve) == pytest.approx(
        [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    )


def test_an_old_measurement_is_discounted() -> None:
    costs = CostModel(4)
    costs.observe_target(1, 1.0)
    for _ in range(3):
        costs.observe_target(4, 3.0)
    for _ in range(80):
        costs.observe_target(1, 1.0)
    assert 0.9 * 3.0 < costs.curve[3] < 0.98 * 3.0
    for _ in range(1000):
        costs.observe_target(1, 1.0)
    assert costs.curve[3] > 0.85 * 3.0, "but not without end"
    costs.observe_target(4, 3.0)
    assert costs.curve[3] == pytest.approx(3.0)


def test_a_size_measured_often_is_discounted_more_slowly() -> None:
    costs = CostModel(4)
    for n, size in ((3, 2), (12, 3)):
        for _ in range(n):
            costs.observe_target(size, 3.0)
    for _ in range(80):
        costs.observe_target(1, 1.0)
    doubts = [1 - costs.curve[size - 1] / 3.0 for size in (2, 3)]
    assert 0.15 * doubts[0] < doubts[1] < 0.3 * doubts[0]


def test_no_pass_takes_longer_than_as_many_passes_over_one_token() -> None:
    costs = costs_of(n1=0.01, n2=1.1, n3=0.03)
    assert costs.curve[1] == pytest.approx(0.02)
    costs.observe_target(2, 0.015)
    assert costs.curve[1] == pytest.approx(0.015)


def test_shared_passes_are_measured_beyond_what_one_text_may_draft() -> None:
    costs = CostModel(4, n_sharers=3)
    for n, seconds in ((1, 1.0), (4, 2.0), (12, 3.0)):
        costs.observe_target(n, seconds)
    costs.observe_target(13, 99.0)
    assert list(costs.per_text(1)) == pytest.approx([1.0, 4 / 3, 5 / 3, 2.0])
    assert costs.per_text(3)[0] == pytest.approx(5 / 9), "a third of a pass over three"
    assert costs.per_text(3)[3] == pytest.approx(5 / 9 + 2.25 - 5 / 3), "beside two of one token"
    assert costs.per_text(2)[1] == pytest.approx(1.0), "half a pass over four"
    flat = CostModel(2, n_sharers=4)
    for n, seconds in ((1, 1.0), (5, 1.0), (8, 2.0)):
        flat.observe_target(n, seconds)
    assert flat.per_text(4)[1] == pytest.approx(0.5), "a quarter of a pass over eight"
    known = cost_model.of_document(cost_model.to_document(costs)).resized(4, 3)
    assert known.per_text(3) == pytest.approx(costs.per_text(3))
    assert cost_model.of_document(cost_model.to_document(costs)).resized(4).n_measured(12) == 0


def test_a_slow_first_pass_is_replaced_at_once() -> None:
    costs = costs_of(n1=600.0)
    costs.observe_target(1, 1.0)
    assert costs.curve[0] == 1.0


def test_one_disturbed_pass_changes_little() -> None:
    costs = costs_of(n1=1.0)
    for seconds in (1.0, 1.0, 50.0):
        costs.observe_target(1, seconds)
    assert costs.curve[0] < 1.1


def test_costs_follow_a_machine_that_becomes_slower() -> None:
    costs = costs_of(n1=1.0, n4=2.0)
    for _ in range(60):
        costs.observe_target(1, 1.5)
        costs.observe_target(4, 3.0)
    assert costs.curve[0] == pytest.approx(1.5, rel=0.05)
    assert costs.curve[3] == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_invalid_seconds_are_ignored(seconds: float) -> None:
    costs = costs_of(n1=1.0)
    costs.observe_target(1, seconds)
    costs.observe_draft(1, seconds)
    assert (costs.curve[0], costs.n_measured(1)) == (1.0, 1)
    assert costs.step < 1.0


def test_frozen_costs_do_not_change_and_copies_are_independent() -> None:
    costs = costs_of(n1=1.0)
    costs.is_frozen = True
    costs.observe_target(1, 0.5)
    assert costs.curve[0] == 1.0
    copy = costs.resized(8)
    copy.observe_target(1, 0.5)
    assert (costs.curve[0], copy.curve[0]) == (1.0, 0.5)


def test_each_number_of_threads_has_costs_of_its_own() -> None:
    costs = costs_of(n1=1.0, n4=1.5)
    costs.use(1)
    assert costs.sizes == pytest.approx({1: 1.0, 4: 1.5}), "they start from those before"
    for _ in range(200):
        costs.observe_target(1, 1.3)
        costs.observe_target(4, 4.0)
    assert costs.curve[3] > 2.5 * costs.curve[0]
    costs.use(0)
    assert costs.sizes == pytest.approx({1: 1.0, 4: 1.5})
    costs.use(1)
    assert costs.curve[3] > 2.5 * costs.curve[0]


def test_disturbed_passes_are_not_learned() -> None:
    costs = costs_of(n1=1.0)
    costs.use(0, is_disturbed=True)
    costs.observe_target(1, 9.0)
    costs.observe_target(4, 9.0)
    costs.observe_plain(9.0)
    costs.observe_draft(1, 9.0)
    assert costs.sizes == {1: 1.0}
    assert (costs.plain, costs.knows_draft) == (1.0, False)
    costs.use(0)
    costs.observe_target(4, 2.0)
    assert costs.sizes == {1: 1.0, 4: 2.0}


def test_tokens_that_a_first_step_reads_do_not_count_as_steps() -> None:
    costs = costs_of(n1=1.0)
    for _ in range(10):
        costs.observe_draft(3, 0.33, n_further=1)  # steps of 0.1, and 0.03 for a token to read
        costs.observe_draft(3, 0.30)
        costs.observe_draft(1, 0.40, n_further=10)
    assert costs.step == pytest.approx(0.1, rel=0.02)
    assert costs.read == pytest.approx(0.03, rel=0.1)


def test_a_long_reading_outweighs_short_ones_that_seemed_free() -> None:
    """What is read behind a complete draft is lost in the noise of its steps."""
    costs = CostModel(4)
    costs.observe_target(1, 1.0)
    costs.observe_draft(4, 0.4)
    costs.observe_draft(4, 0.42, n_further=1)
    for _ in range(300):
        costs.observe_draft(4, 0.4, n_further=1)
    costs = cost_model.of_document(json.loads(json.dumps(cost_model.to_document(costs)))).resized(4)
    assert costs.read < 0.001
    costs.observe_draft(1, 0.1 + 30 * 0.02, n_further=30)
    assert costs.read == pytest.approx(0.02, rel=0.05)


def test_what_is_known_of_a_draft_is_doubted_once_it_is_old() -> None:
    """So a draft that was too slow is tried again; also where that is known from a document."""
    costs = costs_of(n1=1.0, n4=4.0)
    costs.observe_draft(1, 0.5)
    for known in (costs, cost_model.of_document(cost_model.to_document(costs)).resized(8)):
        four = known.curve[3]
        for _ in range(2000):
            known.observe_target(1, 1.0)
        assert 0.3 < known.step < 0.45
        assert known.curve[3] < four
        assert known.curve[0] == pytest.approx(1.0)


def test_a_document_restores_the_costs() -> None:
    costs = costs_of(n1=1.0, n4=1.5)
    costs.observe_draft(4, 0.4)
    costs.observe_draft(1, 0.28, n_further=9)
    again = cost_model.of_document(json.loads(json.dumps(cost_model.to_document(costs)))).resized(8)
    assert list(again.curve) == list(costs.curve)
    assert (again.step, again.read) == pytest.approx((0.1, 0.02))
    assert len(cost_model.of_document(cost_model.to_document(costs)).resized(2).curve) == 2


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"target_seconds": []},
        {"target_seconds": {"2": 1.0}},
        {"target_seconds": {"1": "fast"}, "draft_seconds": 0, "draft_read_seconds": 0},
        {"target_seconds": {"one": 1.0}, "draft_seconds": 0, "draft_read_seconds": 0},
        {"target_seconds": {"1": 1.0}, "draft_seconds": None, "draft_read_seconds": 0},
        {"target_seconds": {"1": 1.0}, "draft_seconds": float("nan"), "draft_read_seconds": 0},
    ],
    ids=str,
)
def test_an_invalid_document_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        cost_model.of_document(document).resized(8)


def on_a_device(*target: float, step: float = 0.1, read: float = 0.01) -> CostModel:
    """Costs that start from such predicted seconds, after a first pass over a token."""
    costs = CostModel(len(target), start=Start(target, step, read))
    costs.observe_target(1, 60.0)
    return costs


def test_the_first_pass_of_each_size_on_a_device_is_not_measured() -> None:
    """For it, the device's program is compiled, or loaded."""
    costs = on_a_device(1.0, 1.1, 1.2, 1.3)
    assert costs.n_measured(1) == 0
    costs.observe_target(1, 2.0)
    costs.observe_target(3, 100.0)
    assert list(costs.curve) == pytest.approx([2.0, 2.2, 2.4, 2.6])
    costs.observe_target(3, 3.0)
    assert costs.curve[2] == pytest.approx(3.0)
    costs.observe_draft(1, 70.0)
    assert not costs.knows_draft
    costs.observe_draft(1, 0.3)
    assert costs.step == pytest.approx(0.3)
    again = cost_model.of_document(cost_model.to_document(costs)).resized_as(costs)
    again.observe_target(1, 90.0)
    again.observe_draft(1, 90.0)
    assert (again.curve[0], again.step) == pytest.approx((2.0, 0.3)), "in each process"
    costs.resized(4).observe_target(1, 90.0)
    assert costs.curve[0] == pytest.approx(2.0)


def test_what_is_not_measured_has_the_predicted_proportions() -> None:
    predicted = (1.0, 1.1, 1.2, 1.3, 1.4, 2.0, 2.1, 2.2)
    costs = on_a_device(*predicted, step=0.05, read=0.01)
    costs.observe_target(1, 0.01)
    assert list(costs.curve) == pytest.approx([0.01 * each for each in predicted])
    assert (costs.step, costs.read) == pytest.approx((0.0005, 0.0001))
    costs.observe_target(3, 99.0)
    costs.observe_target(3, 0.014)
    assert list(costs.curve[:4]) == pytest.approx([0.01, 0.012, 0.014, 0.016])
    assert list(costs.curve[4:]) == pytest.approx([0.018, 0.03, 0.032, 0.034])
    for size in (8, 8):
        costs.observe_target(size, 0.024)
    assert list(costs.curve[4:7]) == pytest.approx([0.016, 0.022, 0.023])


def test_nothing_is_predicted_to_be_slower_than_on_a_processor() -> None:
    """It would never be tried."""
    usual, predicted = CostModel(8), on_a_device(*[9.0**n for n in range(8)], step=50.0)
    for costs in (usual, predicted):
        costs.observe_target(1, 0.01)
    assert list(predicted.curve) == pytest.approx(list(usual.curve))
    assert predicted.step == pytest.approx(usual.step)


def test_a_device_may_take_no_longer_for_more_tokens() -> None:
    costs = on_a_device(*[1.0] * 20, *[0.5] * 20)
    costs.observe_target(1, 1.0)
    assert max(costs.curve) < 1.2
    for size in (40, 40):
        costs.observe_target(size, 2.0)
    assert costs.curve[39] == pytest.approx(2.0)
    assert list(costs.curve) == sorted(costs.curve)


def test_a_guessed_step_is_replaced_by_the_first_that_is_measured() -> None:
    guessed = Start([1.0, 1.2, 1.4], 0.08, 0.08, is_measured=True, guesses_step=True)
    costs = CostModel(3, start=guessed)
    costs.observe_target(1, 1.0)
    assert not costs.knows_draft
    costs.observe_draft(1, 0.7)
    assert costs.knows_draft
    assert costs.step == pytest.approx(0.7)
    known = CostModel(3, start=guessed._replace(guesses_step=False))
    known.observe_target(1, 1.0)
    known.observe_draft(1, 0.7)
    assert known.step < 0.3, "which may be disturbed"


def test_a_block_takes_the_time_of_its_pass_with_a_few_tokens_that_are_read_before_it() -> None:
    costs = CostModel(9, n_per_step=8)
    costs.observe_target(1, 1.0)
    for n_further in (0, 10, 20, 5):
        costs.observe_draft(1, 0.7, n_further)
    assert costs.step == pytest.approx(0.7, rel=0.15)
    costs.observe_draft(1, 1.7, 1000)
    assert costs.read == pytest.approx(0.001, rel=0.2)
