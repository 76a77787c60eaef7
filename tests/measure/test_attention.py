"""Attention is timed once for a pair on a CPU, remembered, and never against a given value."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import llama_cpp
import pytest
import tiny
from patience import PATIENCE

import ggufspec
from ggufspec.drafting import profile_store
from ggufspec.llama import cpu_use, devices
from ggufspec.llama.context_options import ContextOptions, default_attention
from ggufspec.llama.model import AttentionHeads, Model
from ggufspec.measure import attention, table
from ggufspec.measure.attention import (
    Attention,
    UsualText,
    choose,
    measure_attention,
    time_passes,
)
from ggufspec.measure.disturbed import Watch
from ggufspec.measure.passes import PIECE, SIZES, Probe
from ggufspec.measure.table import Row, Table
from ggufspec.standin import embedded

UNMEASURED = default_attention()
SHORT = UsualText(0, 200)
Times = Mapping[str, Sequence[Sequence[float]]]  # by way, then by depth (two), then by size


def rows(times: Times, text: UsualText = SHORT, types: str = "") -> Table:
    sizes = (*SIZES, PIECE)
    return {Row(types, way, 1, 0): 0.1 for way in times} | {
        Row(types, way, size, depth): seconds
        for way, of_way in times.items()
        for depth, of_depth in zip((attention.DEPTHS[0], text.deepest), of_way, strict=True)
        for size, seconds in zip(sizes, of_depth, strict=False)
    }


def times(flash: float, plain: float, many: float = 1.0) -> Times:
    """As long for passes over one to four tokens; `many`: without flash attention, for eight."""
    return {
        "on": [[flash, flash, flash, 1.0]] * 2,
        "off": [[plain, plain, plain, many]] * 2,
    }


class Timer:
    """Answers with given times, and counts how often it was asked."""

    def __init__(self, answer: Times | None) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, model: Model, text: UsualText, watch: Watch) -> Table:
        self.asked += 1
        if self.answer is None:  # a pass took too long
            return {Row(" ".join(model.kernels.types), "on", *text.passes[0]): 9.0}
        slow = [[1.5] * 5] * 2  # ours
        found = rows({"own": slow, **self.answer}, text, " ".join(model.kernels.types))
        return {row: 0.05 * seconds for row, seconds in found.items()}


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """Loads measure with this one: without flash attention, passes are twice as fast."""
    made = Timer(times(0.2, 0.1))
    monkeypatch.setattr(attention, "time_passes", made)
    return made


# The choice


def chosen(*models: Times, depth: int = 100, has_draft: bool = True) -> Attention:
    text = UsualText(0, 2 * depth)
    return choose(text, [(rows(each, text), ()) for each in models], has_draft=has_draft)


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
    found = chosen(target)
    assert found.setting == setting
    assert f"flash attention {setting}: without it, passes after 100 tokens" in str(found.reason)


@pytest.mark.parametrize(
    ("own", "flash", "plain", "setting"),
    [
        (0.1, 0.2, 0.2, "own"),
        (0.2, 0.195, 0.195, "own"),  # the difference could be noise
        (0.2, 0.1, 0.2, "auto"),
        (0.2, 0.3, 0.1, "off"),
    ],
)
def test_own_attention_is_used_unless_another_is_clearly_faster(
    own: float, flash: float, plain: float, setting: str
) -> None:
    of_own = [[own, own, own, 1.0]] * 2
    found = chosen({"own": of_own, **times(flash, plain)}, has_draft=False)
    assert found.setting == setting
    assert found.own == pytest.approx(own / flash)
    assert f"with ggufspec's kernels {own / flash:.2f} times, and without it" in str(found.reason)


def test_the_draft_decides_too() -> None:
    target = times(0.1, 0.1)
    assert chosen(target, times(0.2, 0.02)).setting == "off"
    assert chosen(target, times(0.02, 0.2)).setting == "auto"
    assert chosen(times(0.2, 0.1), times(0.02, 0.2)).setting == "auto"


def test_the_depth_of_the_texts_decides() -> None:
    """Flash attention has fewer operations, each of which takes longer on a CPU."""
    target = {"on": [[0.1] * 4, [0.3] * 4], "off": [[0.2] * 4, [0.2] * 4]}
    assert chosen(target, depth=40).setting == "auto"
    assert chosen(target, depth=500).setting == "off"
    half = chosen(target, depth=sum(attention.DEPTHS) // 2)
    assert half.ratio == pytest.approx(1.0)


def test_longer_passes_count_with_a_draft_only() -> None:
    target = times(0.1, 0.13, many=0.5)
    assert chosen(target, has_draft=True).setting == "off"
    assert chosen(target, has_draft=False).setting == "auto"


LONG = UsualText(5000, 32)


def long_times(flash: float, plain: float, prompt: float, plain_prompt: float) -> Times:
    """On an empty cache both ways take as long; at the depth of LONG, these seconds."""
    empty, n = [0.1, 0.1, 0.1, 0.1, 0.5], len(SIZES)
    return {
        "on": [empty, [*[flash] * n, prompt]],
        "off": [empty, [*[plain] * n, plain_prompt]],
    }


@pytest.mark.parametrize(
    ("target", "setting"),
    [
        (long_times(0.1, 0.3, 2.0, 1.2), "off"),  # its prompt takes most of the time
        (long_times(0.2, 0.2, 1.2, 2.0), "auto"),
    ],
)
def test_a_long_text_is_judged_with_its_prompt(target: Times, setting: str) -> None:
    found = choose(LONG, [(rows(target, LONG), ())], has_draft=False)
    assert found.setting == setting
    assert "a prompt of about 5,000 tokens" in str(found.reason)


def test_a_long_answer_counts_more_than_a_short_prompt() -> None:
    text = UsualText(100, 5000)
    target = rows(long_times(0.1, 0.3, 2.0, 1.2), text)
    assert choose(text, [(target, ())], has_draft=False).setting == "auto"


# The measurement


def test_whole_passes_are_timed_in_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_SECONDS", 10.0)  # beside other programs
    monkeypatch.setattr(Watch, "end", lambda *_: None)
    for text in (SHORT, UsualText(2100, 32)):
        with closing(Model(embedded.embedded_target())) as model:
            began = perf_counter()
            found = time_passes(model, text, Watch(1))
            assert perf_counter() - began < 30
        ways = {row.attention for row in found}
        assert ways >= {"on", "off"}
        passes = [(row.n_tokens, row.depth) for row in found if row.attention == "off"]
        assert sorted(passes) == sorted(text.passes)
        assert all(0 < seconds < 5 for seconds in found.values())
    deepest = {row.n_tokens: found[row] for row in found if row[1::2] == ("off", text.deepest)}
    assert deepest[1] < deepest[PIECE], "one token, and a piece of a prompt"


def test_cells_are_filled_by_copies_of_a_few_tokens() -> None:
    with (
        closing(Model(embedded.embedded_target())) as model,
        closing(Probe(model, 4, deepest=512)) as probe,
    ):
        sizes = []
        for n_tokens in (32, 512):
            assert probe.fill(n_tokens)
            assert probe.seconds(4, 4) is not None
            assert probe.fill(n_tokens), "drops what the pass has added"
            sizes.append(llama_cpp.llama_state_seq_get_size(probe.context.pointer, 0))
        assert sizes[1] / sizes[0] == pytest.approx(16, rel=0.05)
        assert llama_cpp.llama_perf_context(probe.context.pointer).n_p_eval == 32 + 4 + 4


def test_nothing_is_decided_where_a_pass_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_SECONDS", 1e-6)
    with closing(Model(embedded.embedded_target())) as model:
        assert len(time_passes(model, SHORT, Watch(1))) == 1
        chosen = measure_attention(model, None, ContextOptions(64))
    assert (chosen.setting, chosen.ratio) == (UNMEASURED, None)


def test_recurrent_models_are_timed_or_left(tmp_path: Path) -> None:
    for write in (tiny.write_mamba, tiny.write_hybrid):
        with closing(Model(write(tmp_path / "model.gguf"))) as model:
            found = time_passes(model, SHORT, Watch(1))
            assert not found or {row.attention for row in found} >= {"on", "off"}


def test_heads_are_read_from_the_file(tmp_path: Path) -> None:
    with closing(Model(tiny.write_llama(tmp_path / "model.gguf"))) as model:
        assert model.attention_heads == AttentionHeads(4, 2, 8, 8)
        assert model.n_kv_values == 2 * 2 * (8 + 8), "two layers of two KV heads"
    with closing(Model(tiny.write_mamba(tmp_path / "mamba.gguf"))) as model:
        assert (model.attention_heads, model.n_kv_values) == (None, 0)


# Loads


def setting_of(target: Path, draft: Path | None = None, **options: Any) -> str:
    with ggufspec.load(target, draft, n_ctx=64, **options) as engine:
        for context in filter(None, (engine.pair.target, engine.pair.draft)):
            assert context.options.flash_attention == engine.pair.target.options.flash_attention
        return engine.pair.target.options.flash_attention


def test_a_load_measures_each_model_once(target: Path, draft: Path, timer: Timer) -> None:
    assert setting_of(target, draft) == "off"
    assert timer.asked == 2, "target and draft"
    assert setting_of(target, draft, n_threads=1, n_draft_max=3) == "off"
    timer.answer = times(0.1, 0.1)
    assert setting_of(target) == "off"
    assert timer.asked == 2, "both are remembered, also of a target alone"
    timer.answer = None
    other = tiny.write_llama(target.with_name("other.gguf"), seed=1)
    assert setting_of(other) == setting_of(other) == UNMEASURED
    assert timer.asked == 3, "what takes too long is not tried again"


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"flash_attention": "on"}, "on"),
        ({"tuned": False}, UNMEASURED),
        ({"type_k": "f32"}, UNMEASURED),  # as caches of other types
    ],
)
def test_where_nothing_is_measured(
    options: dict[str, Any], setting: str, target: Path, timer: Timer
) -> None:
    assert setting_of(target, **options) == setting
    assert (timer.asked, [*profile_store.records()]) == (0, [])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_gpus_and_recurrent_models_are_left_as_they_are(
    on_gpu: bool, target: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        monkeypatch.setattr(Model, "n_gpu_layers", 3)
    else:
        tiny.write_mamba(target)
    assert setting_of(target) == ("auto" if on_gpu else UNMEASURED)
    assert timer.asked == 0


def test_a_long_context_keeps_flash_attention(target: Path, timer: Timer) -> None:
    with closing(Model(target)) as model:
        cases: Mapping[int, str] = {4096: "off", 2**18: "off", 2**18 + 1: UNMEASURED}
        for n_ctx, setting in cases.items():
            options = ContextOptions(n_ctx=n_ctx, n_batch=128)
            assert measure_attention(model, None, options).setting == setting


def test_a_load_for_long_texts_has_a_choice_of_its_own(target: Path, timer: Timer) -> None:
    assert setting_of(target) == "off"
    timer.answer = long_times(0.2, 0.2, 1.2, 2.0)
    assert setting_of(target, usual_text=(5000, 32)) == "auto"
    assert setting_of(target, usual_text=(6000, 100)) == "auto"
    assert timer.asked == 2, "once for texts of about that length"
    assert setting_of(target, usual_text=(300, 32)) == setting_of(target) == "off"
    assert timer.asked == 2


def test_rows_that_are_added_later_do_not_change_a_choice(target: Path, timer: Timer) -> None:
    """So texts with a seed are computed in the same way after others have learned costs."""
    assert setting_of(target, usual_text=(100, 32)) == "off"
    with closing(Model(target)) as model:
        about, types = table.key_of(model), " ".join(model.kernels.types)
    sizes = {Row(types, "on", n, depth): 1e-6 for n in SIZES for depth in (32, 116, 512)}
    assert table.add(about, sizes)
    assert (setting_of(target, usual_text=(100, 32)), timer.asked) == ("off", 1)


def test_a_usual_text_is_two_lengths(target: Path) -> None:
    for wrong in ((5000,), (5000, -1), ("a", 1)):
        with pytest.raises(ggufspec.OptionError, match="usual_text"):
            ggufspec.load(target, usual_text=wrong)  # type: ignore[arg-type]


def test_what_cannot_be_stored_is_not_used(
    target: Path, timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path / "file" / "folder"))
    assert setting_of(target) == UNMEASURED


def test_of_two_loads_at_once_one_measures_and_the_other_waits_for_it(
    target: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their passes would disturb each other, and they might choose differently."""
    waits = threading.Event()

    def slow(model: Model, text: UsualText, watch: Watch) -> Table:
        assert waits.wait(PATIENCE)
        return timer(model, text, watch)

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "another process measures" in record.getMessage():
                waits.set()

    heard, talk = Heard(), logging.getLogger("ggufspec.llama")
    talk.addHandler(heard)
    monkeypatch.setattr(attention, "time_passes", slow)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(lambda _: setting_of(target), range(2))] == ["off", "off"]
    finally:
        talk.removeHandler(heard)
    assert timer.asked == 1


