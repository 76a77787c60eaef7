"""Experts on the CPU while the rest of their layers is on the device: texts, memory, plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from device.conftest import ALL, ROUNDING, assert_greedy
from device.test_memory import Taken, open_context

import ggufspec
from ggufspec.engine import fit
from ggufspec.errors import OptionError
from ggufspec.llama import kernels
from ggufspec.llama.devices import Device, gpus
from ggufspec.llama.model import Model
from ggufspec.models.gguf_file import DENSE, EXPERTS
from ggufspec.models.header import read_header
from ggufspec.models.shape import shape_of
from ggufspec.placement.memory import CacheParams, ModelMemory
from ggufspec.placement.overrides import on_cpu

MIB = 2**20
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
LOAD: dict[str, Any] = {"n_ctx": 256, "tuned": False}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_moe(tmp_path_factory.mktemp("moe") / "moe.gguf", n_embd=64, n_layer=4)


@pytest.mark.parametrize(
    "how",
    [
        {"n_cpu_moe": -1},
        {"n_cpu_moe": 2},
        {"override_tensor": [r"blk\.[13]\.ffn_(up|down)_exps=CPU"]},
        {"n_cpu_moe": 3, "n_gpu_layers": 2},
    ],
    ids=str,
)
def test_texts_are_those_of_the_device_alone(how: dict[str, Any], mixture: Path) -> None:
    with (
        ggufspec.load(mixture, n_gpu_layers=ALL, n_cpu_moe=0, **LOAD) as whole,
        ggufspec.load(mixture, **{"n_gpu_layers": ALL, **how}, **LOAD) as split,
    ):
        assert split.pair.target.model.overrides
        assert split.pair.target.model.places == whole.pair.target.model.places | {"CPU"}
        for prompt in ("the", "the cat sat on the"):
            for drafter in ("none", "ngram"):
                text = split.generate(prompt, drafter=drafter, **GREEDY)
                assert_greedy(text, whole, prompt, ROUNDING["f16"])


def test_a_draft_can_have_its_experts_on_the_cpu(mixture: Path) -> None:
    how = {"n_gpu_layers": ALL, "n_gpu_layers_draft": ALL, "n_cpu_moe_draft": -1, **LOAD}
    with ggufspec.load(mixture, mixture, **how) as engine:
        assert engine.pair.draft is not None
        assert engine.pair.draft.model.overrides == on_cpu(EXPERTS, -1)
        assert not engine.pair.target.model.overrides
        text = engine.generate("the", n_draft=3, **GREEDY)
        assert text.stats.n_accepted == text.stats.n_drafted > 0


@pytest.mark.parametrize("n_kept", [0, 1, 4])
@pytest.mark.parametrize("pattern", [EXPERTS, DENSE])
def test_memory_is_as_planned(
    pattern: str,
    n_kept: int,
    taken: Callable[..., Taken],
    tmp_path: Path,
) -> None:
    if pattern == EXPERTS:
        path = tiny.write_moe(tmp_path / "moe.gguf", n_embd=256, n_layer=4)
    else:
        path = tiny.write_llama(tmp_path / "dense.gguf", n_embd=512, n_layer=4)
    caches = CacheParams(256, 128, n_draft_max=4)
    found = taken()
    with (
        found.listen(),
        closing(Model(path, overrides=on_cpu(pattern, n_kept), mmap=False)) as model,
        closing(open_context(model, caches)),
    ):
        used = found.use
    predicted = ModelMemory(shape_of(read_header(path)), caches, n_kept).use(5, has_gpu=True)
    assert predicted.gpu == pytest.approx(used.gpu, rel=0.1, abs=2 * MIB)
    assert predicted.host == pytest.approx(used.host, rel=0.1, abs=2 * MIB)


@pytest.fixture
def taken(
    caplog: pytest.LogCaptureFixture, device: Device, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Taken]:
    """With llama.cpp's kernels: ggufspec's pack weights, which devices then cannot read."""
    monkeypatch.setenv(kernels.VARIABLE, "off")
    return lambda: Taken(caplog, device)


def test_layers_that_are_chosen_write_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_moe(tmp_path / "moe.gguf", n_embd=512, n_layer=4, n_experts=32)

    def with_memory(n_free: int) -> None:
        found = tuple(replace(gpu, n_free=n_free, bandwidth=1e12) for gpu in gpus())
        monkeypatch.setattr(fit, "gpus", lambda: found)

    with_memory(2**40)
    with ggufspec.load(path, **LOAD) as whole:
        assert not whole.pair.target.model.overrides
        with_memory(540 * MIB)
        with ggufspec.load(path, **LOAD) as fitted:
            assert "of 5 layers of the target" in (fitted.placement or "")
            text = fitted.generate("the cat", drafter="none", **GREEDY)
            assert_greedy(text, whole, "the cat", ROUNDING["f16"])


def test_a_buffer_type_of_no_device_is_refused_with_those_that_there_are(
    mixture: Path, device: Device
) -> None:
    with pytest.raises(OptionError, match=rf"'CUDA77'; this build .* have .*{device.name}"):
        ggufspec.load(mixture, override_tensor=["exps=CUDA77"], **LOAD)


def test_a_pattern_that_only_python_takes_is_named(mixture: Path) -> None:
    with pytest.raises(OptionError, match=r"with the tensor overrides exps\|\{=CPU"):
        ggufspec.load(mixture, override_tensor=["exps|{=CPU"], n_gpu_layers=0, **LOAD)
