"""Predicted bytes, against those that llama.cpp reports when it only pretends to allocate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import llama_cpp
import paper
import pytest
import tiny

from ggufspec.llama.context_options import FLASH_ATTENTION, KV_TYPES
from ggufspec.llama.log import listening, log
from ggufspec.models.header import Header, read_header
from ggufspec.models.named_shape import header_of_name
from ggufspec.models.shape import Layer, ModelShape, shape_of
from ggufspec.placement.memory import (
    VALUE_BYTES,
    CacheParams,
    ModelMemory,
    compute_bytes,
    n_rollback,
)

_MIB = re.compile(r"\b(compute buffer size|size|buffer size) *= *([\d.]+) MiB")


class Told:
    """Bytes that llama.cpp reports it would allocate."""

    def __init__(self, lines: list[str]) -> None:
        self.compute = sum(_mib(line) for line in lines if "compute buffer size" in line)
        self.caches = sum(
            _mib(line)
            for line in lines
            if re.search(r"(kv_cache|memory_recurrent)\S*: +size = ", line)
        )


def _mib(line: str) -> float:
    matched = _MIB.search(line)
    return float(matched[2]) * 2**20 if matched else 0.0


@contextmanager
def pretended(path: Path) -> Iterator[int]:
    params = llama_cpp.llama_model_default_params()
    params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
    with listening():
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, log.complaints()
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def told(model: int, caches: CacheParams, caplog: pytest.LogCaptureFixture) -> Told:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = caches.n_ctx * caches.n_slots, caches.n_slots
    params.n_outputs_max, params.n_rs_seq = caches.n_outputs, caches.n_draft_max
    params.n_batch = params.n_ubatch = caches.n_batch
    params.type_k, params.type_v = KV_TYPES[caches.type_k], KV_TYPES[caches.type_v]
    params.flash_attn_type = FLASH_ATTENTION["on" if caches.flash_attention else "off"]
    caplog.clear()
    with caplog.at_level("DEBUG", logger="ggufspec.llama"), listening():
        context = llama_cpp.llama_init_from_model(model, params)
    assert context
    llama_cpp.llama_free(context)
    return Told([record.getMessage() for record in caplog.records])


def shape(path: Path) -> ModelShape:
    return shape_of(read_header(path))


@pytest.mark.parametrize("name", ["LLAMA_3_70B", "CODELLAMA_7B"])
def test_memory_of_real_shapes_is_within_2_percent(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = paper.write(tmp_path / "model.gguf", getattr(paper, name))
    known = shape(path)
    with pretended(path) as model:
        for caches in (
            CacheParams(512, 512),
            CacheParams(8192, 2048),
            CacheParams(8192, 512, flash_attention=False),
            CacheParams(4096, 512, "q8_0", "q4_0"),
            CacheParams(4096, 64, n_rows=64),
        ):
            found = told(model, caches, caplog)
            assert layer_caches(known, caches) == pytest.approx(found.caches, rel=0.001), caches
            share = 0.02 if caches.type_k == "f16" else 0.1
            predicted = compute_bytes(known, caches).alone
            assert predicted == pytest.approx(found.compute, rel=share), caches


@pytest.mark.parametrize(
    "of", [paper.QWEN_3_30B, header_of_name("gpt-oss-20b-MXFP4"), paper.GLM_4_5_AIR]
)
def test_buffers_of_mixtures_are_within_5_percent(
    of: Header, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each token has a vector for each of its experts."""
    path = paper.write(tmp_path / "model.gguf", of)
    known = shape(path)
    with pretended(path) as model:
        for caches in (
            CacheParams(16384, 512),
            CacheParams(4096, 512, flash_attention=False),
        ):
            found = told(model, caches, caplog)
            assert layer_caches(known, caches) == pytest.approx(found.caches, rel=0.001), caches
            predicted = compute_bytes(known, caches).alone
            assert predicted == pytest.approx(found.compute, rel=0.05), caches


@pytest.mark.parametrize(
    "write",
    [tiny.write_llama, tiny.write_swa, tiny.write_mamba, tiny.write_rwkv, tiny.write_hybrid],
)
def test_caches_of_every_kind_of_memory_are_known(
    write: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "model.gguf")
    caches = CacheParams(1000, 64)
    with pretended(path) as model:
        found = told(model, caches, caplog)
    # What llama.cpp reports has two digits of a MiB.
    assert layer_caches(shape(path), caches) == pytest.approx(found.caches, abs=0.011 * 2**20)
    assert found.caches or write is not tiny.write_llama


