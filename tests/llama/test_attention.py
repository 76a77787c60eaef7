"""Attention is timed once for a pair on a CPU, remembered, and never against a given value."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.bench import tune
from ggufspec.drafting import profile_store
from ggufspec.drafting.profile_store import TunedSettings
from ggufspec.llama import attention, devices
from ggufspec.llama.attention import (
    Attention,
    Times,
    choose_attention,
    known_attention,
    time_attention,
)
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Heads, Model
from ggufspec.llama.profile_key import pair_key

HEADS = Heads(4, 2, 64, 64)


def times(flash: float, plain: float, many: float = 1.0) -> Times:
    """As long for batches of one and of four tokens; `many`: without flash attention, for 64."""
    one, few, most = attention.BATCHES
    return {
        **dict.fromkeys([(True, one), (True, few)], flash),
        **dict.fromkeys([(False, one), (False, few)], plain),
        (True, most): 1.0,
        (False, most): many,
    }


class Timer:
    """Answers with given times, and counts how often it was asked."""

    def __init__(self, answer: Times | None) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, heads: Heads, until: float) -> Times | None:
        self.asked += 1
        return self.answer


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """Loads measure with this one: without flash attention, passes are twice as fast."""
    made = Timer(times(0.2, 0.1))
    monkeypatch.setattr(attention, "time_attention", made)
    return made


# The choice


@pytest.mark.parametrize(
    ("target", "setting"),
    [
        (times(0.2, 0.1), "off"),
        (times(0.1, 0.2), "auto"),
        (times(0.1, 0.1), "auto"),
        (times(0.2, 0.18), "auto"),  # the difference could be noise
        (times(0.2, 0.19, many=0.1), "off"),
        (times(0.01, 0.005, many=1.2), "auto"),  # slower prompts cost more than is saved
    ],
)
def test_flash_attention_is_off_where_it_is_clearly_slower(target: Times, setting: str) -> None:
    assert choose_attention(target).setting == setting


def test_the_draft_decides_too() -> None:
    target = times(0.1, 0.1)
    assert choose_attention(target, times(0.2, 0.02)).setting == "off"
    assert choose_attention(target, times(0.02, 0.2)).setting == "auto"
    assert choose_attention(times(0.2, 0.1), times(0.02, 0.2)).setting == "auto"


def test_the_reason_is_a_line() -> None:
    reason = choose_attention(times(0.2, 0.1)).reason
    assert reason is not None
    assert reason.startswith("flash attention off: ")
    assert " 0.62 times as long on this CPU" in reason
    assert Attention().reason is None


# The measurement


can_be_timed = pytest.mark.skipif(
    not any(hasattr(each, "ggml_backend_cpu_init") for each in devices.libraries()),
    reason="this build of llama.cpp has its CPU backend in a library of its own",
)


@can_be_timed
@pytest.mark.parametrize(
    "heads", [HEADS, Heads(1, 1, 8, 8), Heads(71, 1, 64, 64), Heads(32, 8, 128, 128)]
)
def test_attention_is_timed_within_its_limit(heads: Heads) -> None:
    started = perf_counter()
    found = time_attention(heads, started + 60)
    assert found is not None
    assert {*found} == {(way, size) for way in (True, False) for size in attention.BATCHES}
    assert all(0 < seconds < 1 for seconds in found.values())
    for way in (True, False):
        assert found[way, 64] > found[way, 1], "sixty-four tokens are more work than one"


@can_be_timed
def test_all_heads_count_though_few_are_computed() -> None:
    few, many = (time_attention(Heads(n, n, 64, 64), perf_counter() + 60) for n in (8, 64))
    assert few is not None
    assert many is not None
    assert 4 < many[True, 64] / few[True, 64] < 16


def test_nothing_is_decided_where_time_is_short() -> None:
    assert time_attention(HEADS, perf_counter()) is None


def test_nothing_is_decided_where_llama_cpp_lacks_the_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "libraries", lambda: [])
    assert time_attention(HEADS, perf_counter() + 60) is None


def test_a_machine_without_memory_keeps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", empty)
    assert time_attention(HEADS, perf_counter() + 60) is None


def test_heads_are_read_from_the_file(tmp_path: Path) -> None:
    with closing(Model(tiny.write_llama(tmp_path / "model.gguf"))) as model:
        assert model.heads == Heads(4, 2, 8, 8)
        assert model.n_kv_values == 2 * 2 * (8 + 8), "two layers of two KV heads"
    with closing(Model(tiny.write_mamba(tmp_path / "mamba.gguf"))) as model:
        assert (model.heads, model.n_kv_values) == (None, 0)


# Loads


def setting_of(target: Path, draft: Path | None = None, **options: Any) -> str:
    with ggufspec.load(target, draft, n_ctx=64, **options) as engine:
        for context in filter(None, (engine.pair.target, engine.pair.draft)):
            assert context.options.flash_attention == engine.pair.target.options.flash_attention
        return engine.pair.target.options.flash_attention


def test_a_load_measures_once_for_each_pair(target: Path, draft: Path, timer: Timer) -> None:
    assert setting_of(target, draft) == "off"
    assert timer.asked == 2, "target and draft"
    assert setting_of(target, draft) == "off"
    assert setting_of(target, draft, n_threads=1, n_draft_max=3) == "off"
    assert timer.asked == 2, "it is remembered"
    assert setting_of(target) == "off"
    assert timer.asked == 3, "another pair"


def test_the_default_is_remembered_too(target: Path, timer: Timer) -> None:
    timer.answer = times(0.1, 0.1)
    assert setting_of(target) == setting_of(target) == "auto"
    assert timer.asked == 1
    timer.answer = None
    other = tiny.write_llama(target.with_name("other.gguf"), seed=1)
    assert setting_of(other) == setting_of(other) == "auto"
    assert timer.asked == 2, "what could not be measured in time is not tried again"


def test_given_values_are_kept_and_nothing_is_measured(target: Path, timer: Timer) -> None:
    assert setting_of(target, flash_attention="on") == "on"
    assert setting_of(target, flash_attention="off") == "off"
    assert setting_of(target, tuned=False) == "auto"
    assert setting_of(target, type_k="f32") == "auto", "as caches of other types"
    assert timer.asked == 0
    assert not [*profile_store.records()]


def test_nothing_is_measured_for_a_gpu(
    target: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "n_gpu_layers", 3)
    assert setting_of(target) == "auto"
    assert timer.asked == 0


def test_a_long_context_keeps_flash_attention(target: Path, timer: Timer) -> None:
    with closing(Model(target)) as model:
        cases: Mapping[int, str] = {4096: "off", 2**18: "off", 2**18 + 1: "auto"}
        for n_ctx, setting in cases.items():
            options = ContextOptions(n_ctx=n_ctx, n_batch=128)
            assert known_attention(model, None, options).setting == setting


@pytest.mark.parametrize("write", [tiny.write_mamba, tiny.write_hybrid])
def test_recurrent_models_are_left_as_they_are(write: Any, tmp_path: Path, timer: Timer) -> None:
    assert setting_of(write(tmp_path / "model.gguf")) == "auto"
    assert timer.asked == 0


def test_what_cannot_be_stored_is_not_used(
    target: Path, timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path / "file" / "folder"))
    assert setting_of(target) == "auto"


def test_a_process_that_was_faster_decides(
    target: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer.answer = times(0.1, 0.1)

    def slow(heads: Heads, until: float) -> Times | None:
        monkeypatch.setattr(attention, "time_attention", timer)
        assert setting_of(target) == "auto"
        return times(0.2, 0.1)

    monkeypatch.setattr(attention, "time_attention", slow)
    assert setting_of(target) == "auto"
    assert timer.asked == 1


def test_a_damaged_record_is_measured_again(target: Path, timer: Timer) -> None:
    setting_of(target)
    (record,) = [each for each in profile_store.records() if each.facts["about"] == "attention"]
    profile_store.remember(record.facts, {"setting": ["off"], "ratio": "much"})
    assert setting_of(target) == "off"
    assert timer.asked == 2


def test_tune_replaces_it_and_forgets_it(target: Path, timer: Timer) -> None:
    with ggufspec.load(target) as engine:
        assert engine.attention is not None
        key = pair_key(engine.pair.target.model, None, engine.pair.target.options)
    profile_store.remember_settings(key, TunedSettings(flash_attention="on"))
    with ggufspec.load(target) as engine:
        assert engine.pair.target.options.flash_attention == "on"
        assert engine.attention is None
    assert tune.forget(target) >= 2
    assert not [*profile_store.records()]


def test_a_draft_for_llama_cpp_uses_it(target: Path, timer: Timer) -> None:
    with closing(ggufspec.DraftModel(target, n_ctx=64)):
        assert timer.asked == 1
    assert setting_of(target) == "off"
    assert timer.asked == 1
