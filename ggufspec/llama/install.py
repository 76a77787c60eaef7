"""How llama-cpp-python is built or installed, and why a build cannot be loaded."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

from ggufspec.errors import LibraryError

PACKAGE: Final = "llama-cpp-python"
CUDA, METAL, VULKAN = "CUDA", "Metal", "Vulkan"
NATIVE: Final = "NATIVE"  # ggml's option for the instruction sets of the processor that compiles it
# llama-cpp-python's own indexes of prebuilt wheels, and for which of them there are wheels. CUDA 12
# works with GPUs from Pascal on, and any driver that knows CUDA 12 or later.
_WHEELS: Final = "https://abetlen.github.io/llama-cpp-python/whl"
_INDEXES: Final = {"CPU": "cpu", CUDA: "cu124", METAL: "metal", VULKAN: "vulkan"}
_PUBLISHED: Final = {
    ("linux", "x86_64"): ("CPU", CUDA, VULKAN),
    ("linux", "aarch64"): ("CPU",),
    ("linux", "riscv64"): ("CPU",),
    ("darwin", "arm64"): ("CPU", METAL),
    ("win32", "amd64"): ("CPU", CUDA, VULKAN),
}
_FLAGS: Final = {"MTL": "METAL", "ROCm": "HIP"}  # names of ggml's whose option of CMake differs

_MISSING = re.compile(r"(\S+\.(?:so|dylib)[\w.]*): cannot open shared|Library not loaded: (\S+)")
_CUDA_TOOLKIT = "CUDA's libraries, of the version that it was built with"
# What has a library, by the start of its file name; the first that matches.
_SOURCES: Final = {
    "libcuda.": "NVIDIA's driver; a container gets it from the host (docker run --gpus all)",
    "libcudart": _CUDA_TOOLKIT,
    "libcublas": _CUDA_TOOLKIT,
    "libnccl": "NVIDIA's NCCL (Debian, Ubuntu: libnccl2)",
    "libvulkan": "the Vulkan loader (Debian, Ubuntu: libvulkan1)",
    "libamdhip": "AMD's ROCm",
    "libhipblas": "AMD's ROCm",
    "librocblas": "AMD's ROCm",
    "libgomp": "GCC's OpenMP (Debian, Ubuntu: libgomp1)",
    "libopenblas": "OpenBLAS (Debian, Ubuntu: libopenblas0)",
    "libOpenCL": "the OpenCL loader (Debian, Ubuntu: ocl-icd-libopencl1)",
}


def build_command(backends: Iterable[str]) -> str:
    """The command that builds llama-cpp-python again with these backends, or options, of ggml."""
    names = (name for name in dict.fromkeys(backends) if name != "CPU")
    flags = " ".join(f"-DGGML_{_FLAGS.get(name, name).upper()}=on" for name in names)
    variables = f'CMAKE_ARGS="{flags}" ' if flags else ""
    return f"{variables}{_pip('--no-cache-dir', '--no-binary', PACKAGE)}"


def wheel_command(backend: str) -> str | None:
    """The command that installs a prebuilt wheel and its dependencies; None if there is none."""
    system = sys.platform, platform.machine().lower()
    if backend not in _PUBLISHED.get(system, ()):
        return None
    index = f"{_WHEELS}/{_INDEXES[backend]}"
    return _pip("--only-binary", PACKAGE, "--extra-index-url", index)


def _pip(*options: str) -> str:
    try:
        exactly = version(PACKAGE)
    except PackageNotFoundError:
        exactly = ""
    again = ("--force-reinstall", "--no-deps") if exactly else ()
    python = shlex.quote(sys.executable or "python3")
    package = f"{PACKAGE}=={exactly}" if exactly else PACKAGE
    return " ".join((python, "-m pip install", *again, *options, package))


def load_error(error: Exception) -> LibraryError:
    """The error for an `import llama_cpp` that failed: what is missing, and what to do."""
    if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
        wheel = wheel_command("CPU")
        return LibraryError(
            f"{PACKAGE} is not installed; build it for this machine:\n  {build_command(())}"
            + (f"\nor install a prebuilt wheel, without a compiler:\n  {wheel}" if wheel else "")
        )
    again = f"or build {PACKAGE} for this machine:\n  {build_command(())}"
    if missing := _MISSING.search(str(error)):
        name = Path(missing[1] or missing[2]).name
        source = next((of for start, of in _SOURCES.items() if name.startswith(start)), None)
        return LibraryError(
            f"llama.cpp cannot be loaded: this build of {PACKAGE} needs {name}, which is not on "
            f"this machine. Install {source or 'what it belongs to'}, {again}"
        )
    return LibraryError(f"llama.cpp cannot be loaded ({error}). Install what is missing, {again}")


class VisibleGpu(NamedTuple):
    """A GPU that the operating system shows. backend: the one to build llama.cpp with.

    closed: its device file, if this user may not open it.
    """

    name: str
    backend: str
    closed: str | None = None


def visible_gpus(root: Path = Path("/")) -> list[VisibleGpu]:
    """The GPUs that the operating system shows, whatever llama.cpp was built with."""
    if sys.platform == "darwin":
        return [VisibleGpu("Apple's GPU", METAL)] if os.uname().machine == "arm64" else []
    found = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model = re.search(r"^Model:\s*(.+)$", text_of(path), re.MULTILINE)
        found.append(VisibleGpu(model[1].strip() if model else "an NVIDIA GPU", CUDA))
    under_wsl = (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    if not found and (under_wsl or any(root.glob("dev/nvidia[0-9]*"))):
        found.append(VisibleGpu("an NVIDIA GPU", CUDA))
    has_cuda = bool(found)
    for path in sorted(root.glob("dev/dri/renderD*")):
        vendor = text_of(root / "sys/class/drm" / path.name / "device/vendor").strip()
        if has_cuda and vendor == _NVIDIA:
            continue
        is_open = os.access(path, os.R_OK | os.W_OK)
        name = f"{_VENDORS.get(vendor, 'a GPU')} (/dev/dri/{path.name})"
        found.append(VisibleGpu(name, VULKAN, None if is_open else f"/dev/dri/{path.name}"))
    if not found and (root / "dev/kfd").exists():
        found.append(VisibleGpu("an AMD GPU (/dev/kfd)", VULKAN))
    return found


_NVIDIA = "0x10de"
_VENDORS = {_NVIDIA: "an NVIDIA GPU", "0x1002": "an AMD GPU", "0x8086": "an Intel GPU"}


def text_of(path: Path) -> str:
    """A file of the operating system; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
