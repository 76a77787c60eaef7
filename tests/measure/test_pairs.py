"""The facts of a loaded pair: the same wherever the files lie, others where costs are others."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tiny

import ggufspec
from ggufspec.drafting import profile_store
from ggufspec.engine import fit
from ggufspec.llama import context, devices
from ggufspec.llama.context_options import default_attention
from ggufspec.measure.pairs import pair_key, profile_key
from ggufspec.placement.speeds import Gpu


def facts_of(target: Path, draft: Path | None, **options: Any) -> dict[str, Any]:
    # Attention that is chosen by times is another one beside busy programs.
    fixed = {"n_threads": 1, "flash_attention": "on"}
    with ggufspec.load(target, draft, **{**fixed, **options}) as engine:
        return profile_key(engine.pair.target, engine.pair.draft)


def key_of(target: Path, draft: Path | None, **options: Any) -> str:
    return profile_store.key(facts_of(target, draft, **options))


def test_they_can_be_read(target: Path, draft: Path) -> None:
    found = facts_of(target, draft, n_threads=2, n_threads_draft=1, tuned=False)
    assert json.loads(json.dumps(found)) == found
    assert (found["n_threads"], found["n_threads_draft"]) == (2, 1)
    pair = found["pair"]
    assert pair["target"]["n_params"] > pair["draft"]["n_params"] > 0
    assert "llama" in pair["target"]["description"]
    assert pair["machine"]["llama_cpp_python"] == llama_cpp.__version__
    assert str(target.parent) not in json.dumps(found), "wherever the files lie"


def test_a_copy_of_a_file_is_the_same_model(target: Path, draft: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.gguf"
    shutil.copy(target, copy)
    assert key_of(copy, draft) == key_of(target, draft)
    other = tiny.write_llama(tmp_path / "other.gguf", seed=1)
    assert key_of(other, draft) != key_of(target, draft)


def test_what_costs_depend_on_makes_another_key(target: Path, draft: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"n_threads": 2},
        {"n_threads_draft": 3},
        {"n_ctx_draft": 64},
        {"flash_attention": "off"},
        {"type_k": "f32"},
        {"type_v": "f32"},
    ]
    ways = [{"tuned": False, **way} for way in ways]
    keys = [key_of(target, draft, **way) for way in ways] + [key_of(target, None)]
    assert len(set(keys)) == len(keys)


def test_what_costs_do_not_depend_on_makes_none(target: Path, draft: Path) -> None:
    others = {"n_ctx": 64, "mmap": False, "n_draft_max": 5, "n_batch": 64, "n_gpu_layers": -2}
    assert key_of(target, draft, **others) == key_of(target, draft)


def test_without_a_gpu_it_does_not_matter_how_many_layers_were_meant_for_one(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Library((b"CUDA0", b"NVIDIA H200", 1))
    with ggufspec.load(target, n_threads=1, n_gpu_layers=1) as engine:
        monkeypatch.setattr(devices, "libraries", lambda: [])
        assert engine.pair.target.model.n_gpu_layers == 0
        monkeypatch.setattr(devices, "libraries", lambda: [gpu])
        assert engine.pair.target.model.n_gpu_layers == 1
    monkeypatch.setattr(fit, "gpus", lambda: ())
    for n_layers in (-1, 3, 99):
        with ggufspec.load(target, n_threads=1, n_gpu_layers=n_layers) as engine:
            assert engine.pair.target.model.n_gpu_layers == 3, "two, and the output"


def test_devices_make_another_key_where_they_compute(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Library((b"CUDA0", b"NVIDIA H200", 1), (b"CUDA1", b"NVIDIA H200", 1))
    monkeypatch.setattr(fit, "gpus", lambda: (Gpu("NVIDIA H200", 2**30),) * 2)

    def keys(of_target: int, of_draft: int, **options: Any) -> tuple[str, str]:
        layers = {"n_gpu_layers": of_target, "n_gpu_layers_draft": of_draft}
        loaded = ggufspec.load(target, draft, n_threads=1, tuned=False, **layers, **options)
        with loaded as engine, monkeypatch.context() as patch:
            assert engine.pair.draft is not None
            patch.setattr(devices, "libraries", lambda: [gpus])
            models = engine.pair.target.model, engine.pair.draft.model
            pair = pair_key(*models, engine.pair.target.options)
            return profile_store.key(profile_key(engine.pair.target, engine.pair.draft)), str(pair)

    found = [keys(*layers) for layers in ((0, 0), (1, 0), (-1, 0), (0, -1), (-1, -1), (-1, 1))]
    found += [keys(-1, -1, main_gpu=i) for i in (0, 1)]
    found += [keys(-1, 0, tensor_split=split) for split in ((3, 1), (1, 3))]
    for each in map(list, zip(*found, strict=True)):
        assert len(set(each)) == len(each)
    assert keys(0, 0, main_gpu=1, tensor_split=(3, 1)) == found[0], "no layer is on a device"
    assert keys(-1, 0, main_gpu=1) == found[2], "of the draft, which has none there"


def test_a_file_that_is_gone_meanwhile(target: Path) -> None:
    with ggufspec.load(target, n_threads=1) as engine:
        target.unlink()
        assert profile_key(engine.pair.target, None)["pair"]["target"]["fingerprint"] is None


class Library:
    """The device functions of a ggml with such devices."""

    _name = "libggml.so"

    def __init__(self, *found: tuple[bytes | None, bytes, int]) -> None:
        class Function:
            def __init__(self, call: Any) -> None:
                self.call = call

            def __call__(self, *args: Any) -> Any:
                return self.call(*args)

        def tell_memory(device: int, n_free: Any, n_total: Any) -> None:
            for pointer, n_bytes in ((n_free, 1000 * device), (n_total, 2000 * device)):
                ctypes.cast(pointer, ctypes.POINTER(ctypes.c_size_t)).contents.value = n_bytes

        self.ggml_backend_dev_count = Function(lambda: len(found))
        self.ggml_backend_dev_get = Function(lambda i: i + 1)
        self.ggml_backend_dev_name = Function(lambda device: found[device - 1][0])
        self.ggml_backend_dev_description = Function(lambda device: found[device - 1][1])
        self.ggml_backend_dev_type = Function(lambda device: found[device - 1][2])
        self.ggml_backend_dev_memory = Function(tell_memory)


def test_gpus_are_named_and_processors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library((b"CUDA0", b"NVIDIA H200", 1), (None, b"\xff", 2), (b"CPU", b"AMD", 0))
    monkeypatch.setattr(devices, "libraries", lambda: [object(), library])
    assert devices.gpu_names() == ["CUDA0: NVIDIA H200", ": \N{REPLACEMENT CHARACTER}"]
    assert devices.gpus() == (Gpu("NVIDIA H200", 1000),), "an integrated one only without another"


def test_an_integrated_gpu_serves_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library((b"CPU", b"AMD", 0), (b"Vulkan0", b"Iris", 2), (b"Vulkan1", b"Arc", 2))
    monkeypatch.setattr(devices, "libraries", lambda: [library])
    assert devices.gpus() == (Gpu("Iris", 2000, is_shared=True),)


def test_a_library_that_names_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "libraries", lambda: [object()])
    assert devices.gpu_names() == []


# What a later load takes


def test_a_load_takes_what_was_tuned(target: Path, draft: Path) -> None:
    pair = facts_of(target, draft)["pair"]
    profile_store.remember_settings(pair, profile_store.TunedSettings(3, 2, "off", 256, 64))

    def loaded(**options: Any) -> tuple[int, int, str, int, int]:
        with ggufspec.load(target, draft, n_ctx=200, **options) as engine:
            a, b = engine.pair.target, engine.pair.draft
            assert b is not None
            assert a.options.flash_attention == b.options.flash_attention
            return a.n_threads, b.n_threads, a.options.flash_attention, a.n_batch, b.n_batch

    usual = default_attention()
    assert loaded() == (3, 2, "off", 200, 64), "no larger than the context"
    assert loaded(n_threads=1) == (1, 2, "off", 200, 64)
    assert loaded(n_threads_draft=4, n_batch=128) == (3, 4, "off", 128, 128)
    assert loaded(flash_attention="on") == (3, 2, "on", 200, 64)
    assert loaded(tuned=False) == (context.n_threads_default(), 1, usual, 200, 200)
    assert loaded(tuned=False, type_k="f32") == loaded(type_k="f32"), "of others nothing is known"
    with ggufspec.load(target) as engine:
        assert engine.pair.target.n_threads == context.n_threads_default(), "the pair is another"
