"""What passes cost on a device is learned apart, and decides where the next run goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.drafting import profile_store
from ggufspec.engine import speeds
from ggufspec.llama.devices import free_memory, gpus, offload_devices
from ggufspec.placement.speeds import Machine

PLACES = [(0, 0), (1, 0), (-1, 0), (0, -1), (1, -1), (-1, -1)]  # layers of target and draft
APART = {(-1, 0), (0, -1)}
GREEDY: Any = {"temperature": 0.0, "ignore_eos": True}

pytestmark = pytest.mark.skipif(not offload_devices(), reason="see tests/device/README.md")


def written(target: Path, draft: Path, **options: Any) -> tuple[int, int, bool]:
    """Write a text; returns the layers on the device, and whether prompts are offloaded."""
    with ggufspec.load(target, draft, n_threads=1, **options) as engine:
        # Sampled: greedy text repeats itself, and has too few passes for a profile.
        engine.generate("Once upon a time", max_tokens=40, temperature=2.0, ignore_eos=True)
        assert engine.pair.draft is not None
        layers = engine.pair.target.model.n_gpu_layers, engine.pair.draft.model.n_gpu_layers
        return *layers, engine.pair.target.options.offloads


def test_each_placement_learns_its_own_costs(tmp_path: Path) -> None:
    target = tiny.write_llama(tmp_path / "target.gguf")
    draft = tiny.write_llama(tmp_path / "draft.gguf", n_layer=1)
    for n, (of_target, of_draft) in enumerate(PLACES, 1):
        written(target, draft, n_gpu_layers=of_target, n_gpu_layers_draft=of_draft)
        records = [each for each in profile_store.records() if "costs" in each.document]
        assert len({profile_store.key(each.facts["pair"]) for each in records}) == n
    curves = [each.document["costs"]["target_seconds"]["1"] for each in records]
    assert len(set(curves)) == len(PLACES)
    for of_target, of_draft in PLACES:
        how = {"n_gpu_layers": of_target, "n_gpu_layers_draft": of_draft, "n_threads": 1}
        with ggufspec.load(target, draft, **how) as engine:
            assert engine.pair.profile.costs.n_measured(1)
            start = engine.pair.profile.costs.start
            is_timed = start is None or start.is_measured  # a GPU's are predicted
            assert is_timed == ((of_target, of_draft) == (0, 0))


def test_a_device_slower_than_the_processor_gets_nothing_after_the_first_run(
    tmp_path: Path,
) -> None:
    target = tiny.write_llama(tmp_path / "target.gguf", n_embd=512)  # so large that GPUs are tried
    draft = tiny.write_llama(tmp_path / "draft.gguf", n_embd=512, n_layer=1)
    assert written(target, draft) == (3, 2, True), "as predicted for an unknown GPU"
    machine = speeds.with_measured_speeds(Machine(gpus(), free_memory()), target.stat().st_size)
    assert machine.gpus[0].is_measured
    if "llvmpipe" not in offload_devices()[0].description:
        pytest.skip("this device may be faster")
    assert machine.gpus[0].effective < machine.bandwidths.host
    assert written(target, draft) == (0, 0, False)
    assert written(target, draft) == (0, 0, False), "as the processor was measured meanwhile"


@pytest.mark.parametrize(("of_target", "of_draft"), [(-1, 0), (0, -1), (1, -1)])
def test_a_prompt_is_read_by_both_at_the_same_time_where_they_are_apart(
    of_target: int, of_draft: int, tmp_path: Path
) -> None:
    target = tiny.write_llama(tmp_path / "target.gguf")
    how: Any = {"n_gpu_layers": of_target, "n_gpu_layers_draft": of_draft, "n_threads": 1}
    prompt = [5 + i % 90 for i in range(150)]
    with ggufspec.load(target, target, tuned=False, n_batch=32, **how) as engine:
        assert engine.pair.are_apart == ((of_target, of_draft) in APART)
        found = []
        for apart in (engine.pair.are_apart, False):
            engine.pair.are_apart = apart
            engine.forget()
            found.append(engine.generate(prompt, max_tokens=8, n_draft=2, **GREEDY).tokens)
    assert found[0] == found[1]
