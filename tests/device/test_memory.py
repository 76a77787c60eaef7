"""Predicted bytes on a device and on the host, against the buffers that llama.cpp reports."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import paper
import pytest
import tiny
from device.conftest import flash_attention
from real_models import FILES, VARIABLE

import ggufspec
from ggufspec.llama import kernels
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.devices import Device
from ggufspec.llama.model import Model
from ggufspec.models.gguf_file import EXPERTS
from ggufspec.models.header import Header, read_header
from ggufspec.models.shape import shape_of
from ggufspec.placement.memory import CacheParams, MemoryUse, ModelMemory, n_leaves
from ggufspec.placement.overrides import on_cpu
from ggufspec.placement.plan import PlacementOptions, plan_offload
from ggufspec.placement.speeds import Gpu, Machine
from ggufspec.standin.embedded import embedded_draft, embedded_target

MIB = 2**20
_BUFFER = re.compile(r"(\S+) +(?:model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
USUAL = CacheParams(1024, 512, n_draft_max=16)
VARIED = [
    USUAL,
    replace(USUAL, n_ctx=256),
    replace(USUAL, n_batch=128),
    replace(USUAL, type_k="q8_0", type_v="q8_0"),
    replace(USUAL, flash_attention=False),
    replace(USUAL, n_slots=4),
    replace(USUAL, n_slots=4, n_draft_max=0, n_rows=2),  # as of a draft
]


class Taken:
    """What llama.cpp reports that it takes, from its log."""

    def __init__(self, caplog: pytest.LogCaptureFixture, device: Device) -> None:
        self._caplog, self._device = caplog, device

    @contextmanager
    def listen(self) -> Iterator[None]:
        self._caplog.clear()
        with self._caplog.at_level("INFO", logger="ggufspec.llama"):
            yield

    @property
    def use(self) -> MemoryUse:
        here = there = 0.0
        for line in self._caplog.messages:
            if matched := _BUFFER.search(line):
                n_bytes = float(matched[2]) * MIB
                if matched[1] == self._device.name:
                    there += n_bytes
                else:
                    here += n_bytes
        return MemoryUse(round(there), round(here))


@pytest.fixture(autouse=True, scope="module")
def llama_cpps_kernels() -> Iterator[None]:
    """With ggufspec's, devices read no weights from the host: their buffers are smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.VARIABLE, "off")
        yield


@pytest.fixture
def taken(caplog: pytest.LogCaptureFixture, device: Device) -> Taken:
    return Taken(caplog, device)


def open_context(model: Model, caches: CacheParams) -> Context:
    options = ContextOptions(
        n_ctx=caches.n_ctx,
        n_rows=caches.n_outputs // caches.n_slots,
        n_sequences=caches.n_slots,
        n_batch=caches.n_batch,
        flash_attention="on" if caches.flash_attention else "off",
        type_k=caches.type_k,
        type_v=caches.type_v,
        n_leaves=n_leaves(caches.n_slots, caches.n_draft_max),
        n_rollback=caches.n_draft_max,
    )
    return Context(model, options)


def check(taken: Taken, path: Path, n_gpu_layers: int, caches: CacheParams, share: float) -> None:
    with (
        taken.listen(),
        closing(Model(path, n_gpu_layers=n_gpu_layers, mmap=False)) as model,
        closing(open_context(model, caches)),
    ):
        found = taken.use
    predicted = ModelMemory(shape_of(read_header(path)), caches).use(n_gpu_layers, has_gpu=True)
    assert predicted.gpu == pytest.approx(found.gpu, rel=share, abs=2 * MIB)
    assert predicted.host == pytest.approx(found.host, rel=share, abs=2 * MIB)


@pytest.mark.parametrize("caches", VARIED, ids=str)
@pytest.mark.parametrize("n_gpu_layers", [0, 1, 3, 7])
def test_memory_of_the_embedded_target(
    taken: Taken, n_gpu_layers: int, caches: CacheParams, device: Device
) -> None:
    if flash_attention(device) == "off":
        if caches.type_k != "f16":
            pytest.skip("without flash attention, caches cannot be quantized")
        caches = replace(caches, flash_attention=False)
    # Without a layer there, the device has copies only, in a buffer whose gaps are not known.
    check(taken, embedded_target(), n_gpu_layers, caches, 0.1 if n_gpu_layers else 0.25)


