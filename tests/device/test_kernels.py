"""Layers on the CPU with ggufspec's kernels, while the device reads prompts with them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from device.conftest import ROUNDING, assert_greedy
from small import small

import ggufspec
from ggufspec import standin
from ggufspec.llama import devices, kernels
from ggufspec.llama.model import Model
from ggufspec.models.quantization import header_of


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    standin.write(standin.plan(header_of("m", small(), "Q4_0")), path)
    return path


@pytest.mark.parametrize(("n_gpu_layers", "is_room"), [(0, True), (2, True), (0, False)])
def test_prompts_and_answers_are_those_of_llama_cpps_kernels(
    n_gpu_layers: int, is_room: bool, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"n_gpu_layers": n_gpu_layers, "n_ctx": 512, "tuned": False}
    monkeypatch.setenv(kernels.VARIABLE, "on")
    n_bytes = quantized.stat().st_size
    free = 10 * n_bytes if is_room else 3 * n_bytes // 2
    monkeypatch.setattr(devices, "free_memory", lambda: free)
    with ggufspec.load(quantized, **how) as own:  # type: ignore[arg-type]
        assert own.pair.target.model.kernels.types
        assert own.pair.target.model.kernels.both == is_room
        monkeypatch.setenv(kernels.VARIABLE, "off")
        with ggufspec.load(quantized, **how) as theirs:  # type: ignore[arg-type]
            for n_prompt in (8, 90):  # from 32 on, the device computes
                prompt = [300 + 7 * i % 900 for i in range(n_prompt)]
                text = own.generate(
                    prompt, temperature=0, max_tokens=12, ignore_eos=True, drafter="none"
                )
                assert_greedy(text, theirs, prompt, ROUNDING["f16"])


def test_what_is_on_the_device_has_no_kernels(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "on")
    with closing(Model(quantized)) as model:
        assert not model.kernels.types
