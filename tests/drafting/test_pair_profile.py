"""What one text teaches the next, one process the other, and what a seed begins from."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

import ggufspec
from ggufspec.decoding.types import Round
from ggufspec.drafting import constants, profile_store
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import Action
from ggufspec.drafting.pair_profile import PairProfile, StoredProfile

PROMPT = "once upon a time"
SAMPLED = {"temperature": 1.0, "max_tokens": 40}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    target = tiny.write_llama(tmp_path / "target.gguf")
    return target, tiny.write_llama(tmp_path / "draft.gguf", perturb=0.1)


GOOD: dict[str, dict[str, object]] = {
    "costs": {"target_seconds": {"1": 1.0}, "draft_seconds": 0.1, "draft_read_seconds": 0.1},
    "acceptance": {"0.8": [0.5, 0.5]},
}


def documents() -> list[dict[str, object]]:
    return [record.document for record in profile_store.records() if "costs" in record.document]


def write(paths: tuple[Path, Path], **options: object) -> str:
    with ggufspec.load(*paths, n_ctx=512, n_threads=1) as engine:
        return engine.generate(PROMPT, **{**SAMPLED, **options}).text  # type: ignore[arg-type]


def test_the_next_process_knows_what_passes_cost(paths: tuple[Path, Path]) -> None:
    write(paths, temperature=0, max_tokens=200)
    (first,) = documents()
    assert set(first["costs"]["target_seconds"]) > {"1"}  # type: ignore[index]
    write(paths, temperature=0, max_tokens=200)
    (second,) = documents()
    assert second["costs"] != first["costs"]  # other texts begin from the last measurements
    write(paths, seed=1)
    (third,) = documents()
    write(paths, temperature=0, max_tokens=200)
    (fourth,) = documents()
    assert fourth["settled_costs"] == third["settled_costs"]  # what a seed begins from stays


def test_the_engine_says_where_nothing_can_be_stored(
    paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ggufspec.load(*paths, n_ctx=512, n_threads=1) as engine:
        assert not any("cannot be stored" in note for note in engine.notes)
    (tmp_path / "file").touch()
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path / "file"))
    with ggufspec.load(*paths, n_ctx=512, n_threads=1) as engine:
        assert any("cannot be stored" in note for note in engine.notes)


def test_texts_with_a_seed_do_not_begin_from_what_one_text_happened_to_measure(
    paths: tuple[Path, Path],
) -> None:
    write(paths, max_tokens=16)
    (first,) = documents()
    assert "settled_costs" not in first
    write(paths, seed=1)
    (second,) = documents()
    assert {"1", "2", "3", "4", "8"} <= set(second["settled_costs"]["target_seconds"])  # type: ignore[index]


def test_a_seed_repeats_a_text_from_the_first_time_on(paths: tuple[Path, Path]) -> None:
    texts = {write(paths, seed=7) for _ in range(3)}
    assert len(texts) == 1
    write(paths)  # what this one learns changes nothing
    assert {write(paths, seed=7)} == texts
    assert {write(paths, seed=8)} != texts


def measured(n_most: int) -> CostModel:
    costs = CostModel(n_most)
    for n in range(1, n_most + 1):
        costs.observe_target(n, 1.0 + 0.01 * n)
    costs.observe_draft(1, 0.001)
    return costs


@pytest.mark.parametrize("repeats", [False, True])
def test_calibration_keeps_the_sizes_of_longer_and_shared_passes(repeats: bool) -> None:
    """Measurements of up to 17 tokens, in a profile of 33 tokens and 4 texts."""
    profile = PairProfile(CostModel(33, n_sharers=4))
    profile.settle(measured(17))
    policy = profile.policy(0.0, repeats=repeats, in_blocks=True)
    costs = policy.costs
    assert (costs.n_most, costs.n_sharers) == (33, 4)
    assert len(costs.curve) == 132
    assert costs.curve[99] > costs.curve[16]
    assert len(costs.per_text(4)) == 33
    assert costs.n_measured(17) == 1
    if not repeats:
        costs.observe_target(100, 7.0)
        assert costs.n_measured(100) == 1


def test_disturbed_costs_serve_this_engine_and_are_not_stored() -> None:
    stored = StoredProfile({"about": "a test", "id": 5})
    profile = stored.profile(17)
    profile.settle(measured(17), is_disturbed=True)
    assert profile.policy(0.0, repeats=True, in_blocks=True).costs.n_measured(17) == 1
    assert not profile.costs.n_measured(1), "texts without a seed do not start from them"
    copied = PairProfile.of_document(profile.to_document(), CostModel(17))  # of another process
    assert not copied.costs.n_measured(1)
    for _ in range(constants.N_PASSES_TO_REMEMBER):
        for each in (profile, copied):
            each.costs.observe_target(1, 0.5)
    for each in (profile, copied):
        assert each.is_settled
        stored.remember(each)
        found = stored.recall(17)
        assert found is not None
        assert not found.is_settled


def test_disturbed_costs_are_not_stored_where_all_passes_had_fewer_threads() -> None:
    stored = StoredProfile({"about": "a test", "id": 6})
    profile = stored.profile(17)
    profile.settle(measured(17), is_disturbed=True)
    profile.costs.use(1)
    for _ in range(constants.N_PASSES_TO_REMEMBER):
        profile.costs.observe_target(1, 0.5)
    assert profile.is_new
    stored.remember(profile)
    assert stored.recall(17) is None


def test_a_text_with_a_seed_drafts_beyond_what_calibration_measured() -> None:
    profile = PairProfile(CostModel(33))
    profile.settle(measured(17))
    policy = profile.policy(0.0, repeats=True, in_blocks=True)
    policy.observe_gaps([20.0] * 64)
    policy.start_round(32, 1)
    while policy.should_evaluate():
        policy.should_draw(20.0)
    assert policy.n_drawn > 17


def test_nothing_is_remembered_where_that_is_not_wanted(paths: tuple[Path, Path]) -> None:
    with ggufspec.load(*paths, n_ctx=512, n_threads=1, tuned=False) as engine:
        engine.generate(PROMPT, temperature=0, max_tokens=60)
    assert documents() == []


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"costs": 3},
        {"costs": {"target_seconds": {"1": 1.0}}},
        {"costs": {}, "acceptance": {}},
        {"acceptance": {"0.0": [0.1, 0.2]}},
        {**GOOD, "settled_costs": 3},
        {**GOOD, "acceptance": {"0.8": 0.5}},
        {**GOOD, "acceptance": {"0.8": [0.5]}},
        {**GOOD, "acceptance": {"0.8": [[0.5, 0.5], [0.5, 0.5]]}},
        {**GOOD, "acceptance": {"0.8": [None, 1]}},
        {**GOOD, "acceptance": {"0.8": [0, -1]}},
        {**GOOD, "acceptance": {"0.8": [1e9, 1]}},
        {"costs": {**GOOD["costs"], "target_seconds": {"1": 10**400}}},
        {"costs": {**GOOD["costs"], "target_seconds": {"1": 1e308}}},
        {"costs": {**GOOD["costs"], "target_seconds": {"1": True}}},
        {"costs": {**GOOD["costs"], "target_seconds": {"1": 1.0, "-5": 1.0}}},
        {"costs": {**GOOD["costs"], "target_seconds": {"1": 1.0, "8": 40.0}}},
        {**GOOD, "settled_costs": {**GOOD["costs"], "target_seconds": {"1": 9e5, "8": 1e-9}}},
    ],
    ids=str,
)
def test_a_record_that_is_none_is_not_known(document: dict[str, object]) -> None:
    facts = {"pair": "a"}
    profile_store.remember(facts, document)
    assert StoredProfile(facts).recall(8) is None
    profile = PairProfile(CostModel(8))
    measured = CostModel(8)
    measured.observe_target(1, 1.0)
    profile.settle(measured)
    StoredProfile(facts).remember(profile)  # and is no obstacle
    assert StoredProfile(facts).recall(8) is not None


def test_an_engine_for_short_drafts_keeps_what_longer_ones_cost() -> None:
    facts = {"pair": "c"}
    seconds = {"1": 1.0, "4": 1.5, "16": 3.0}
    costs = {**GOOD["costs"], "target_seconds": seconds}
    profile_store.remember(facts, {"costs": costs, "settled_costs": costs})
    known = StoredProfile(facts).recall(4)
    assert known is not None
    measured = CostModel(4)
    measured.observe_target(1, 9.0)
    known.settle(measured)
    StoredProfile(facts).remember(known)
    (document,) = [record.document for record in profile_store.records() if record.facts == facts]
    assert document["settled_costs"]["target_seconds"] == seconds


def test_a_draft_that_was_hopeless_in_one_text_is_tried_again_in_the_next() -> None:
    costs = CostModel(8)
    for n in (1, 1, 2, 3, 4, 5, 6, 7, 8):
        costs.observe_target(n, 0.5 + 0.5 * n)
    profile = PairProfile(costs)
    hopeless = profile.policy(0.0, repeats=False, in_blocks=True)
    for _ in range(200):
        hopeless.start_round(7, 1)
        hopeless.should_draw(8.0)
        hopeless.observe_gaps([8.0])
        hopeless.observe_verdict(0, [0.0])
    profile.keep(hopeless, 0.0)
    policy = profile.policy(0.0, repeats=False, in_blocks=True)
    tries = []
    for _ in range(200):
        tries.append(policy.start_round(7, 1) is Action.DRAFT)
        policy.observe_gaps([8.0])
        policy.observe_round(Round([1], 0, 0, 0.0, 1.0, 0.0))
    assert not tries[0]
    assert tries[-1]


def test_what_a_text_teaches_reaches_the_next_text_and_process_but_no_seed() -> None:
    profile = PairProfile(measured(8))
    before = profile.policy(0.0, repeats=False, in_blocks=True).acceptance.coefficients
    for repeats in (False, True):
        policy = profile.policy(0.0, repeats=repeats, in_blocks=True)
        for _ in range(50):
            policy.start_round(7, 1)
            policy.should_draw(2.0)
            policy.observe_verdict(0, [1.0 if repeats else 0.0])
        profile.keep(policy, 0.0)
    again = PairProfile.of_document(profile.to_document(), CostModel(8))
    for known in (profile, again):
        learned = known.policy(0.0, repeats=False, in_blocks=True).acceptance
        assert learned.coefficients[0] < before[0]
        seeded = known.policy(0.0, repeats=True, in_blocks=True).acceptance
        assert seeded.coefficients == before
