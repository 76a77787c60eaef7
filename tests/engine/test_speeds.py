"""What earlier runs measured decides where the next one goes, and what its drafts may cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.drafting import profile_store
from ggufspec.engine import fit, speeds
from ggufspec.llama import model
from ggufspec.llama.devices import Device
from ggufspec.measure import table
from ggufspec.placement.speeds import HOST_BANDWIDTH, Gpu, Machine

GIB = 2**30
CARD = "NVIDIA GeForce RTX 4090"
NO_DEVICE = Machine((), None)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This machine has such GPUs, but computes all layers on its processor."""

    def give(*names: str) -> None:
        found = [Device(name, CARD, 1, GIB, 0, GIB) for name in names]
        monkeypatch.setattr(model, "offload_devices", lambda: found)
        monkeypatch.setattr(speeds, "offload_devices", lambda: found)
        monkeypatch.setattr(fit, "gpus", lambda: (Gpu(CARD, GIB),) * len(found))

    return give


def of_model(path: Path) -> list[table.Record]:
    """The tables of a model that say what was assumed of its passes."""
    model = profile_store.fingerprint(path)
    return [each for each in table.records() if each.facts["model"] == model and each.assumed]


def run(target: Path, draft: Path | None = None, **options: Any) -> tuple[int, int | None]:
    """The layers on GPUs of target and draft, in a run that measures."""
    with ggufspec.load(target, draft, n_threads=1, **options) as engine:
        engine.generate("the", max_tokens=60, ignore_eos=True, drafter="ngram")
        return (
            engine.pair.target.model.n_gpu_layers,
            engine.pair.draft and engine.pair.draft.model.n_gpu_layers,
        )


def test_the_speed_of_memory_is_known_from_the_largest_pair_that_ran_here(target: Path) -> None:
    assert speeds.with_measured_speeds(NO_DEVICE, 0) == NO_DEVICE
    run(target)
    found = speeds.with_measured_speeds(NO_DEVICE, 0)
    assert found.host_bandwidth is not None
    assert 0 < found.host_bandwidth < HOST_BANDWIDTH
    assert found.host_slope >= 0
    given = Machine((), None, 7e9)
    assert speeds.with_measured_speeds(given, 0) == given


def test_a_device_that_was_slower_than_predicted_for_the_processor_is_left_out(
    tmp_path: Path, pretend: Callable[..., None]
) -> None:
    pretend("CUDA0")
    wide: Any = {"n_embd": 512}  # starting kernels takes a smaller share
    target = tiny.write_llama(tmp_path / "target.gguf", **wide)
    draft = tiny.write_llama(tmp_path / "draft.gguf", n_layer=1, **wide)
    assert run(target, draft) == (3, 2), "as predicted for the card"
    (record,) = of_model(target)
    slow = {row: 1.0 for row in record.rows if row.n_tokens == 1}
    table.add(record.facts, slow, replaces=True)
    machine = speeds.with_measured_speeds(Machine((Gpu(CARD, GIB),), None), target.stat().st_size)
    of_card = record.assumed["gpu"]
    assert machine.gpus[0].slowness == pytest.approx(1 / of_card)
    assert machine.host_bandwidth is None, "no layer was there"
    assert run(target, draft) == (0, 0), "by what is assumed of the processor"
    assert speeds.with_measured_speeds(machine, 0).host_bandwidth is not None
    assert run(target, draft, tuned=False) == (3, 2), "without what is stored"
    with ggufspec.load(target, draft, n_gpu_layers=-1, n_threads=1) as engine:
        assert engine.pair.target.model.n_gpu_layers == 3, "as was asked for"


def test_a_small_model_says_nothing_of_a_device_for_a_large_one(
    target: Path, pretend: Callable[..., None]
) -> None:
    pretend("CUDA0")
    run(target, n_gpu_layers=-1)
    machine = Machine((Gpu(CARD, GIB),), None)
    n_bytes = target.stat().st_size
    assert speeds.with_measured_speeds(machine, n_bytes).gpus[0].is_measured
    assert speeds.with_measured_speeds(machine, 100 * n_bytes) == machine
    given = Machine((Gpu(CARD, GIB, 1e12),), None)
    assert speeds.with_measured_speeds(given, n_bytes) == given


def test_each_device_has_its_own_speed(target: Path, pretend: Callable[..., None]) -> None:
    pretend("CUDA0", "CUDA1")
    machine = Machine((Gpu(CARD, GIB),) * 2, None)
    with ggufspec.load(
        target, target, n_threads=1, n_gpu_layers=0, n_gpu_layers_draft=-1, main_gpu=1
    ) as engine:
        engine.generate("the", max_tokens=2, seed=1)  # measures all first
    found = speeds.with_measured_speeds(machine, 1)
    assert [gpu.is_measured for gpu in found.gpus] == [False, True]
    assert found.host_bandwidth is not None


@pytest.mark.parametrize("assumed", [None, {}, {"host": 0, "gpu": 0}, {"host": "x"}], ids=str)
def test_a_damaged_table_measures_nothing(target: Path, assumed: object) -> None:
    run(target)
    (record,) = (each for each in profile_store.records() if "assumed" in each.document)
    assert speeds.with_measured_speeds(NO_DEVICE, 0) != NO_DEVICE
    profile_store.remember(record.facts, {**record.document, "assumed": assumed})
    assert speeds.with_measured_speeds(NO_DEVICE, 0) == NO_DEVICE


def test_costs_start_from_where_the_layers_are(
    target: Path, draft: Path, pretend: Callable[..., None]
) -> None:
    def start(**options: Any) -> Any:
        with ggufspec.load(target, draft, n_threads=1, tuned=False, **options) as engine:
            return engine.pair.stored_profile.start

    assert start() is None, "on a processor nothing is predicted"
    pretend("CUDA0")
    assert start(n_gpu_layers=0, n_gpu_layers_draft=0) is None
    whole, part = (start(n_gpu_layers=n, n_gpu_layers_draft=-1) for n in (-1, 1))
    slopes = [each.target[3] / each.target[0] for each in (whole, part)]
    assert 1 < slopes[0] < slopes[1], "passes of a processor grow with their tokens"
    on_cpu = start(n_gpu_layers=1, n_gpu_layers_draft=0)
    assert on_cpu.step != part.step
    assert on_cpu.target == part.target
    assert len(start(n_gpu_layers=1, n_draft_max=3, n_slots=2).target) == 8
