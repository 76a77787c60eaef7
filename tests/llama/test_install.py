"""A build that cannot be loaded, and hardware that it cannot use, are named with what to do."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from ggufspec.llama import install
from ggufspec.llama.install import (
    VisibleGpu,
    build_command,
    load_error,
    visible_gpus,
    wheel_command,
)

LIBRARY = Path(str(llama_cpp.llama_cpp._lib._name))
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="about the loader of Linux")


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("backends", "flags"),
    [
        (["CPU", "RPC", "CUDA", "RPC"], 'CMAKE_ARGS="-DGGML_RPC=on -DGGML_CUDA=on" '),
        (["Vulkan"], 'CMAKE_ARGS="-DGGML_VULKAN=on" '),
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


@pytest.mark.parametrize(
    ("system", "machine", "backend", "index"),
    [
        ("linux", "x86_64", "CPU", "cpu"),
        ("linux", "x86_64", "CUDA", "cu124"),
        ("linux", "aarch64", "CPU", "cpu"),
        ("win32", "AMD64", "Vulkan", "vulkan"),
        ("darwin", "arm64", "Metal", "metal"),
        ("linux", "aarch64", "CUDA", None),
        ("darwin", "x86_64", "CPU", None),
        ("linux", "x86_64", "SYCL", None),
    ],
)
def test_prebuilt_wheels_are_named_where_there_are_some(
    system: str, machine: str, backend: str, index: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    command = wheel_command(backend)
    if index is None:
        assert command is None
        return
    assert command is not None
    assert command.startswith(f"{sys.executable} -m pip install --force-reinstall --no-deps ")
    assert "--only-binary llama-cpp-python " in command
    assert f" https://abetlen.github.io/llama-cpp-python/whl/{index} " in command
    assert command.endswith(f" llama-cpp-python=={llama_cpp.__version__}")


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        ("libcuda.so.1: cannot open shared object file: No such", ["libcuda.so.1", "--gpus all"]),
        ("libcudart.so.13: cannot open shared object file: No", ["libcudart.so.13", "CUDA's lib"]),
        ("libvulkan.so.1: cannot open shared object file: No", ["libvulkan.so.1", "libvulkan1)"]),
        ("libodd.so.3: cannot open shared object file: No", ["libodd.so.3", "what it belongs to"]),
        ("dlopen(a.dylib): Library not loaded: @rpath/libomp.dylib", ["libomp.dylib"]),
        ("/lib/libc.so.6: version `GLIBC_2.38' not found", ["GLIBC_2.38"]),
    ],
)
def test_a_missing_library_is_named_with_where_it_comes_from(error: str, texts: list[str]) -> None:
    found = str(
        load_error(RuntimeError(f"Failed to load shared library '/a/libllama.so': {error}"))
    )
    for text in ["llama.cpp cannot be loaded", build_command(()), *texts]:
        assert text in found


def test_a_package_that_is_not_installed() -> None:
    error = load_error(ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp"))
    assert str(error).startswith("llama-cpp-python is not installed; build it for this machine:\n")
    if wheel := wheel_command("CPU"):
        assert str(error).endswith(f"or install a prebuilt wheel, without a compiler:\n  {wheel}")


def broken(folder: Path, *, replaced: bytes, by: bytes) -> dict[str, str]:
    """The environment of a build whose library needs one that is not there."""
    data = LIBRARY.read_bytes()
    assert replaced in data
    (folder / LIBRARY.name).write_bytes(data.replace(replaced, by.ljust(len(replaced), b"\0")))
    return {**os.environ, "LLAMA_CPP_LIB_PATH": str(folder)}


@on_linux
@pytest.mark.parametrize("arguments", [["devices"], ["run", "-m", "a.gguf", "-p", "a"], ["serve"]])
def test_commands_of_a_build_that_cannot_be_loaded(arguments: list[str], tmp_path: Path) -> None:
    environment = broken(tmp_path, replaced=b"libggml.so.0", by=b"libgomp.so.7")
    target = Path(install.__file__).parents[1] / "standin/classics-target.gguf"
    arguments = [str(target) if each == "a.gguf" else each for each in arguments]
    if arguments == ["serve"]:
        arguments += ["-m", str(target)]
    command = [sys.executable, "-m", "ggufspec", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ggufspec: llama.cpp cannot be loaded: this build of llama-cpp-p")
    assert "needs libgomp.so.7, which is not on this machine. Install GCC's OpenMP" in done.stderr
    assert "Traceback" not in done.stderr


@on_linux
def test_python_of_a_build_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / LIBRARY.name).write_text("damaged")
    code = (
        "import ggufspec\n"
        "for _ in range(2):\n"
        "    try:\n        ggufspec.load('a.gguf')\n"
        "    except ggufspec.LibraryError as error:\n        print(error)\n"
    )
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("llama.cpp cannot be loaded (Failed to load shared library") == 2
    assert done.stderr == ""


# What the operating system shows


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_a_machine_without_gpus(root: Path) -> None:
    assert visible_gpus(root) == []


def test_gpus_of_nvidia_are_named_by_their_driver(root: Path) -> None:
    write(root / "dev/nvidia0")
    assert visible_gpus(root) == [VisibleGpu("an NVIDIA GPU", "CUDA")]
    write(root / "dev/dri/renderD128")
    write(root / "sys/class/drm/renderD128/device/vendor", "0x10de\n")
    information = "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 77\n"
    write(root / "proc/driver/nvidia/gpus/0000:01:00.0/information", information)
    assert visible_gpus(root) == [VisibleGpu("NVIDIA GeForce RTX 4090", "CUDA")]


def test_the_driver_of_windows_is_found_under_wsl(root: Path) -> None:
    write(root / "usr/lib/wsl/lib/libcuda.so.1")
    assert visible_gpus(root) == [VisibleGpu("an NVIDIA GPU", "CUDA")]


def test_other_gpus_are_named_by_their_vendor(root: Path) -> None:
    for i, vendor in enumerate(("0x1002", "0x8086", "0x1af4")):
        write(root / f"dev/dri/renderD{128 + i}")
        write(root / f"sys/class/drm/renderD{128 + i}/device/vendor", vendor)
    assert visible_gpus(root) == [
        VisibleGpu("an AMD GPU (/dev/dri/renderD128)", "Vulkan"),
        VisibleGpu("an Intel GPU (/dev/dri/renderD129)", "Vulkan"),
        VisibleGpu("a GPU (/dev/dri/renderD130)", "Vulkan"),
    ]


def test_a_device_file_that_this_user_may_not_open(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root / "dev/dri/renderD128")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert visible_gpus(root)[0].closed == "/dev/dri/renderD128"


def test_a_gpu_of_amd_without_a_render_device(root: Path) -> None:
    write(root / "dev/kfd")
    assert visible_gpus(root) == [VisibleGpu("an AMD GPU (/dev/kfd)", "Vulkan")]
