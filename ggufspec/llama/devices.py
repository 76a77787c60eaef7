"""The processor, memory and GPUs of this machine, and the loaded build of llama.cpp."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from ggufspec.llama.log import listening
from ggufspec.placement.overrides import Overrides, check_buffers
from ggufspec.placement.speeds import Gpu

POINTER, TEXT, SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
Signature = tuple[Any, list[Any]]  # the types of a C function: result, arguments

_CPU, _GPU, _IGPU = 0, 1, 2  # enum ggml_backend_dev_type in ggml-backend.h
_BLOCK = 256  # values of the largest block of any type
_FILE_PAGES = ("inactive_file", "active_file")  # the kernel can free them
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# On Apple's processors, llama.cpp says that the GPU has its own memory; it shares the main memory.
_IS_UNIFIED = sys.platform == "darwin" and platform.machine() == "arm64"


def n_threads_default() -> int:
    """Number of physical cores that this process may use: two threads on one core are no faster.

    Without efficiency cores, for which others would wait at every barrier, within the quota of a
    container (beyond it the kernel stops all threads for part of each period) and OMP_NUM_THREADS.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    n_most = int(given) if given.isdecimal() and len(given) < 5 else 0
    n_cores = _n_cores()
    return min(n_cores, n_most) if n_most else n_cores


