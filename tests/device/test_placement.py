"""`-ngl auto` on a device, and loads that do not fit there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.llama.devices import Device
from ggufspec.standin.embedded import embedded_draft, embedded_target

MIB = 2**20


@dataclass(frozen=True)
class Loaded:
    """What a process printed that loaded a model. n_failed: buffers that were refused.

    n_left: how much was on the device at the first buffer after each refused one, without it.
    """

    n_gpu_layers: int
    placement: str | None
    n_ctx: int
    text: str
    n_failed: int
    n_left: list[float]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 MB of weights in 16 layers, which 32 MB of KV cache belong to for 4096 tokens."""
    path = tmp_path_factory.mktemp("large") / "model.gguf"
    return tiny.write_llama(path, n_embd=512, n_layer=16, n_ctx_train=65536)


def load_where(path: Path, n_free: int, n_largest: int, **options: Any) -> Loaded:
    """Load a model where `n_free` MiB are said to be free, but no buffer may exceed `n_largest`."""
    script = """
        import json, sys
        import ggufspec
        from ggufspec.engine import fit
        from ggufspec.placement.speeds import Gpu
        path, n_free, options = json.loads(sys.argv[1])
        fit.gpus = lambda: (Gpu("GPU", n_free),)
        with ggufspec.load(path, tuned=False, n_threads=1, **options) as engine:
            text = engine.generate("the", temperature=0, max_tokens=6, ignore_eos=True).text
            found = engine.pair.target.model.n_gpu_layers, engine.placement, engine.n_ctx, text
        print(json.dumps(found))
    """
    asked = json.dumps([str(path), n_free * MIB, {"n_ctx": 4096, **options}])
    variables = {
        "GGML_VK_FORCE_MAX_BUFFER_SIZE": str(n_largest * MIB),
        "GGML_VK_MEMORY_LOGGER": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), asked],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    n_failed, is_next, held, left = 0, False, 0.0, []
    for line in done.stderr.splitlines():
        if "Device memory allocation of size" in line:
            n_failed, is_next = n_failed + 1, True
        elif matched := _CHANGED.search(line):
            if is_next and matched[1] == "+":
                left.append(held)
                is_next = False
            held = float(matched[2]) * _UNITS[matched[3]]
    assert held == 0, "all is given back at the end"
    return Loaded(*json.loads(done.stdout), n_failed, left)


def needs_vulkan(device: Device) -> None:
    if not device.name.startswith("Vulkan"):
        pytest.skip("only the Vulkan backend has a variable that limits buffers")


_CHANGED = re.compile(r"Vulkan0: ([+-]).*Total device: ([\d.]+) (B|KiB|MiB|GiB)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def test_auto_chooses_the_device_and_says_so(large: Path) -> None:
    texts = []
    for n_layers in ("auto", 0):
        with ggufspec.load(large, n_gpu_layers=n_layers, n_ctx=256, tuned=False) as engine:
            texts.append(engine.generate("the", temperature=0, max_tokens=6, ignore_eos=True).text)
            assert engine.pair.target.model.n_gpu_layers == (17 if n_layers == "auto" else 0)
            assert str(engine.placement).startswith("17 of 17" if n_layers == "auto" else "0 of 17")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("n_largest", "n_ctx", "least", "most"),
    [
        (1000, 4096, 17, 17),
        (100, 4096, 1, 11),  # the weights of all layers are larger
        (200, 32768, 1, 13),  # their KV cache is
        (20, 4096, 0, 0),  # any plan is
    ],
)
def test_a_load_that_does_not_fit_is_planned_again_with_less(
    n_largest: int, n_ctx: int, least: int, most: int, large: Path, device: Device
) -> None:
    needs_vulkan(device)
    n_free = 620 if n_ctx == 4096 else 950
    found = load_where(large, n_free, n_largest, n_ctx=n_ctx)
    assert least <= found.n_gpu_layers <= most
    assert str(found.placement).startswith(
        f"{found.n_gpu_layers} of 17 layers of the target on the GPU"
    )
    assert found.n_ctx == n_ctx
    assert bool(found.n_failed) == (n_largest < 1000)
    assert not any(found.n_left), "a failed attempt leaves nothing on the device"
    assert found.text == load_where(large, 0, 1000, n_ctx=n_ctx).text


def test_prompts_are_read_on_the_cpu_where_the_device_has_no_room(
    large: Path, device: Device
) -> None:
    needs_vulkan(device)
    found = load_where(large, 0, 8, n_gpu_layers=0, n_gpu_layers_draft=0)
    assert found.n_failed == 1
    assert found.text == load_where(large, 0, 1000, n_gpu_layers=0, n_gpu_layers_draft=0).text


@pytest.mark.parametrize("which", ["n_gpu_layers", "n_gpu_layers_draft"])
def test_a_cache_with_too_large_tensors_for_the_device(which: str, device: Device) -> None:
    """Vulkan has a largest tensor, 128 MiB with the software device; ggml ended the process."""
    needs_vulkan(device)
    if "llvmpipe" not in device.description:
        pytest.skip("other drivers take larger tensors")
    layers = {"n_gpu_layers": 0, "n_gpu_layers_draft": 0, which: -1}
    pair = str(embedded_target()), str(embedded_draft())
    with pytest.raises(ggufspec.OutOfMemoryError, match=r"1,000,000 tokens .* than Vulkan0"):
        ggufspec.load(*pair, n_ctx=1_000_000, tuned=False, **layers)
    with ggufspec.load(*pair, n_ctx=200_000, tuned=False, **layers) as engine:
        assert engine.n_ctx == 200_000
