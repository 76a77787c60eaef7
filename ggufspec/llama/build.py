"""What llama.cpp was built with, which devices it found, and what keeps it from using a GPU."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp

from ggufspec import _native
from ggufspec.drafting import profile_store
from ggufspec.llama import devices, kernels, threadpool
from ggufspec.llama.devices import POINTER, SIZE, TEXT, Device
from ggufspec.llama.install import (
    CUDA,
    METAL,
    NATIVE,
    VULKAN,
    VisibleGpu,
    build_command,
    text_of,
    visible_gpus,
    wheel_command,
)
from ggufspec.placement.speeds import known_bandwidth

_KINDS: Final = ("CPU", "GPU", "integrated GPU", "accelerator", "several devices")
_HOST: Final = ("CPU", "BLAS", "RPC", "ZenDNN", "zDNN")  # backends without devices for layers
_SOFTWARE: Final = ("llvmpipe", "softpipe", "SwiftShader")  # Vulkan drivers that use the CPU

# Variables of the environment that hide devices from a backend.
_HIDING: Final = {
    CUDA: ("CUDA_VISIBLE_DEVICES",),
    "ROCm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    VULKAN: (
        *("GGML_DISABLE_VULKAN", "GGML_VK_VISIBLE_DEVICES"),
        *("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_LOADER_DRIVERS_DISABLE"),
    ),
    "SYCL": ("ONEAPI_DEVICE_SELECTOR",),
}
_ADVICE: Final = {
    CUDA: "Install NVIDIA's driver: `nvidia-smi` must list the GPU. A container needs "
    "`docker run --gpus all`",
    "ROCm": "Install AMD's driver: `rocminfo` must list the GPU",
    VULKAN: "Install the GPU's Vulkan driver (Debian, Ubuntu: mesa-vulkan-drivers; NVIDIA: its own "
    "driver): `vulkaninfo --summary` must list the GPU. Software devices such as llvmpipe are "
    "used only if GGML_VK_VISIBLE_DEVICES names them, such as 0",
}
_NEEDED: Final = {
    CUDA: "the CUDA toolkit (nvcc)",
    METAL: "Xcode's command line tools",
    VULKAN: "libvulkan-dev, glslc, spirv-headers and the GPU's driver (mesa-vulkan-drivers)",
}


def backends() -> dict[str, int]:
    """The backends that llama.cpp was built with, and how many devices each has found."""
    library = devices.ggml(
        {
            "ggml_backend_reg_count": (SIZE, []),
            "ggml_backend_reg_get": (POINTER, [SIZE]),
            "ggml_backend_reg_name": (TEXT, [POINTER]),
            "ggml_backend_reg_dev_count": (SIZE, [POINTER]),
        }
    )
    found: dict[str, int] = {}
    # Vulkan's backend is not in the list if no driver can be used, or the environment disables it.
    if any(hasattr(each, "ggml_backend_vk_reg") for each in devices.libraries()):
        found[VULKAN] = 0
    if library is None:
        return found
    for i in range(library.ggml_backend_reg_count()):
        backend = library.ggml_backend_reg_get(i)
        name = library.ggml_backend_reg_name(backend).decode("utf-8", "replace")
        found[METAL if name == "MTL" else name] = library.ggml_backend_reg_dev_count(backend)
    return found


def why_no_gpu() -> str:
    """Why llama.cpp has no GPU, in a few words."""
    built = [name for name in backends() if name not in _HOST]
    if not built:
        return "this build of llama.cpp has no GPU backend"
    return f"llama.cpp's {' and '.join(built)} backend found no GPU"


def advice(
    built: Mapping[str, int],
    found: Sequence[Device],
    visible: Sequence[VisibleGpu],
    environment: Mapping[str, str],
) -> list[str]:
    """What keeps llama.cpp from using a GPU, and what to do; each in a line or two.

    built: backends with their numbers of devices. visible: GPUs that the operating system shows.
    """
    gpus = [device for device in found if device.is_gpu]
    lines = [
        f"{gpu.name} is a software device: it computes on the CPU, and is slower than the CPU "
        "backend"
        for gpu in gpus
        if gpu.description.startswith(_SOFTWARE)
    ]
    if len(lines) < len(gpus):
        return lines
    of_gpus = [name for name in built if name not in _HOST]
    if not of_gpus:
        lines.append("built without CUDA, Metal, Vulkan: no layers can be offloaded")
    for name in (name for name in of_gpus if not built[name]):
        given = [f"{of}={environment[of]}" for of in _HIDING.get(name, ()) if of in environment]
        unset = f"{', '.join(given)} may hide it: try without. " if given else ""
        lines.append(
            f"built with {name}, but it found no device: no layers can be offloaded. {unset}"
            f"{_ADVICE.get(name, 'Install the driver of the GPU')}"
        )
    for gpu in visible:
        if gpu.closed:
            lines.append(
                f"{gpu.closed} cannot be opened by this user: add the user to the group that it "
                "belongs to (render or video), and log in again"
            )
    usable = {gpu.backend: gpu.name for gpu in visible if gpu.backend not in built}
    for backend, name in usable.items():
        lines.append(
            f"{name} is there, but this build cannot use it. Install {_NEEDED[backend]}, then:\n"
            f"  {build_command([*built, backend])}"
        )
        if wheel := wheel_command(backend):
            lines[-1] += f"\nor install a prebuilt wheel, without a compiler:\n  {wheel}"
    if not of_gpus and not usable:
        own = METAL if sys.platform == "darwin" else CUDA
        other = "" if own == METAL else " (AMD, Intel: -DGGML_VULKAN=on)"
        lines.append(
            f"for a GPU, install {_NEEDED[own]}, then{other}:\n  {build_command([*built, own])}"
        )
    return lines


def processor_advice(
    missing: Sequence[str], built: Iterable[str], own_kernels: str | None
) -> list[str]:
    """What to do about a build without `missing`, which this processor could use.

    built: backends. own_kernels: the instructions of ggufspec's kernels, where they are used.
    """
    if not missing:
        return []
    effect = "Prompts and texts take longer"
    if own_kernels:
        effect = (
            f"ggufspec's kernels ({own_kernels}) multiply weights where they are faster; "
            "everything else, such as attention, takes longer"
        )
    return [
        f"llama.cpp does not use {_listed(missing)} of this processor: it was built without, as "
        f"prebuilt wheels are. {effect}. With a C++ compiler, build it for this processor:\n"
        f"  {_native_command(built)}"
    ]


def notice() -> str | None:
    """A line about a slow build; None if it was given before, which the cache folder remembers."""
    missing = missing_sets()
    if not slow_without(missing):
        return None
    key = {"about": "slow build", **kernels.build_key()}
    if profile_store.recall(key) is not None:
        return None
    profile_store.remember(key, {"missing": missing})
    return (
        f"llama.cpp does not use {_listed(missing)} of this processor, and is slower than it could "
        "be: `ggufspec devices` prints the command that builds it for this processor. This message "
        "is not repeated"
    )


def missing_sets() -> list[str]:
    """Instruction sets that the build lacks, and OPENMP where no threads are kept either."""
    built = features().get("CPU", "").split()
    if has_variants():
        return []
    found = unused_sets(built, of_processor())
    has_threads = "OPENMP" in built or threadpool.are_needed() or sys.platform == "darwin"
    return found if has_threads or not built else [*found, "OPENMP"]


def _native_command(built: Iterable[str]) -> str:
    return build_command([*built, NATIVE, *(() if sys.platform == "darwin" else ("OPENMP",))])


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def facts() -> dict[str, Any]:
    """The devices, the build and this machine, as JSON, with advice."""
    built, found = backends(), devices.devices()
    own, missing = kernels.status(), missing_sets()
    listed = []
    for device in found:
        n_free, n_total = device.n_free, device.n_total
        if device.kind == 0:
            n_free, n_total = devices.free_memory() or n_free, devices.physical_memory() or n_total
        listed.append(
            {
                "name": device.name,
                "description": device.description,
                "type": _KINDS[device.kind] if 0 <= device.kind < len(_KINDS) else "unknown",
                "n_free": n_free,
                "n_total": n_total,
                "bandwidth": known_bandwidth(device.description) if device.is_gpu else None,
            }
        )
    return {
        "devices": listed,
        "backends": built,
        "features": features(),
        "processor": {
            "instruction_sets": of_processor(),
            "missing": missing,
            "has_variants": has_variants(),
            "build_command": _native_command(built) if missing else None,
        },
        "kernels": own._asdict(),
        "n_threads": devices.n_threads_default(),
        "n_logical_cores": devices.n_logical_cores(),
        "thread_pools": threadpool.are_needed(),
        "advice": [
            *processor_advice(missing, built, own.instructions),
            *advice(built, found, visible_gpus(), os.environ),
        ],
    }


def features() -> dict[str, str]:
    """What each backend was compiled with, such as the instruction sets of the CPU."""
    text = llama_cpp.llama_print_system_info().decode("utf-8", "replace")
    found: dict[str, list[str]] = {}
    backend = ""
    for part in filter(None, (part.strip() for part in text.split("|"))):
        before, colon, fact = part.rpartition(" : ")
        backend = before if colon else backend
        name, _, value = fact.partition(" = ")
        found.setdefault(backend, []).append(name if value == "1" else f"{name}={value}")
    return {name: " ".join(each) for name, each in found.items()}


def print_facts() -> None:
    """Print `facts` as JSON, in a child process: a driver may crash, print or hang meanwhile."""
    logging.basicConfig(format="%(message)s")
    sys.stdout.write(f"\n{json.dumps(facts())}\n")


# By ggml's names: as Linux and as macOS call them. The order is that of messages. ggml's code for
# AVX-512 needs its BW part.
_X86: Final = {
    "AVX": ("avx", "avx1_0"),
    "AVX2": ("avx2", "avx2_0"),
    "FMA": ("fma", "fma"),
    "F16C": ("f16c", "f16c"),
    "AVX_VNNI": ("avx_vnni", ""),
    "AVX512": ("avx512bw", "avx512bw"),
    "AVX512_VNNI": ("avx512_vnni", "avx512vnni"),
    "AVX512_BF16": ("avx512_bf16", ""),
    "AMX_INT8": ("amx_int8", ""),
}
_ARM: Final = {
    "DOTPROD": ("asimddp", "arm.FEAT_DotProd"),
    "MATMUL_INT8": ("i8mm", "arm.FEAT_I8MM"),
    "FP16_VA": ("asimdhp", "arm.FEAT_FP16"),
    "SVE": ("sve", ""),
}
# Where the operating system does not say it: what a processor has that can use these own kernels.
_OF_KERNELS: Final = {
    "avx2": ("AVX", "AVX2", "FMA", "F16C"),
    "avx_vnni": ("AVX_VNNI",),
    "avx512_vnni": ("AVX512", "AVX512_VNNI"),
    "neon_dotprod": ("DOTPROD",),
}
# Used for weights of these types only, or by few operations: no reason for a warning.
_MINOR: Final = ("AVX512_BF16", "FP16_VA", "SVE")

CPUINFO: Final = Path("/proc/cpuinfo")
_FLAGS = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)
_VARIANT = re.compile(r"(?:lib)?ggml-cpu-[a-z]\w*\.(?:so|dylib|dll)")


def of_processor(cpuinfo: Path = CPUINFO) -> list[str]:
    """The instruction sets of this processor that ggml has code for; empty if unknown."""
    known = _ARM if platform.machine().lower() in ("arm64", "aarch64") else _X86
    if sys.platform == "darwin":  # names below hw.optional whose value is 1
        lines = devices.sysctl("hw.optional").splitlines()
        has = {line[len("hw.optional.") : -len(": 1")] for line in lines if line.endswith(": 1")}
        return [name for name, (_, apple) in known.items() if apple in has]
    if found := _FLAGS.search(text_of(cpuinfo)):
        return [name for name, (linux, _) in known.items() if linux in found[1].split()]
    usable = {name for each in _native.kernel_instructions() for name in _OF_KERNELS.get(each, ())}
    return [name for name in known if name in usable]


def unused_sets(built: Collection[str], processor: Iterable[str]) -> list[str]:
    """Those of `processor` that would make a build faster; none if `built` is empty: unknown."""
    has_wider = "AVX512_VNNI" in built  # the same products, in registers of twice the width
    return [
        name
        for name in processor
        if built and name not in built and not (name == "AVX_VNNI" and has_wider)
    ]


def slow_without(names: Iterable[str]) -> bool:
    """Whether a build without these instruction sets is noticeably slower."""
    return any(name not in _MINOR for name in names)


def has_variants() -> bool:
    """Whether the build has a library for each kind of processor; ggml loads the best one."""
    folders = devices.library_folders()
    names = (path.name for folder in folders for path in folder.glob("*ggml-cpu-*"))
    return len({name for name in names if _VARIANT.fullmatch(name)}) > 1