@pytest.mark.parametrize(("n_slots", "n_draft_max"), [(1, 0), (4, 3)])
@pytest.mark.parametrize("write", [tiny.write_hybrid, tiny.write_qwen35])
def test_memory_of_hybrid_models_is_within_5_percent(
    write: Callable[..., Path],
    n_draft_max: int,
    n_slots: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write(tmp_path / "model.gguf", n_embd=64)
    known, caches = shape(path), CacheParams(256, 64, n_slots=n_slots, n_draft_max=n_draft_max)
    with pretended(path) as model:
        found = told(model, caches, caplog)
    assert layer_caches(known, caches) == pytest.approx(found.caches, abs=0.011 * 2**20)
    whole = known.n_bytes + found.caches + found.compute
    assert ModelMemory(known, caches).use(0).host == pytest.approx(whole, rel=0.05)


def test_states_for_roll_back_take_a_share_of_the_memory() -> None:
    def kept(n_bytes: int, n_state_bytes: int, n_slots: int = 1, n_draft_max: int = 16) -> int:
        layer = Layer(n_bytes, n_bytes, 0, n_state_bytes)
        made = replace(_simple(), layers=(layer,), can_roll_back=True)
        return n_rollback(made, n_draft_max, n_slots)

    large, state = 16 * 2**30, 150 * 2**20  # as of Qwen 3.6 27B
    assert kept(large, state) == 8
    assert kept(large, state, n_slots=2) == 6
    assert kept(large, state, n_slots=4) == 3
    assert kept(large, state, n_slots=64) == 0
    assert kept(large, state, n_draft_max=4) == 4
    assert kept(2**30, state) == 3
    assert n_rollback(_simple(), 16, 1) == 0
    assert kept(large, 0) == 0


def layer_caches(known: ModelShape, caches: CacheParams) -> int:
    """What the layers and the output take beside their weights."""
    n_weights = known.n_output_bytes + sum(layer.n_bytes for layer in known.layers)
    return sum(ModelMemory(known, caches).units) - n_weights


def test_layers_move_from_the_host_to_the_gpu() -> None:
    sizes = ModelMemory(_simple(), CacheParams(256, 64))
    none, some, everything = (sizes.use(n, has_gpu=True) for n in (0, 2, sizes.n_units))
    some_buffers, all_buffers = (sizes.gpu_buffers(n) for n in (2, sizes.n_units))
    assert none.gpu == sizes.gpu_buffers(0) > 0, "prompts are read there"
    assert some.gpu == sizes.units[0] + sizes.units[1] + some_buffers, "the output goes first"
    assert some.gpu - some_buffers + some.host == none.host
    assert everything.gpu == sum(sizes.units) + all_buffers
    assert all_buffers < some_buffers, "no copies of the host's weights"
    assert sizes.use(0).gpu == 0
    assert sizes.use(0).host > none.host, "without a GPU, the host has all buffers"


def test_weights_on_the_host_are_counted_as_packed_for_our_kernels() -> None:
    plain, packed = (
        ModelMemory(replace(_simple(), matrix_type=type_), CacheParams(256, 64))
        for type_ in ("Q4_0", "Q3_K")
    )
    known = _simple()
    n_bytes = known.n_output_bytes + sum(layer.n_bytes for layer in known.layers)
    assert packed.use(0).host - plain.use(0).host == pytest.approx(0.036 * n_bytes, abs=1)
    assert packed.use(plain.n_units).host == plain.use(plain.n_units).host


def test_rows_of_logits_and_the_copy_of_a_tied_embedding_are_counted() -> None:
    few, many = (ModelMemory(_simple(), CacheParams(256, 64, n_rows=n)).use(7) for n in (8, 20))
    assert many.host - few.host == 12 * 4 * _simple().n_vocab
    tied = ModelMemory(replace(_simple(), n_output_bytes=4300, is_tied=True), CacheParams(256, 64))
    untied = ModelMemory(replace(_simple(), n_output_bytes=4300), CacheParams(256, 64))
    assert untied.use(0).host - tied.use(0).host == _simple().n_input_bytes
    assert untied.use(1) == tied.use(1), "the GPU has a copy"


def test_several_gpus_are_filled_in_order_with_room_for_buffers() -> None:
    sizes = ModelMemory(_simple(), CacheParams(256, 64))
    layer, output, buffers = sizes.units[1], sizes.units[0], sizes.gpu_buffers(4)
    rooms = [2 * layer + buffers, layer + output + buffers]
    assert sizes.n_fitting(rooms) == 4
    assert sizes.split(4, rooms) == [2, 2]
    assert sizes.split(5, rooms) is None
    assert sizes.n_fitting([rooms[0] - 1, rooms[1]]) == 3
    assert sizes.n_fitting([buffers, 0]) == 0
    assert sizes.split(0, [buffers - 1]) is None, "prompts would be read there"
    assert sizes.n_fitting([]) == 0
    whole = sizes.gpu_buffers(sizes.n_units, 2)
    assert sizes.n_fitting([5 * layer + whole, layer + output + whole]) == sizes.n_units


def test_other_machines_share_what_gpus_here_leave() -> None:
    sizes = ModelMemory(_simple(), CacheParams(256, 64))
    layer, output, buffers = sizes.units[1], sizes.units[0], sizes.gpu_buffers(1)
    here = 2 * layer + output + buffers
    elsewhere = 100 * layer + buffers
    whole = sizes.gpu_buffers(sizes.n_units)
    all_here, far = 2 * layer + output + whole, 100 * layer + whole
    assert sizes.split(7, [far, far, all_here], 2) == [2, 2, 3]
    assert sizes.split(7, [far, 300 * layer + whole, all_here], 2) == [1, 3, 3]
    assert sizes.split(3, [elsewhere, elsewhere, here], 2) == [0, 0, 3], "a network costs time"
    assert sizes.split(7, [0, far, all_here], 2) == [0, 4, 3]
    assert sizes.split(7, [far], 1) == [7]
    narrow = [layer + buffers, layer + buffers, here]
    assert sizes.split(6, narrow, 2) is None
    assert sizes.n_fitting(narrow, 2) == 5
    assert sizes.split(5, narrow, 2) == [1, 1, 3]
    assert sizes.n_fitting([0], 1) == 0


def test_the_size_of_every_kv_type_is_known() -> None:
    assert set(VALUE_BYTES) == set(KV_TYPES)
    assert VALUE_BYTES["f16"] == 2
    assert VALUE_BYTES["q8_0"] == 34 / 32


def _simple() -> ModelShape:
    of_model = (300, 4000, 16, 32, 4, 4, 100, 512, 20_000)
    return ModelShape("m", (Layer(10**6, 10**6, 8),) * 6, *of_model, n_matrix_bytes=500_000)
