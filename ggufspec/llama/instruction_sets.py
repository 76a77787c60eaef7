"""Instruction sets of this processor, and those of them that llama.cpp was built without."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from ggufspec import _native

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
    if sys.platform == "darwin":
        has = _apple_features()
        return [name for name, (_, apple) in known.items() if apple in has]
    if flags := _linux_flags(cpuinfo):
        return [name for name, (linux, _) in known.items() if linux in flags]
    found = {name for each in _native.kernel_instructions() for name in _OF_KERNELS.get(each, ())}
    return [name for name in known if name in found]


def missing(built: Collection[str], processor: Iterable[str]) -> list[str]:
    """The instruction sets of `processor` that would make a build with those in `built` faster.

    Empty if `built` is: ggml has not said what it was built with.
    """
    has_wider = "AVX512_VNNI" in built  # the same products, in registers of twice the width
    return [
        name
        for name in processor
        if built and name not in built and not (name == "AVX_VNNI" and has_wider)
    ]


def are_needed(names: Iterable[str]) -> bool:
    """Whether a build without these instruction sets is noticeably slower."""
    return any(name not in _MINOR for name in names)


def has_variants(folders: Iterable[Path]) -> bool:
    """Whether a build has a library for each kind of processor, of which ggml loads the best one.

    folders: where its libraries are.
    """
    names = (path.name for folder in folders for path in folder.glob("*ggml-cpu-*"))
    return len({name for name in names if _VARIANT.fullmatch(name)}) > 1


def _linux_flags(cpuinfo: Path) -> set[str]:
    try:
        found = _FLAGS.search(cpuinfo.read_text(errors="replace"))
    except OSError:
        return set()
    return set(found[1].split()) if found else set()


def _apple_features() -> set[str]:
    """The names below hw.optional whose value is 1."""
    try:
        asked = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True)
    except OSError:
        return set()
    lines = (
        line.removeprefix("hw.optional.").partition(": ") for line in asked.stdout.splitlines()
    )
    return {name for name, _, value in lines if value == "1"}
