"""Engines on one device at the same time, texts in slots, and memory given back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from device.conftest import (
    ALL,
    ON_CPU,
    ON_DEVICE,
    PROMPTS,
    ROUNDING,
    LoadPair,
    assert_greedy,
    held_bytes,
    load_pair,
)

from ggufspec.llama.devices import Device

F16 = ROUNDING["f16"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
MIB = 2**20


def test_two_engines_write_at_the_same_time(load: LoadPair) -> None:
    engines = [load(**ON_DEVICE), load(n_gpu_layers=3, n_gpu_layers_draft=ALL)]
    with ThreadPoolExecutor() as pool:
        texts = [
            [pool.submit(engine.generate, prompt, n_draft=3, **GREEDY) for prompt in PROMPTS]
            for engine in engines
        ]
    for written in texts:
        for prompt, done in zip(PROMPTS, written, strict=True):
            assert_greedy(done.result(), load(**ON_CPU), prompt, F16)


@pytest.mark.parametrize(("n_draft", "n_layers"), [(3, ALL), ("auto", 3)])
def test_texts_in_slots_are_those_written_alone(
    n_draft: int | str, n_layers: int, load: LoadPair
) -> None:
    engine = load(n_gpu_layers=n_layers, n_gpu_layers_draft=ALL, n_slots=3)
    prompts = [*PROMPTS, "In the year of the great frost", f"{PROMPTS[1]} and"]  # more than slots
    for prompt, done in zip(
        prompts, engine.generate_batch(prompts, n_draft=n_draft, **GREEDY), strict=True
    ):
        assert_greedy(done, load(**ON_CPU), prompt, F16)


def test_a_text_that_was_left_in_the_middle_changes_no_other(load: LoadPair) -> None:
    engine = load(**ON_DEVICE)
    with engine.stream(PROMPTS[0], n_draft=4, **GREEDY) as stream:
        next(stream)
    for prompt in PROMPTS:
        assert_greedy(engine.generate(prompt, n_draft=3, **GREEDY), load(**ON_CPU), prompt, F16)


def test_closing_gives_the_memory_back(device: Device) -> None:
    held = []
    for _ in range(20):
        with load_pair(**ON_DEVICE, n_ctx=4096) as engine:
            engine.generate(PROMPTS[0], n_draft=3, **{**GREEDY, "max_tokens": 4})
        held.append(held_bytes(device))
    # The first ones fill the memory that the driver keeps. The weights of the pair are 9 MiB, its
    # caches 28 MiB. With the software device, a load of the last ones adds 0.02 MiB: the driver
    # that tests/device/environment puts around an old one keeps a little of each buffer.
    growth = sorted(after - before for before, after in pairwise(held[9:]))
    assert sum(growth) < 4 * MIB, growth
    assert median(growth) < MIB / 4, growth
