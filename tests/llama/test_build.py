"""What a build lacks for a GPU is said with what to do; what it has is read from llama.cpp."""

from __future__ import annotations

import pytest

from ggufspec.llama import build, devices
from ggufspec.llama.build import advice
from ggufspec.llama.devices import Device
from ggufspec.llama.install import VisibleGpu, build_command

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
    assert line.endswith(f"\n  {build_command(['RPC', gpu.backend])}")
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
