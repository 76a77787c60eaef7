"""What the processor has is read from the operating system, or known from the own kernels."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ggufspec import _native
from ggufspec.llama.build import of_processor, slow_without, unused_sets


def test_arm_on_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp i8mm\nCPU part\t: 0\n")
    assert of_processor(path) == ["DOTPROD", "MATMUL_INT8", "FP16_VA"]


def test_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    printed = "hw.optional.neon: 1\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n"
    done = subprocess.CompletedProcess([], 0, printed, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert of_processor() == ["DOTPROD"]


def test_elsewhere_those_of_the_own_kernels_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    for kernels, known in (
        ([], []),
        (["avx2"], ["AVX", "AVX2", "FMA", "F16C"]),
        (["avx512_vnni", "avx2"], ["AVX", "AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI"]),
    ):
        monkeypatch.setattr(_native, "kernel_instructions", lambda found=kernels: found)
        assert of_processor(tmp_path / "none") == known


def test_narrow_products_do_not_matter_beside_wide_ones() -> None:
    processor = ["AVX2", "AVX_VNNI", "AVX512", "AVX512_VNNI"]
    assert unused_sets(["AVX2", "AVX512", "AVX512_VNNI"], processor) == []
    assert unused_sets(["AVX2"], processor[:2]) == ["AVX_VNNI"]


def test_a_few_operations_are_no_reason_for_a_warning() -> None:
    assert not slow_without(["AVX512_BF16", "SVE"])
    assert slow_without(["AVX512_BF16", "AVX512"])
    assert not slow_without([])
