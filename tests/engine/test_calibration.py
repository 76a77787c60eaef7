"""What passes cost is measured once, before the first text with a seed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import head_pairs
import pytest
import tiny

import ggufspec
from ggufspec.drafting import profile_store
from ggufspec.engine import calibration
from ggufspec.engine.engine import Engine
from ggufspec.llama import cpu_use
from ggufspec.llama.cpu_use import CpuUse
from ggufspec.measure import table

SAMPLED: Any = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
N_DRAFT_MAX, N_SLOTS = 40, 3


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    target = tiny.write_llama(tmp_path / "target.gguf")
    draft = tiny.write_llama(tmp_path / "draft.gguf", perturb=0.1)
    with ggufspec.load(
        target,
        draft,
        n_ctx=256,
        n_threads=1,
        tuned=False,
        n_slots=N_SLOTS,
        n_draft_max=N_DRAFT_MAX,
    ) as loaded:
        yield loaded


def test_a_measured_cost_model_has_passes_of_all_slots_and_lengths(engine: Engine) -> None:
    engine.generate("hello", seed=1, **SAMPLED)
    costs = engine.pair.profile.costs
    assert (costs.n_most, costs.n_sharers) == (N_DRAFT_MAX + 1, N_SLOTS)
    assert len(costs.curve) == N_SLOTS * (N_DRAFT_MAX + 1)
    assert costs.n_measured(33)
    policy = engine.pair.profile.policy(1.0, repeats=True, in_blocks=True)
    assert len(policy.costs.per_text(1)) == N_DRAFT_MAX + 1, "as long as a draft may be"


def test_all_of_it_is_reported(engine: Engine) -> None:
    heard: list[tuple[str, int, int]] = []
    calibration.calibrate_all(engine.pair, lambda *at: heard.append(at))
    for what in ("costs", "draft costs"):
        (_, first, _), *_, (_, last, total) = (each for each in heard if each[0] == what)
        assert (first, last) == (0, total)
    assert {what for what, _, _ in heard} == {"costs", "draft costs"}


def test_its_passes_are_added_to_the_table_of_the_model(target: Path) -> None:
    for tuned, sizes in ((False, set()), (True, {1, 2, 3, 4, 6, 8, 12, 17})):
        how: Any = {"n_threads": 1, "flash_attention": "off", "n_draft_max": 16}
        with ggufspec.load(target, tuned=tuned, **how) as engine:
            engine.generate("hello", seed=1, **SAMPLED)
            rows = table.recall(table.key_in(engine.pair.target))
        assert {row.n_tokens for row in rows if row.depth == calibration.DEPTH} == sizes


def test_other_texts_keep_their_caches(engine: Engine) -> None:
    prompts = [[n, *range(20, 120)] for n in range(5, 5 + N_SLOTS - 1)]
    texts = [engine.stream(prompt, **SAMPLED) for prompt in prompts]
    for text in texts:
        next(text)
    engine.generate("hello", seed=1, **SAMPLED)
    for text, prompt in zip(texts, prompts, strict=True):
        text.close()
        assert engine.generate(prompt, **SAMPLED).stats.n_prompt_reused == len(prompt) - 1


def test_two_threads_measure_once_and_equal_seeds_give_equal_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one slot, so that they share no passes, whose rounding depends on what is beside."""
    measured: list[float] = []

    def slow(*_: object, **how: object) -> dict[int, list[float]]:
        """The first finds that long passes are cheap, the second that they are dear."""
        measured.append(100.0 if measured else 1.0)
        time.sleep(0.2)
        return {1: [0.001], 8: [0.001 * measured[-1]]}

    monkeypatch.setattr(calibration, "time_target", slow)
    found: list[list[int]] = []
    target = tiny.write_llama(tmp_path / "target.gguf")
    draft = tiny.write_llama(tmp_path / "draft.gguf", perturb=0.1)

    def write(engine: Engine) -> None:
        stream = engine.stream("hello", seed=7, **SAMPLED)
        for _ in stream:
            pass
        found.append([round_.n_drafted for round_ in stream.rounds])

    with ggufspec.load(target, draft, n_ctx=256, n_threads=1, tuned=False) as engine:
        threads = [threading.Thread(target=write, args=(engine,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(measured) == 1
    assert found[0] == found[1]


def test_engines_that_share_a_profile_write_the_same(tmp_path: Path, engine: Engine) -> None:
    known = calibration.settle(engine.pair)
    texts = []
    for i in range(2):
        with ggufspec.load(
            engine.pair.target.model.path,
            engine.pair.draft.model.path,  # type: ignore[union-attr]
            n_ctx=256,
            n_threads=1,
            tuned=False,
        ) as other:
            if i:
                other.generate("something else", max_tokens=60)
            assert calibration.settle(other.pair, known) == known
            texts.append(other.generate("hello", seed=3, max_tokens=40, temperature=0).tokens)
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="costs"):
        calibration.settle(engine.pair, {"costs": 3})


def test_beside_busy_programs_seeds_start_from_assumed_costs_which_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(cpu_use.VARIABLE)
    monkeypatch.setattr(CpuUse, "is_disturbed", lambda *_: True)
    target = tiny.write_llama(tmp_path / "target.gguf")
    draft = tiny.write_llama(tmp_path / "draft.gguf", perturb=0.1)
    how: Any = {"n_ctx": 256, "n_threads": 1, "flash_attention": "off"}
    with ggufspec.load(target, draft, **how) as engine:
        assumed = [*engine.pair.profile.costs.curve]
        texts = []
        for _ in range(2):
            texts.append(engine.generate("hello", seed=1, **SAMPLED).tokens)
            engine.generate("something else", **SAMPLED)
        policy = engine.pair.profile.policy(1.0, repeats=True, in_blocks=True)
        assert policy.costs.curve == pytest.approx(assumed)
    assert texts[0] == texts[1]
    assert "a later load measures them" in caplog.messages[-1]
    assert not [each for each in profile_store.records() if "settled_costs" in each.document]
    monkeypatch.undo()
    with ggufspec.load(target, draft, **how) as engine:
        engine.generate("hello", seed=1, **SAMPLED)
    assert [each for each in profile_store.records() if "settled_costs" in each.document]


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_heads_steps_are_measured_with_all_that_they_take(kind: str, tmp_path: Path) -> None:
    """Also the states that it reads, its Python and its draws; a bare pass is much faster."""
    pair = head_pairs.WRITERS[kind](tmp_path)
    with ggufspec.load(pair.target, pair.draft, n_ctx=256, n_threads=1, tuned=False) as engine:
        calibration.calibrate(engine.pair)
        costs = engine.pair.profile.policy(1.0, repeats=True, in_blocks=True).costs
        slot = calibration.spare_slot(engine.pair)
        steps, _ = calibration.time_drafts(engine.pair, slot, depth=40, n_rounds=4)  # as `tune`
        drafting = []
        for _ in range(4):  # on a busy machine, a few rounds may all be disturbed
            stream = engine.stream("hello", n_draft=3, drafter="model", **SAMPLED)
            stream.finish()
            drafting += [each for each in stream.rounds[1:] if each.n_drafted == 3]
        fastest = min(each.draft_seconds for each in drafting)
    assert costs.drafting(3) > 0.7 * fastest
    assert len(steps) >= 4
    n_most = max(each.n for each in steps)
    assert n_most == (3 if kind == "eagle3" else 1)
    assert n_most * min(each.per_step for each in steps) > 0.7 * fastest


@pytest.mark.parametrize("write", [tiny.write_llama, tiny.write_mamba])
def test_a_draft_model_steps_in_rounds_and_reads(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    target, draft = write(tmp_path / "target.gguf"), write(tmp_path / "draft.gguf")
    with ggufspec.load(target, draft, n_ctx=256, n_threads=1, tuned=False) as engine:
        slot = calibration.spare_slot(engine.pair)
        steps, readings = calibration.time_drafts(engine.pair, slot, depth=40, n_rounds=4)
    assert len(steps) == 4
    assert {(each.n, each.n_further) for each in steps} == {(3, 1)}, "all is accepted"
    assert [(each.n, each.n_further) for each in readings] == [(1, 15)] * 2
    assert min(each.seconds for each in [*steps, *readings]) > 0


def test_the_smallest_context_has_no_room_for_rounds(tmp_path: Path) -> None:
    target = tiny.write_llama(tmp_path / "target.gguf")
    for n_ctx, n_readings in ((8, 0), (48, 2)):
        with ggufspec.load(target, target, n_ctx=n_ctx, n_threads=1, tuned=False) as engine:
            slot = calibration.spare_slot(engine.pair)
            steps, readings = calibration.time_drafts(engine.pair, slot, depth=300, n_rounds=1)
        assert (len(steps), len(readings)) == (1, n_readings)