@pytest.mark.parametrize("n_gpu_layers", [0, 2, 4])
def test_memory_of_a_hybrid_model(taken: Taken, n_gpu_layers: int, tmp_path: Path) -> None:
    path = tiny.write_qwen35(tmp_path / "model.gguf", n_embd=64)
    check(taken, path, n_gpu_layers, CacheParams(256, 64, n_draft_max=3), 0.1)


@pytest.mark.parametrize("name", FILES)
def test_memory_of_a_real_model(taken: Taken, name: str, device: Device) -> None:
    path = Path(os.environ.get(VARIABLE) or "").expanduser() / FILES[name]
    if not os.environ.get(VARIABLE) or not path.exists():
        pytest.skip(f"{VARIABLE} names no folder with {path.name}")
    shape = shape_of(read_header(path))
    if "llvmpipe" in device.description and shape.n_vocab > 2**16:
        pytest.skip("the software device takes no output with so many tokens: 128 MiB of a batch")
    for n_gpu_layers in (0, 1, shape.n_layers // 2, shape.n_layers + 1):
        for n_ctx in (512, 4096):
            caches = CacheParams(n_ctx, 512, n_draft_max=16)
            check(taken, path, n_gpu_layers, caches, 0.1 if n_gpu_layers else 0.25)


@pytest.mark.parametrize(
    ("of", "n_gpu_layers", "n_cpu_moe"),
    [
        (paper.LLAMA_3_8B, 0, 0),
        *((paper.CODELLAMA_7B, n, 0) for n in (0, 12, 32, 33)),
        *((paper.QWEN_3_30B, 49, n) for n in (0, 24, 48)),
    ],
    ids=lambda value: value.name if isinstance(value, Header) else str(value),
)
def test_buffers_of_larger_models(
    taken: Taken,
    of: Header,
    n_gpu_layers: int,
    n_cpu_moe: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With their size, as llama.cpp plans them; nothing is allocated."""
    path = paper.write(tmp_path / "model.gguf", of)
    overrides = on_cpu(EXPERTS, n_cpu_moe)
    real = llama_cpp.llama_model_default_params

    def without_memory() -> llama_cpp.llama_model_params:
        params = real()
        params.no_alloc = True
        return params

    monkeypatch.setattr(llama_cpp, "llama_model_default_params", without_memory)
    usual = CacheParams(4096, 512, n_draft_max=16)
    with closing(Model(path, n_gpu_layers=n_gpu_layers, mmap=False, overrides=overrides)) as model:
        for caches in (
            usual,
            replace(usual, n_ctx=512),
            replace(usual, n_ctx=16384),
            replace(usual, n_batch=128),
            replace(usual, type_k="q8_0", type_v="q8_0"),
            replace(usual, n_slots=2),
        ):
            if of is paper.LLAMA_3_8B and caches.n_slots > 1:
                continue  # the software device takes no matrix of the size of its output
            with taken.listen(), closing(open_context(model, caches)):
                found = taken.use
            memory = ModelMemory(shape_of(read_header(path)), caches, n_cpu_moe)
            buffers = memory.gpu_buffers(n_gpu_layers)
            layers = memory.use(n_gpu_layers, has_gpu=True).gpu - buffers
            share = 0.1 if n_gpu_layers else 0.25
            assert layers + buffers == pytest.approx(layers + found.gpu, rel=share), caches


@pytest.mark.parametrize("n_gpu_layers", [0, 3, 7])
@pytest.mark.parametrize("n_gpu_layers_draft", [0, 3])
def test_a_plan_has_the_bytes_of_the_whole_pair(
    taken: Taken, n_gpu_layers: int, n_gpu_layers_draft: int, device: Device
) -> None:
    target, draft, attention = embedded_target(), embedded_draft(), flash_attention(device)
    layers = {"n_gpu_layers": n_gpu_layers, "n_gpu_layers_draft": n_gpu_layers_draft}
    how: dict[str, Any] = {"tuned": False, "mmap": False, "flash_attention": attention, **layers}
    with taken.listen(), ggufspec.load(target, draft, **how) as engine:
        found, n_ctx = taken.use, engine.n_ctx
    plan = plan_offload(
        *(shape_of(read_header(path)) for path in (target, draft)),
        Machine((Gpu("GPU", 2**31),), None),
        PlacementOptions(n_ctx=n_ctx, flash_attention=attention != "off", **layers),
    )
    share = 0.1 if n_gpu_layers else 0.25
    assert sum(plan.gpu_bytes) == pytest.approx(found.gpu, rel=share, abs=2 * MIB)
    assert plan.host_bytes == pytest.approx(found.host, rel=share, abs=2 * MIB)