def test_a_disturbed_time_is_measured_again_and_never_stored(
    target: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one token took longer than two."""
    asked = iter([True, True, True, False, False])

    def time_disturbed(model: Model, text: UsualText, watch: Watch) -> Table:
        found = timer(model, text, watch)
        watch.end({(1, 32): 0.3 if next(asked) else 0.1, (2, 32): 0.1})
        return found

    monkeypatch.setattr(attention, "time_passes", time_disturbed)
    assert (setting_of(target), timer.asked) == (UNMEASURED, 2)
    assert not [*profile_store.records()]
    assert (setting_of(target), timer.asked) == ("off", 4)


def test_nothing_is_measured_beside_a_busy_program(
    target: Path,
    timer: Timer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A real one for each processor; without it, the next load measures."""
    if cpu_use.cpu_use().n_running is None:
        pytest.skip("this process cannot tell what other programs use")
    timer.answer = times(0.2, 0.1)
    programs = []
    with monkeypatch.context() as patch:
        patch.delenv(cpu_use.VARIABLE)
        try:
            for _ in range(devices.n_logical_cores()):
                programs.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            sleep(0.3)
            assert setting_of(target) == UNMEASURED
        finally:
            for program in programs:
                program.kill()
                program.wait()
    assert (timer.asked, [*profile_store.records()]) == (0, [])
    assert "attention is not measured" in caplog.messages[-1]
    assert (setting_of(target), timer.asked) == ("off", 1)


def test_a_damaged_record_is_measured_again(target: Path, timer: Timer) -> None:
    setting_of(target)
    (record,) = [each for each in profile_store.records() if each.facts["about"] == "passes"]
    document = {"rows": [["", "on", 1, 32, "much"], *record.document["rows"][1:]]}
    profile_store.remember(record.facts, document)
    assert setting_of(target) == "off"
    assert timer.asked == 2
