"""These tests run where llama.cpp has a device that is not the CPU; elsewhere all are skipped."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufspec
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.llama.devices import Device, device_memory, offload_devices
from ggufspec.standin.embedded import embedded_draft, embedded_target

ALL = -1  # layers; the embedded target has 6 and its output, which counts as one
ON_CPU = {"n_gpu_layers": 0, "n_gpu_layers_draft": 0}
ON_DEVICE = {"n_gpu_layers": ALL, "n_gpu_layers_draft": ALL}

# With layers on the CPU, passes over 32 tokens and more are computed on the device all the same.
# These are shorter, so that an engine without layers there is a reference of the CPU's own.
PROMPTS = ("Once upon a time", "The prince and the old man went to")

# Logits by which devices may differ, by the type of the KV cache: the kernels round differently.
# Measured with the software device: at most 0.17 (f16, q8_0) and 0.39 (q4_0), where the logits of
# a position have a deviation of 2.8, and those of a wrong one differ by ten.
ROUNDING = {"f16": 0.3, "q8_0": 0.3, "q4_0": 0.8}

LoadPair = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def device() -> Device:
    found = offload_devices()
    if not found:
        pytest.skip("llama.cpp has no device except the CPU: see tests/device/README.md")
    return found[0]


@pytest.fixture(scope="module")
def load() -> Iterator[LoadPair]:
    """The embedded pair with these options; engines are loaded once by each module."""
    made: dict[str, Engine] = {}
    with ExitStack() as stack:

        def find(**how: Any) -> Engine:
            key = repr(sorted(how.items()))
            if key not in made:
                made[key] = stack.enter_context(load_pair(**how))
            made[key].forget()
            return made[key]

        yield find


def flash_attention(device: Device) -> str:
    """ "off" where the device has no flash attention for heads of 32 numbers, as in the pair.

    llama.cpp then computes it on the CPU, and buffers differ. An RPC server with a GPU ends.
    """
    return "off" if device.name.startswith("CUDA") else "auto"


def load_pair(**how: Any) -> Engine:
    options = {"n_ctx": 256, "tuned": False, **how}
    return ggufspec.load(embedded_target(), embedded_draft(), **options)


def logits(
    engine: Engine,
    prompt: str | Sequence[int],
    text: Sequence[int],
    n_together: int = 1,
    whose: str = "target",
) -> Any:
    """Logits before each token of `text`: (n, n_vocab)."""
    tokens = engine.tokenize(prompt)
    pieces = scoring.logits(engine, tokens, text, whose=whose, n_together=n_together)
    return np.concatenate(list(pieces))


def assert_greedy(
    completion: ggufspec.Completion, reference: Engine, prompt: str | Sequence[int], rounding: float
) -> None:
    """Each token is the likeliest one by the logits of `reference`, up to a near-tie.

    If no logit differs by more than `rounding`, the token is at most twice that behind.
    """
    text = list(completion.tokens)
    rows = logits(reference, prompt, text)
    behind = rows.max(axis=1) - rows[np.arange(len(text)), text]
    assert behind.max() <= 2 * rounding, (behind.argmax(), completion.text)


def held_bytes(device: Device) -> int:
    """Bytes that are taken on a device: up to a constant, if not of the software device.

    What is on Mesa's software device is memory of this process, without what malloc keeps after
    it was freed: an arena for each of several threads, of tens of MiB together, which loads fill
    sooner or later.
    """
    if "llvmpipe" in device.description:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return -device_memory(device.pointer)[0]
