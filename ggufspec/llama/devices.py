"""What this machine computes with: its processor, GPUs and memory, and llama.cpp's build for it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from ggufspec.placement.plan import Gpu

Signature = tuple[Any, list[Any]]  # the type of a C function's result, and those of its arguments

_CPU, _GPU, _IGPU = 0, 1, 2  # enum ggml_backend_dev_type in ggml-backend.h


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
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


class Device(NamedTuple):
    """What llama.cpp computes with. n_free: bytes; an integrated GPU's are those of the machine.
    pointer: ggml's."""

    name: str
    description: str
    kind: int
    n_free: int
    pointer: int


def devices() -> list[Device]:
    """The devices of llama.cpp; none where it does not tell."""
    for library in libraries():
        try:
            count, get = library.ggml_backend_dev_count, library.ggml_backend_dev_get
            kind, memory = library.ggml_backend_dev_type, library.ggml_backend_dev_memory
            texts = [library.ggml_backend_dev_name, library.ggml_backend_dev_description]
        except AttributeError:
            continue
        count.restype, count.argtypes = ctypes.c_size_t, []
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        kind.restype, kind.argtypes = ctypes.c_int, [ctypes.c_void_p]
        size = ctypes.POINTER(ctypes.c_size_t)
        memory.restype, memory.argtypes = None, [ctypes.c_void_p, size, size]
        for text in texts:
            text.restype, text.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        found = []
        for device in filter(None, [get(i) for i in range(count())]):
            n_free, n_total = ctypes.c_size_t(), ctypes.c_size_t()
            memory(device, ctypes.byref(n_free), ctypes.byref(n_total))
            name, description = ((text(device) or b"").decode("utf-8", "replace") for text in texts)
            found.append(Device(name, description, kind(device), n_free.value, device))
        return found
    return []


def gpu_names() -> list[str]:
    """The devices of llama.cpp other than processors."""
    return [f"{at.name}: {at.description}" for at in devices() if at.kind != _CPU]


def offload_devices() -> list[Device]:
    """What llama.cpp offloads to: GPUs, or the first integrated one where there is no other."""
    found = devices()
    return [at for at in found if at.kind == _GPU] or [at for at in found if at.kind == _IGPU][:1]


def gpus() -> tuple[Gpu, ...]:
    """The same, as plans are made of them."""
    return tuple(Gpu(at.description or at.name, at.n_free) for at in offload_devices())


def free_memory() -> int | None:
    """Bytes that this process may still take; None where the platform does not tell."""
    limits = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    group = [_lines(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current")]
    if all(group) and group[0][0].isdigit() and group[1][0].isdigit():
        limits.append(max(int(group[0][0]) - int(group[1][0]), 0))
    return min(limits, default=physical_memory())


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


def libraries() -> list[ctypes.CDLL]:
    """Where ggml may be found: in libllama or behind it, or beside it."""
    found = [llama_cpp.llama_cpp._lib]
    beside = getattr(getattr(llama_cpp, "_ggml", None), "libggml", None)
    return found if beside is None else [*found, beside]


def ggml(functions: Mapping[str, Signature]) -> ctypes.CDLL | None:
    """The library that has all these functions of ggml's, with their types set; None: none has."""
    for library in libraries():
        if all(hasattr(library, name) for name in functions):
            for name, (restype, argtypes) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = restype, argtypes
            return library
    return None


def _lines(path: Path) -> list[str]:
    """Of a file of the kernel's; none where there is no such."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


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
