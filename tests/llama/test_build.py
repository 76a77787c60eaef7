"""What a build lacks for a GPU is said with what to do; what it has is read from llama.cpp."""

from __future__ import annotations

import platform
import sys
from functools import partial
from pathlib import Path

import llama_cpp
import pytest

from ggufspec.llama import build, devices, threadpool
from ggufspec.llama.build import advice, of_processor, processor_advice
from ggufspec.llama.devices import Device
from ggufspec.llama.install import VisibleGpu, build_command, wheel_command

CPU = Device("CPU", "AMD EPYC", 0, 1000, 1, 2000)
CARD = Device("CUDA0", "NVIDIA GeForce RTX 4090", 1, 1000, 2, 2000)
SOFTWARE = Device("Vulkan0", "llvmpipe (LLVM 19.1.7, 256 bits)", 1, 1000, 3, 2000)
NVIDIA = VisibleGpu("NVIDIA GeForce RTX 4090", "CUDA")
INTEL = VisibleGpu("an Intel GPU (/dev/dri/renderD128)", "Vulkan")


def test_a_build_that_uses_the_gpu_needs_no_advice() -> None:
    assert advice({"CUDA": 1, "CPU": 1}, [CARD, CPU], [NVIDIA], {}) == []
    integrated = Device("Vulkan0", "Iris", 2, 1000, 4, 2000)
    assert advice({"Vulkan": 1, "CPU": 1}, [integrated, CPU], [INTEL, NVIDIA], {}) == []


def test_a_software_device_is_called_slower() -> None:
    (line,) = advice({"Vulkan": 1, "CPU": 1}, [SOFTWARE, CPU], [], {})
    assert line.startswith("Vulkan0 is a software device: it computes on the CPU, and is slower")


def test_a_gpu_is_named_beside_a_software_device() -> None:
    lines = advice({"Vulkan": 1, "CPU": 1}, [SOFTWARE, CPU], [NVIDIA], {})
    assert "is a software device" in lines[0]
    assert lines[1].startswith(f"{NVIDIA.name} is there, but this build cannot use it")
    assert len(lines) == 2


def test_a_build_without_backends_for_gpus() -> None:
    lines = advice({"RPC": 0, "CPU": 1}, [CPU], [], {})
    assert lines[0] == "built without CUDA, Metal, Vulkan: no layers can be offloaded"
    assert "-DGGML_VULKAN=on" in lines[1]


@pytest.mark.parametrize(
    ("gpu", "needed"), [(NVIDIA, "the CUDA toolkit (nvcc)"), (INTEL, "libvulkan-dev, glslc")]
)
def test_a_gpu_that_the_build_cannot_use_is_named_with_the_command(
    gpu: VisibleGpu, needed: str
) -> None:
    lines = advice({"RPC": 0, "CPU": 1}, [CPU], [gpu], {})
    (line,) = (line for line in lines if line.startswith(f"{gpu.name} is there, but this build"))
    assert f"Install {needed}" in line
    assert f"\n  {build_command(['RPC', gpu.backend])}" in line
    if wheel := wheel_command(gpu.backend):
        assert line.endswith(f"\nor install a prebuilt wheel, without a compiler:\n  {wheel}")
    assert len(lines) == 2, "no other backend is named"


@pytest.mark.parametrize(
    ("backend", "what"),
    [("Vulkan", "mesa-vulkan-drivers"), ("CUDA", "nvidia-smi"), ("SYCL", "dri")],
)
def test_a_backend_without_a_device_names_its_driver(backend: str, what: str) -> None:
    (line,) = advice({backend: 0, "CPU": 1}, [CPU], [], {})
    assert line.startswith(f"built with {backend}, but it found no device: no layers can be ")
    assert what in line
    assert "try without" not in line


def test_a_variable_that_may_hide_the_device_is_named() -> None:
    (line,) = advice({"CUDA": 0, "CPU": 1}, [CPU], [], {"CUDA_VISIBLE_DEVICES": "7"})
    assert "CUDA_VISIBLE_DEVICES=7 may hide it: try without. Install" in line


def test_a_device_file_that_cannot_be_opened_is_named() -> None:
    lines = advice({"Vulkan": 0, "CPU": 1}, [CPU], [INTEL._replace(closed="/dev/dri/a")], {})
    assert lines[1].startswith(
        "/dev/dri/a cannot be opened by this user: add the user to the group"
    )


