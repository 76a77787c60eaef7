"""What llama.cpp was built with, which devices it found, and what it does not use."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import llama_cpp

from ggufspec import _native
from ggufspec.common.facts import listed
from ggufspec.drafting import profile_store
from ggufspec.llama import devices, kernels, threadpool
from ggufspec.llama.devices import POINTER, SIZE, TEXT, Device
from ggufspec.llama.install import build_command
from ggufspec.placement.speeds import known_bandwidth

_KINDS: Final = ("CPU", "GPU", "integrated GPU", "accelerator", "several devices")
_HOST: Final = ("CPU", "BLAS", "RPC", "ZenDNN", "zDNN")  # backends without devices for layers
_SOFTWARE: Final = ("llvmpipe", "softpipe", "SwiftShader")  # Vulkan drivers that use the CPU
_VULKAN: Final = "Vulkan"
# What a processor has that can use these kernels of the extension, by ggml's names.
_FEATURES: Final = {
    "avx2": ("AVX", "AVX2", "FMA", "F16C"),
    "avx_vnni": ("AVX_VNNI",),
    "avx512_vnni": ("AVX512", "AVX512_VNNI"),
    "neon_dotprod": ("DOTPROD",),
}
_VARIANT = re.compile(r"(?:lib)?ggml-cpu-[a-z]\w*\.(?:so|dylib|dll)")


def backends() -> dict[str, int]:
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
        found[_VULKAN] = 0
    if library is None:
        return found
    for i in range(library.ggml_backend_reg_count()):
        backend = library.ggml_backend_reg_get(i)
        name = library.ggml_backend_reg_name(backend).decode("utf-8", "replace")
        found["Metal" if name == "MTL" else name] = library.ggml_backend_reg_dev_count(backend)
    return found


def why_no_gpu() -> str:
    built = [name for name in backends() if name not in _HOST]
    if not built:
        return "this build of llama.cpp has no GPU backend"
    return f"llama.cpp's {' and '.join(built)} backend found no GPU"


def advice(built: Mapping[str, int], found: Sequence[Device]) -> list[str]:
    """What keeps llama.cpp from using a GPU, and what to do; `built`: see `backends`."""
    gpus = [device for device in found if device.is_gpu]
    lines = [
        f"{gpu.name} is a software device: it computes on the CPU, and is slower than the CPU "
        "backend"
        for gpu in gpus
        if gpu.description.startswith(_SOFTWARE)
    ]
    of_gpus = [name for name in built if name not in _HOST]
    if len(lines) < len(gpus):
        return lines
    if of_gpus and not gpus:
        lines.append(
            f"built with {' and '.join(of_gpus)}, but it found no device: no layers can be "
            "offloaded. Install the GPU's driver, which must list it (nvidia-smi, rocminfo, "
            "vulkaninfo --summary); this user needs access to /dev/dri (group render or video), a "
            "container needs `docker run --gpus all`. CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or "
            "GGML_VK_VISIBLE_DEVICES may hide it"
        )
    elif not of_gpus:
        is_mac = sys.platform == "darwin"
        needed = "Xcode's command line tools" if is_mac else "the CUDA toolkit (nvcc)"
        other = "" if is_mac else " (AMD, Intel: -DGGML_VULKAN=on)"
        lines.append(
            "built without CUDA, Metal, Vulkan: no layers can be offloaded. For a GPU, install "
            f"{needed}, then{other}:\n  {build_command([*built, 'Metal' if is_mac else 'CUDA'])}"
        )
    return lines


def processor_advice(missing: Sequence[str], own_kernels: str | None) -> list[str]:
    """What to do about a build without `missing`, which this processor could use.

    `own_kernels`: the instructions of ggufspec's kernels, where they are used.
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
        f"llama.cpp does not use {listed(missing)} of this processor: it was built without, as "
        f"prebuilt wheels are. {effect}. With a C++ compiler, build it for this processor:\n"
        f"  {_native_command()}"
    ]


def notice() -> str | None:
    """A line about a slow build; None if it was given before, which the cache folder remembers."""
    if not (missing := missing_sets()):
        return None
    key = {"about": "slow build", **kernels.build_key()}
    if profile_store.recall(key) is not None:
        return None
    profile_store.remember(key, {"missing": missing})
    return (
        f"llama.cpp does not use {listed(missing)} of this processor, and is slower than it could "
        "be: `ggufspec devices` prints the command that builds it for this processor. This message "
        "is not repeated"
    )


def missing_sets() -> list[str]:
    """Instruction sets that the build lacks, and OPENMP where no threads are kept either."""
    built = features().get("CPU", "").split()
    if has_variants() or not built:
        return []
    wider = ["AVX_VNNI"] if "AVX512_VNNI" in built else []  # the same, in narrower registers
    found = [name for name in of_processor() if name not in (*built, *wider)]
    has_threads = "OPENMP" in built or threadpool.are_needed() or sys.platform == "darwin"
    return found if has_threads else [*found, "OPENMP"]


def of_processor() -> list[str]:
    """The instruction sets of this processor that ggml and the extension have code for."""
    usable = _native.kernel_instructions()
    return [name for each, names in _FEATURES.items() if each in usable for name in names]


def _native_command() -> str:
    native = ("NATIVE",) if sys.platform == "darwin" else ("NATIVE", "OPENMP")
    return build_command([*backends(), *native])


def facts() -> dict[str, Any]:
    """The devices, the build and this machine, as JSON, with advice."""
    built, found = backends(), devices.devices()
    own, missing = kernels.status(), missing_sets()
    shown = []
    for device in found:
        n_free, n_total = device.n_free, device.n_total
        if device.kind == 0:
            n_free, n_total = devices.free_memory() or n_free, devices.physical_memory() or n_total
        shown.append(
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
        "devices": shown,
        "backends": built,
        "features": features(),
        "processor": {
            "instruction_sets": of_processor(),
            "missing": missing,
            "has_variants": has_variants(),
            "build_command": _native_command() if missing else None,
        },
        "kernels": own._asdict(),
        "n_threads": devices.n_threads_default(),
        "n_logical_cores": devices.n_logical_cores(),
        "thread_pools": threadpool.are_needed(),
        "advice": [
            *processor_advice(missing, own.instructions),
            *advice(built, found),
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


def has_variants() -> bool:
    """Whether the build has a library for each kind of processor; ggml loads the best one."""
    folders = devices.library_folders()
    names = (path.name for folder in folders for path in folder.glob("*ggml-cpu-*"))
    return len({name for name in names if _VARIANT.fullmatch(name)}) > 1
