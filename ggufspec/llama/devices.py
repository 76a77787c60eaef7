"""What this machine computes with: its processor, GPUs and memory, and llama.cpp's build for it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import llama_cpp

_CPU = 0  # enum ggml_backend_dev_type in ggml-backend.h


def n_threads_default() -> int:
    """Physical cores that this process may use: two threads on one only get in each other's way."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    if usable is not None:
        return max(len({_siblings(cpu) for cpu in usable}), 1)
    if sys.platform == "darwin":
        # Apple Silicon: the efficiency cores would hold the others up at every barrier.
        for key in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            found = _sysctl(key)
            if found.isdigit():
                return int(found)
    return max((os.cpu_count() or 2) // 2, 1)


def n_logical_cores() -> int:
    """Logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_memory() -> int | None:
    """Bytes of memory of this machine; None where the platform does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


@cache
def cpu_name() -> str:
    """What the processor calls itself; perhaps empty."""
    if sys.platform == "darwin" and (found := _sysctl("machdep.cpu.brand_string")):
        return found
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """The devices of llama.cpp other than processors; none where it does not tell."""
    for library in _libraries():
        try:
            count, get = library.ggml_backend_dev_count, library.ggml_backend_dev_get
            kind, texts = (
                library.ggml_backend_dev_type,
                [library.ggml_backend_dev_name, library.ggml_backend_dev_description],
            )
        except AttributeError:
            continue
        count.restype, count.argtypes = ctypes.c_size_t, []
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        kind.restype, kind.argtypes = ctypes.c_int, [ctypes.c_void_p]
        for text in texts:
            text.restype, text.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        devices = [get(i) for i in range(count())]
        return [
            ": ".join((text(device) or b"").decode("utf-8", "replace") for text in texts)
            for device in devices
            if device and kind(device) != _CPU
        ]
    return []


def machine() -> dict[str, object]:
    """What the speed of any model depends on."""
    return {
        "cpu": cpu_name(),
        "n_physical_cores": n_threads_default(),
        "n_logical_cores": n_logical_cores(),
        "gpus": gpu_names(),
        "llama_cpp_python": llama_cpp.__version__,
        "llama_cpp_build": llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(),
    }


def _libraries() -> list[ctypes.CDLL]:
    """Where ggml may be found: in libllama or behind it, or beside it."""
    found = [llama_cpp.llama_cpp._lib]
    beside = getattr(getattr(llama_cpp, "_ggml", None), "libggml", None)
    return found if beside is None else [*found, beside]


def _sysctl(key: str) -> str:
    asked = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else ""


def _siblings(cpu: int) -> str:
    """A name for the core of a logical processor; its own where Linux does not tell."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)