def _n_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        n_cores = len({_siblings(cpu) for cpu in usable & fast_cores() or usable})
        return max(min(n_cores, round(cpu_quota() or n_cores)), 1)
    if sys.platform == "darwin":
        for key in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            found = _sysctl("-n", key)
            if found.isdigit():
                return int(found)
    return max((os.cpu_count() or 2) // 2, 1)


def n_logical_cores() -> int:
    """Logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def n_threads_most() -> int:
    """The number of logical processors of this process, or its quota: more threads would wait."""
    return min(n_logical_cores(), ceil(cpu_quota() or n_logical_cores()))


def fast_cores(path: Path = Path("/sys/devices/cpu_core/cpus")) -> set[int]:
    """The performance cores of an Intel processor that has efficiency cores too; else none."""
    found: set[int] = set()
    for part in filter(None, ",".join(_lines(path)).split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def cpu_quota(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> float | None:
    """Seconds of CPU time per second that Linux control groups allow; None: unlimited."""
    limits = [[*_lines(root / "cpu/cpu.cfs_quota_us"), *_lines(root / "cpu/cpu.cfs_period_us")]]
    limits += [" ".join(_lines(at / "cpu.max")).split() for at in _groups(root, own)]
    found = [int(of[0]) / int(of[1]) for of in limits if len(of) == 2 and of[0].isdigit()]
    return min(found, default=None)


def physical_memory() -> int | None:
    """Bytes of memory of this machine; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


@cache
def cpu_name() -> str:
    """The model name of the processor; may be empty."""
    if sys.platform == "darwin" and (found := _sysctl("-n", "machdep.cpu.brand_string")):
        return found
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


class Device(NamedTuple):
    """A device of llama.cpp. n_free, n_total: bytes; an integrated GPU reports the machine's."""

    name: str
    description: str
    kind: int  # enum ggml_backend_dev_type
    n_free: int
    pointer: int  # of ggml
    n_total: int

    @property
    def is_gpu(self) -> bool:
        """Whether layers can be on it."""
        return self.kind in (_GPU, _IGPU)


@cache
def look_for_devices() -> None:
    """Let ggml look for devices, once in a process; what it logs goes to ggufspec's log."""
    with listening():
        llama_cpp.llama_backend_init()
        _load_backends()
        llama_cpp.llama_print_system_info()  # the first call that needs the list of backends


def _load_backends() -> None:
    """Load backends in files of their own (GGML_BACKEND_DL), as llama-cpp-python does not.

    With GGML_CPU_ALL_VARIANTS there is one for each kind of processor, and ggml takes the best.
    """
    for library in libraries():
        load = getattr(library, "ggml_backend_load_all_from_path", None)
        if load is None or library.ggml_backend_reg_count():
            continue
        load.restype, load.argtypes = None, [TEXT]
        for folder in library_folders():
            load(os.fsencode(folder))


def library_folders() -> tuple[Path, ...]:
    """Where llama-cpp-python has llama.cpp's libraries: in lib, or in bin beside the package."""
    package = Path(llama_cpp.__file__).parent
    return package / "lib", package.parent / "bin"


def devices() -> list[Device]:
    """The devices of llama.cpp; empty if the library does not export them."""
    library = ggml(
        {
            "ggml_backend_dev_count": (SIZE, []),
            "ggml_backend_dev_get": (POINTER, [SIZE]),
            "ggml_backend_dev_name": (TEXT, [POINTER]),
            "ggml_backend_dev_description": (TEXT, [POINTER]),
            "ggml_backend_dev_type": (ctypes.c_int, [POINTER]),
        }
    )
    if library is None:
        return []
    found = []
    for device in map(library.ggml_backend_dev_get, range(library.ggml_backend_dev_count())):
        texts = (library.ggml_backend_dev_name, library.ggml_backend_dev_description)
        name, description = ((get(device) or b"").decode("utf-8", "replace") for get in texts)
        kind = library.ggml_backend_dev_type(device)
        n_free, n_total = device_memory(device)
        found.append(Device(name, description, kind, n_free, device, n_total))
    return found


def device_memory(device: int) -> tuple[int, int]:
    """Free bytes of a device, given its pointer, and all of them; 0 if they are unknown."""
    sizes, n_free, n_total = ctypes.POINTER(SIZE), SIZE(), SIZE()
    if library := ggml({"ggml_backend_dev_memory": (None, [POINTER, sizes, sizes])}):
        library.ggml_backend_dev_memory(device, ctypes.byref(n_free), ctypes.byref(n_total))
    return n_free.value, n_total.value


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


def takes_tensor(device: Device, type_: int, n_values: int) -> bool:
    """Whether a device supports tensors of `n_values`: ggml ends the process otherwise."""
    library = ggml(
        {
            "ggml_init": (POINTER, [InitParams]),
            "ggml_free": (None, [POINTER]),
            "ggml_new_tensor_1d": (POINTER, [POINTER, ctypes.c_int, ctypes.c_int64]),
            "ggml_backend_dev_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
        }
    )
    if library is None:
        return True
    context = library.ggml_init(InitParams(2**12, None, True))
    tensor = library.ggml_new_tensor_1d(context, type_, -(-n_values // _BLOCK) * _BLOCK)
    found = bool(library.ggml_backend_dev_supports_op(device.pointer, tensor))
    library.ggml_free(context)
    return found


def gpu_names() -> list[str]:
    return [f"{at.name}: {at.description}" for at in devices() if at.kind != _CPU]


def offload_devices() -> list[Device]:
    """The GPUs that llama.cpp offloads to; without any, the first integrated GPU."""
    found = devices()
    return [at for at in found if at.kind == _GPU] or [at for at in found if at.kind == _IGPU][:1]


class _TensorOverride(ctypes.Structure):
    _fields_ = (("pattern", TEXT), ("buffer_type", POINTER))


def buffer_types() -> dict[str, int]:
    """ggml's buffer types that weights can be in, with their pointers, by name."""
    library = ggml(
        {
            "ggml_backend_dev_buffer_type": (POINTER, [POINTER]),
            "ggml_backend_buft_name": (TEXT, [POINTER]),
        }
    )
    found: dict[str, int] = {}
    if library is None:
        return found
    for device in devices():
        if buffer := library.ggml_backend_dev_buffer_type(device.pointer):
            found.setdefault(library.ggml_backend_buft_name(buffer).decode(), buffer)
    return found


def tensor_overrides(overrides: Overrides) -> ctypes.Array[_TensorOverride]:
    """An array for llama_model_params, to keep as long as the model. Raises OptionError."""
    known = buffer_types()
    check_buffers(overrides, known)
    made = [_TensorOverride(each.pattern.encode(), known[each.buffer]) for each in overrides]
    return (_TensorOverride * (len(made) + 1))(*made)


def gpus() -> tuple[Gpu, ...]:
    """The devices of `offload_devices`, for placement plans."""
    return tuple(
        Gpu(at.description or at.name, at.n_free, is_shared=at.kind == _IGPU or _IS_UNIFIED)
        for at in offload_devices()
    )


def free_memory(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int | None:
    """Bytes of memory that this process, and its control groups, may still use; None if unknown."""
    limits = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    for group in _groups(root, own):
        found = [*_lines(group / "memory.max"), *_lines(group / "memory.current")]
        if len(found) == 2 and all(map(str.isdigit, found)):
            stat = (line.partition(" ") for line in _lines(group / "memory.stat"))
            n_cached = sum(int(n) for name, _, n in stat if name in _FILE_PAGES)
            limits.append(max(int(found[0]) - int(found[1]) + n_cached, 0))
    return min(limits, default=physical_memory())


def machine() -> dict[str, object]:
    """The properties of this machine that the speed of a model depends on."""
    return {
        "cpu": cpu_name(),
        "n_physical_cores": _n_cores(),
        "n_logical_cores": n_logical_cores(),
        "gpus": gpu_names(),
        "llama_cpp_python": llama_cpp.__version__,
        "llama_cpp_build": llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(),
    }


def libraries() -> list[ctypes.CDLL]:
    """The loaded libraries that may have ggml's functions: libllama, then libggml."""
    found = [llama_cpp.llama_cpp._lib]
    beside = getattr(getattr(llama_cpp, "_ggml", None), "libggml", None)
    return found if beside is None else [*found, beside]


def ggml(functions: Mapping[str, Signature]) -> ctypes.CDLL | None:
    """The library that has all these functions, with their types set; None if none has."""
    look_for_devices()
    return exported(functions)


def exported(functions: Mapping[str, Signature]) -> ctypes.CDLL | None:
    """The same, but does not make ggml look for devices."""
    for library in libraries():
        if all(hasattr(library, name) for name in functions):
            for name, (restype, argtypes) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = restype, argtypes
            return library
    return None


def backend_function(backend: str, name: str, *types: Any) -> Callable[..., Any] | None:
    """A function that a backend of ggml offers by name; `types`: of the result and arguments."""
    library = ggml(
        {
            "ggml_backend_reg_by_name": (POINTER, [TEXT]),
            "ggml_backend_reg_get_proc_address": (POINTER, [POINTER, TEXT]),
        }
    )
    found = library and library.ggml_backend_reg_by_name(backend.encode())
    if not library or not found:
        return None
    address = library.ggml_backend_reg_get_proc_address(found, name.encode())
    return ctypes.CFUNCTYPE(*types)(address) if address else None


def address_of(pointer: Any) -> int:
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address
    return address


def _groups(root: Path, own: Path) -> Iterator[Path]:
    for line in _lines(own):
        if line.startswith("0::"):
            group = root / line[3:].strip("/")
            yield from (group, *group.parents)


def _lines(path: Path) -> list[str]:
    """The lines of a file of the operating system; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _sysctl(*arguments: str) -> str:
    try:
        return subprocess.run(["sysctl", *arguments], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _siblings(cpu: int) -> str:
    """Identifies the core of a logical processor; the processor's number if unknown."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return next(iter(_lines(path)), str(cpu))
