"""What a build lacks is said with the command that builds one; what it has, llama.cpp tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from ggufspec import _native
from ggufspec.llama import build, devices, install, threadpool
from ggufspec.llama.build import advice, processor_advice
from ggufspec.llama.devices import Device
from ggufspec.llama.install import build_command, load_error

CPU = Device("CPU", "AMD EPYC", 0, 1000, 1, 2000)
CARD = Device("CUDA0", "NVIDIA GeForce RTX 4090", 1, 1000, 2, 2000)
SOFTWARE = Device("Vulkan0", "llvmpipe (LLVM 19.1.7, 256 bits)", 1, 1000, 3, 2000)
LIBRARY = Path(str(llama_cpp.llama_cpp._lib._name))
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="about the loader of Linux")


@pytest.mark.parametrize(
    ("built", "found", "start", "inside"),
    [
        ({"CUDA": 1, "CPU": 1}, [CARD, CPU], None, ""),
        ({"Vulkan": 1, "CPU": 1}, [SOFTWARE, CPU], "Vulkan0 is a software device: it com", "slow"),
        ({"SYCL": 0, "CPU": 1}, [CPU], "built with SYCL, but it found no device", "may hide it"),
        (
            {"RPC": 0, "CPU": 1},
            [CPU],
            "built without CUDA, Metal, Vul",
            '\n  CMAKE_ARGS="-DGGML_RPC',
        ),
    ],
)
def test_a_gpu_that_is_not_used(
    built: dict[str, int], found: list[Device], start: str | None, inside: str
) -> None:
    lines = advice(built, found)
    assert [line.startswith(start or "") and inside in line for line in lines] == [True] * bool(
        start
    )


def test_a_build_for_an_older_processor_is_told_with_the_command() -> None:
    assert processor_advice([], None) == []
    (line,) = processor_advice(["AVX512", "AVX512_VNNI", "OPENMP"], None)
    assert line.startswith("llama.cpp does not use AVX512, AVX512_VNNI and OPENMP of this process")
    assert "Prompts and texts take longer." in line
    assert "-DGGML_NATIVE=on" in line.splitlines()[1]
    (line,) = processor_advice(["AVX512"], "avx512_vnni")
    assert "ggufspec's kernels (avx512_vnni) multiply weights where they are faster; every" in line


AVX2 = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | OPENMP = 1 | "
ZEN_5 = ["avx512_vnni", "avx_vnni", "avx2"]


def plant(monkeypatch: pytest.MonkeyPatch, built: str, processor: list[str]) -> None:
    """A build, as llama.cpp describes it, on a processor, as the extension does."""
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", built.encode)
    monkeypatch.setattr(_native, "kernel_instructions", lambda: processor)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.parametrize(
    ("built", "processor", "missing"),
    [
        (f"CUDA : ARCHS = 890 | {AVX2}", ["avx2"], []),
        (AVX2, ZEN_5, ["AVX_VNNI", "AVX512", "AVX512_VNNI"]),
        (f"{AVX2}AVX512 = 1 | AVX512_VNNI = 1 | ", ZEN_5, []),
        ("CPU : NEON = 1 | OPENMP = 1 | ", ["neon_dotprod"], ["DOTPROD"]),
        ("", ZEN_5, []),
    ],
)
def test_what_a_build_does_not_use_of_the_processor(
    built: str, processor: list[str], missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, built, processor)
    assert build.missing_sets() == missing


def test_a_build_that_picks_its_library_at_run_time_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, AVX2, ZEN_5)
    monkeypatch.setattr(devices, "library_folders", lambda: [tmp_path])
    (tmp_path / "libggml-cpu-haswell.so").touch()
    assert build.missing_sets() != [], "one library is no choice"
    (tmp_path / "libggml-cpu-zen4.so").touch()
    assert build.missing_sets() == []


def test_a_build_without_openmp_is_slower_only_where_no_threads_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, AVX2.replace("OPENMP", "LLAMAFILE"), ["avx2"])
    for is_kept, missing in ((True, []), (False, ["OPENMP"])):
        monkeypatch.setattr(threadpool, "are_needed", lambda kept=is_kept: kept)
        assert build.missing_sets() == missing


def test_a_slow_build_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path / "cache"))
    plant(monkeypatch, AVX2, ["avx2"])
    assert build.notice() is None
    plant(monkeypatch, AVX2, ZEN_5)
    assert "does not use AVX_VNNI, AVX512 and AVX512_VNNI of this" in str(build.notice())
    assert build.notice() is None


def test_the_facts_name_one_processor() -> None:
    facts = build.facts()
    assert [device["type"] for device in facts["devices"]].count("CPU") == 1
    assert facts["backends"]["CPU"] == 1
    assert "CPU" in facts["features"]


def test_a_backend_that_could_not_start_counts_as_built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        ggml_backend_vk_reg = None

    monkeypatch.setattr(devices, "libraries", lambda: [Library()])
    assert build.backends() == {"Vulkan": 0}
    assert build.why_no_gpu() == "llama.cpp's Vulkan backend found no GPU"
    monkeypatch.setattr(devices, "libraries", lambda: [object()])
    assert build.why_no_gpu() == "this build of llama.cpp has no GPU backend"


# How it is installed


@pytest.mark.parametrize(
    ("backends", "flags"),
    [
        (["CPU", "RPC", "Vulkan", "RPC"], 'CMAKE_ARGS="-DGGML_RPC=on -DGGML_VULKAN=on" '),
        (["ROCm", "Metal"], 'CMAKE_ARGS="-DGGML_HIP=on -DGGML_METAL=on" '),
        (["CPU"], ""),
    ],
)
def test_the_command_builds_all_backends_for_this_interpreter(
    backends: list[str], flags: str
) -> None:
    command = build_command(backends)
    assert command.startswith(f"{flags}{sys.executable} -m pip install --force-reinstall ")
    assert command.endswith(f" llama-cpp-python=={llama_cpp.__version__}")


def test_a_package_that_is_not_installed() -> None:
    error = load_error(ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp"))
    assert str(error).startswith("llama-cpp-python is not installed; build llama-cpp-python for ")
    assert "https://abetlen.github.io/llama-cpp-python/whl/cpu" in str(error)


@on_linux
def test_a_build_that_cannot_be_loaded(tmp_path: Path) -> None:
    data = LIBRARY.read_bytes()
    replaced, by = b"libggml.so.0", b"libgomp.so.7"
    assert replaced in data
    (tmp_path / LIBRARY.name).write_bytes(data.replace(replaced, by))
    target = Path(install.__file__).parents[1] / "standin/classics-target.gguf"
    for arguments in (["devices"], ["run", "-m", str(target), "-p", "a"]):
        done = subprocess.run(
            [sys.executable, "-m", "ggufspec", *arguments],
            env={**os.environ, "LLAMA_CPP_LIB_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("ggufspec: llama.cpp cannot be loaded (Failed to load shared")
        assert "libgomp.so.7: cannot open shared object file" in done.stderr
        assert build_command(()) in done.stderr
        assert "Traceback" not in done.stderr