def test_a_build_for_an_older_processor_is_told_with_the_command() -> None:
    assert processor_advice([], ["CPU"], None) == []
    (line,) = processor_advice(["AVX512", "AVX512_VNNI", "AMX_INT8"], ["RPC", "CPU"], None)
    assert line.startswith(
        "llama.cpp does not use AVX512, AVX512_VNNI and AMX_INT8 of this processor: "
    )
    assert "Prompts and texts take longer." in line
    assert line.splitlines()[1].startswith('  CMAKE_ARGS="-DGGML_RPC=on -DGGML_NATIVE=on')
    (line,) = processor_advice(["AVX512"], ["CPU"], "avx512_vnni")
    assert "ggufspec's kernels (avx512_vnni) multiply weights where they are faster; every" in line


def planted(monkeypatch: pytest.MonkeyPatch, built: str, cpuinfo: Path, flags: str) -> None:
    """A build, as llama.cpp describes it, on a processor, as Linux describes it."""
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", built.encode)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(build, "of_processor", partial(of_processor, cpuinfo))


HASWELL = "avx f16c fma avx2 bmi2"
ZEN_5 = f"{HASWELL} avx512f avx512bw avx_vnni avx512_vnni avx512_bf16"
AVX2_BUILD = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | OPENMP = 1 | "


@pytest.mark.parametrize(
    ("built", "flags", "missing"),
    [
        (AVX2_BUILD, HASWELL, []),
        (AVX2_BUILD, ZEN_5, ["AVX_VNNI", "AVX512", "AVX512_VNNI", "AVX512_BF16"]),
        ("CPU : SSE3 = 1 | OPENMP = 1 | ", HASWELL, ["AVX", "AVX2", "FMA", "F16C"]),
        (f"{AVX2_BUILD}AVX512 = 1 | AVX512_VNNI = 1 | ", ZEN_5, ["AVX512_BF16"]),
        (f"CUDA : ARCHS = 890 | {AVX2_BUILD}", f"{HASWELL} avx_vnni", ["AVX_VNNI"]),
        ("", ZEN_5, []),
    ],
)
def test_what_a_build_does_not_use_of_the_processor(
    built: str,
    flags: str,
    missing: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted(monkeypatch, built, tmp_path / "cpuinfo", flags)
    assert build.missing_sets() == missing


def test_a_build_that_picks_its_library_at_run_time_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, AVX2_BUILD, tmp_path / "cpuinfo", ZEN_5)
    monkeypatch.setattr(devices, "library_folders", lambda: [tmp_path])
    (tmp_path / "libggml-cpu-haswell.so").touch()
    assert build.missing_sets() != [], "one library is no choice"
    (tmp_path / "libggml-cpu-zen4.so").touch()
    assert build.missing_sets() == []


def test_a_build_without_openmp_is_slower_only_where_no_threads_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = AVX2_BUILD.replace("OPENMP", "LLAMAFILE")
    planted(monkeypatch, built, tmp_path / "cpuinfo", HASWELL)
    for is_kept, missing in ((True, []), (False, ["OPENMP"])):
        monkeypatch.setattr(threadpool, "are_needed", lambda kept=is_kept: kept)
        assert build.missing_sets() == missing


def test_a_slow_build_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path / "cache"))
    planted(monkeypatch, AVX2_BUILD, tmp_path / "cpuinfo", HASWELL)
    assert build.notice() is None
    planted(monkeypatch, AVX2_BUILD, tmp_path / "cpuinfo", ZEN_5)
    assert "does not use AVX_VNNI, AVX512, AVX512_VNNI and AVX512_BF16 of" in str(build.notice())
    assert build.notice() is None


def test_the_loaded_build_has_a_processor_and_its_instruction_sets() -> None:
    assert build.backends()["CPU"] == 1
    assert "CPU" in build.features()
    names = [device["type"] for device in build.facts()["devices"]]
    assert names.count("CPU") == 1


def test_a_backend_that_could_not_start_counts_as_built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        ggml_backend_vk_reg = None

    monkeypatch.setattr(devices, "libraries", lambda: [Library()])
    assert build.backends() == {"Vulkan": 0}
    assert build.why_no_gpu() == "llama.cpp's Vulkan backend found no GPU"
    monkeypatch.setattr(devices, "libraries", lambda: [object()])
    assert build.why_no_gpu() == "this build of llama.cpp has no GPU backend"
