"""Registers the extension's kernels with ggml, and leaves out AMX where it crashes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from os import environ
from typing import NamedTuple

from ggufspec import _native
from ggufspec.llama import devices, trial
from ggufspec.llama.log import logger

# "on": wherever they work, without measuring; "off"; or a name of instructions, measured as usual.
VARIABLE = "GGUFSPEC_KERNELS"
BUFFER_TYPE = "GGUFSPEC"  # its name in ggml
GGML_VERSIONS = ("0.25.3",)  # whose structures are those of native/matmul/ggml_abi.h

_GET_TYPES = "ggml_backend_cpu_get_extra_buffer_types"  # a function of C++
_SYMBOLS = {_GET_TYPES: "_Z39ggml_backend_cpu_get_extra_buffer_typesv"}
_FUNCTIONS = (
    *(_GET_TYPES, "ggml_barrier", "ggml_threadpool_chunk_set", "ggml_threadpool_chunk_add"),
    *("ggml_backend_cpu_buffer_type", "ggml_backend_buft_alloc_buffer"),
    "ggml_backend_buft_is_host",
)

# Share of a pass over one token that each further token adds, with four tokens of Q4_K: see the
# guide of models/. The values of AVX-VNNI and NEON are assumed.
_SLOPES = {"avx512_vnni": 0.06, "avx_vnni": 0.15, "avx2": 0.19, "neon_dotprod": 0.19}


class Status(NamedTuple):
    """The instruction set of the usable kernels, and the types of weights that they support.

    reason: why no kernels can be used; None if some can.
    """

    instructions: str | None
    types: Mapping[str, int]  # ggml's names and numbers
    reason: str | None = None


@cache
def register() -> str | None:
    """Put our buffer type before llama.cpp's; returns why that is impossible, None on success.

    Call it before ggml is first asked for its buffer types: it lists them once.
    """
    if environ.get(VARIABLE) == "off":
        return f"{VARIABLE}=off"
    if (name := instructions()) is None:
        return "there are none for this processor"
    library = devices.ggml({"ggml_version": (devices.TEXT, [])})
    version = library.ggml_version().decode("ascii", "replace") if library else "unknown"
    if version not in GGML_VERSIONS:
        return f"they know ggml {', '.join(GGML_VERSIONS)}, and this is {version}"
    addresses = _addresses()
    if missing := [each for each in _FUNCTIONS if each not in addresses]:
        return f"this llama.cpp does not export {missing[0]}"
    _native.register_kernels(name, addresses)
    if trial.find_buffer_type(BUFFER_TYPE) is None:
        return "another part of this process has loaded a model before"
    return None


@cache
def status() -> Status:
    """The kernels that this process may use: those that passed the trial."""
    if (reason := register()) is not None:
        return Status(None, {}, reason)
    name = str(instructions())
    types = _native.kernel_types(name)
    if environ.get(VARIABLE) == "on":
        return Status(name, types)
    found = trial.outcome("kernels", "try_kernels", instructions=name, extension=trial.extension())
    if found is None or not found.works:
        return Status(None, {}, "a trial in a child process has failed")
    return Status(name, {each: types[each] for each in found.words if each in types})


def slope(matrix_type: str) -> float | None:
    """Share of a pass that each further token adds; None if llama.cpp's kernels compute it."""
    found = status()
    is_ours = matrix_type.upper() in map(str.upper, found.types)
    return _SLOPES.get(str(found.instructions)) if is_ours else None


def instructions() -> str | None:
    """The fastest supported instruction set of this processor, or the one in the environment."""
    found = _native.kernel_instructions()
    most = environ.get("GGUFSPEC_INSTRUCTIONS")  # see native/dispatch.cpp
    if most == "baseline":
        found = []
    elif most == "x86-64-v3":
        found = [name for name in found if name == "avx2"]
    named = environ.get(VARIABLE)
    return named if named in found else next(iter(found), None)


def _addresses() -> dict[str, int]:
    """Addresses of the functions that the extension calls, in ggml's loaded libraries."""
    candidates = [*devices.libraries(), *_backend_libraries()]
    return {
        name: devices.address_of(getattr(library, symbol))
        for name in _FUNCTIONS
        for symbol in [_SYMBOLS.get(name, name)]
        for library in candidates
        if hasattr(library, symbol)
    }


class _DlInfo(ctypes.Structure):
    _fields_ = [
        *(("dli_fname", ctypes.c_char_p), ("dli_fbase", ctypes.c_void_p)),
        *(("dli_sname", ctypes.c_char_p), ("dli_saddr", ctypes.c_void_p)),
    ]


def _backend_libraries() -> Iterator[ctypes.CDLL]:
    """The CPU backend's library, in builds that load it at run time and link it nowhere."""
    function = devices.backend_function("CPU", "ggml_backend_dev_get_extra_bufts", None)
    info = _DlInfo()
    with suppress(OSError, AttributeError):  # no dladdr on Windows
        if function and ctypes.CDLL(None).dladdr(function, ctypes.byref(info)):
            yield ctypes.CDLL(info.dli_fname.decode())


AMX_VARIABLE = "GGUFSPEC_AMX"  # "on" or "off": skips the trial
AMX = "AMX"  # the name of its buffer type in ggml

_TRIAL = "ggufspec.llama.kernels_trial"


@cache
def leave_out_broken_amx() -> bool:
    """Disable AMX for all models of this process if it does not work; true if it was disabled.

    Call it before the first model is loaded. It costs nothing where llama.cpp has no AMX.
    """
    register()  # before the list is read
    if trial.find_buffer_type(AMX) is None or amx_works():
        return False
    leave_out(AMX)
    return True


def amx_works() -> bool:
    """Whether AMX may be used, by the environment variable or else by a trial."""
    if (chosen := environ.get(AMX_VARIABLE)) in ("on", "off"):
        return chosen == "on"
    if (found := trial.outcome(AMX, "try_amx")) is None:
        return False
    if not found.works:
        logger.warning(
            "ggufspec: the AMX kernels of this llama.cpp build do not work (tried once, "
            "remembered): other kernels are used. %s=on uses AMX anyway, off hides this message",
            AMX_VARIABLE,
        )
    return found.works


def leave_out(name: str) -> None:
    """Remove a buffer type from ggml's list, for the rest of this process."""
    while (found := trial.find_buffer_type(name)) is not None:
        types, i = found
        while types[i]:
            types[i] = types[i + 1]
            i += 1
