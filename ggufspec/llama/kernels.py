"""Which kernels ggml may use: ours are registered, AMX is left out where it crashes.

Both are tried in a child process, once for each build and processor: see the guide.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from os import environ
from pathlib import Path
from typing import Any, NamedTuple

from ggufspec import _native
from ggufspec.common import child
from ggufspec.drafting import profile_store
from ggufspec.errors import OptionError
from ggufspec.llama import IS_FIRST, cpu_use, devices
from ggufspec.llama.devices import POINTER, TEXT
from ggufspec.llama.ggml_layout import difference
from ggufspec.llama.log import logger

# "on": wherever they work, without measuring; "off"; or a name of instructions, measured as usual.
VARIABLE = "GGUFSPEC_KERNELS"
BUFFER_TYPE = "GGUFSPEC"  # its name in ggml
AMX_VARIABLE = "GGUFSPEC_AMX"  # "on" or "off": skips the trial
INSTRUCTIONS_VARIABLE = "GGUFSPEC_INSTRUCTIONS"  # for tests: see native/dispatch.cpp
ATTENTION = "attention"  # the name of its trial
AMX = "AMX"  # the name of its buffer type in ggml
WORKS, WRONG = "works", "wrong"  # the first word of the last line that a trial prints

_FAILED = "a trial in a child process has failed"
_CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP")
_WINDOWS_CRASH = 0xC0000000  # NTSTATUS codes of severity error
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


def check_variables() -> None:
    """Raise OptionError for a variable of the environment with a value that means nothing."""
    for name, values in {
        VARIABLE: ("on", "off", *_native.kernel_instructions()),
        AMX_VARIABLE: ("on", "off"),
        cpu_use.VARIABLE: ("auto", "always"),
        INSTRUCTIONS_VARIABLE: ("baseline", "x86-64-v3", "x86-64-v4"),
    }.items():
        if (value := environ.get(name)) and value not in values:
            raise OptionError(
                f"the environment variable {name} is {value!r}; on this processor it can be "
                f"{', '.join(values)}, or unset"
            )


def _insert() -> str | None:
    """Put our buffer type before llama.cpp's; returns why that is impossible, None on success.

    Threads that compute read ggml's list for each node of a graph, without a lock. So it is changed
    only once, when `ggufspec.llama` is imported, and only if no thread can be computing.
    """
    if environ.get(VARIABLE) == "off":
        return f"{VARIABLE}=off"
    if (name := instructions()) is None:
        return "there are none for this processor"
    if other := difference():
        return f"this version of ggml has changed what they use of it: {other}"
    if not (IS_FIRST or len(sys._current_frames()) == 1):
        return (
            "llama_cpp was imported before, and another thread may be computing: import "
            "ggufspec.llama before llama_cpp, or before threads are started"
        )
    addresses = _addresses(devices.libraries())
    if len(addresses) < len(_FUNCTIONS):
        addresses |= _addresses(_backend_libraries())
    if missing := [each for each in _FUNCTIONS if each not in addresses]:
        return f"this llama.cpp does not export {missing[0]}"
    known = profile_store.recall(_trial_key("kernels"))
    if known is not None and known.get(WORKS) is not True:
        return _FAILED
    _native.register_kernels(name, addresses)
    return None


@cache
def unusable() -> str | None:
    """Why models cannot use our buffer type; None if they can. ggml lists its types once."""
    if _REFUSAL is None and find_buffer_type(BUFFER_TYPE) is None:
        return "another part of this process has loaded a model before"
    return _REFUSAL


@cache
def status() -> Status:
    """The kernels that passed the trial, which this process may use. Raises OptionError."""
    check_variables()
    if (reason := unusable()) is not None:
        return Status(None, {}, reason)
    name = str(instructions())
    types = _native.kernel_types(name)
    if environ.get(VARIABLE) == "on":
        return Status(name, types)
    works, right = _tried_once("kernels", "try_kernels")
    if works is False:
        leave_out(BUFFER_TYPE)  # ggml asks it about each node, also in threads of other code
    if not works:
        return Status(None, {}, _FAILED)
    return Status(name, {each: number for each, number in types.items() if each in right})


@cache
def attention_refusal() -> str | None:
    """Why passes cannot use our attention; None if it passed its trial. Raises OptionError."""
    check_variables()
    if (reason := unusable()) is not None or environ.get(VARIABLE) == "on":
        return reason
    works, _ = _tried_once(ATTENTION, "try_attention")
    return None if works else _FAILED


def slope(matrix_type: str) -> float | None:
    """Share of a pass that each further token adds; None if llama.cpp's kernels compute it."""
    found = status()
    is_ours = matrix_type.upper() in map(str.upper, found.types)
    return _SLOPES.get(str(found.instructions)) if is_ours else None


def instructions() -> str | None:
    """The fastest supported instruction set of this processor, or the one in the environment."""
    found = _native.kernel_instructions()
    most = environ.get(INSTRUCTIONS_VARIABLE)
    if most == "baseline":
        found = []
    elif most == "x86-64-v3":
        found = [name for name in found if name == "avx2"]
    named = environ.get(VARIABLE)
    return named if named in found else next(iter(found), None)


def _addresses(libraries: Iterable[ctypes.CDLL]) -> dict[str, int]:
    return {
        name: devices.address_of(getattr(library, symbol))
        for library in libraries
        for name in _FUNCTIONS
        for symbol in [_SYMBOLS.get(name, name)]
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


def prepare(*, repack: bool) -> None:
    """Try, in child processes, what was not tried on this machine: it takes seconds, once.

    `repack`: whether the models to load may use our kernels.
    """
    leave_out_broken_amx()
    if repack:
        status()


@cache
def leave_out_broken_amx() -> bool:
    """Before the first model is loaded: disable AMX if it does not work; true if disabled."""
    if find_buffer_type(AMX) is None or amx_works():
        return False
    leave_out(AMX)
    return True


def amx_works() -> bool:
    """Whether AMX may be used, by the environment variable or else by a trial."""
    if (chosen := environ.get(AMX_VARIABLE)) in ("on", "off"):
        return chosen == "on"
    works, _ = _tried_once(AMX, "try_amx")
    if works is False:
        logger.warning(
            "ggufspec: the AMX kernels of this llama.cpp build do not work (tried once, "
            "remembered): other kernels are used. %s=on uses AMX anyway, off hides this message",
            AMX_VARIABLE,
        )
    return bool(works)


def leave_out(name: str) -> None:
    """Remove a buffer type from ggml's list, for the rest of this process.

    The next one is then listed twice: one store, so that a thread that reads the list, to load a
    model, misses no other type.
    """
    while (found := find_buffer_type(name)) is not None:
        types, i = found
        types[i] = types[i + 1]


def _trial_key(name: str) -> dict[str, object]:
    """What the result of a trial depends on."""
    of_ours = {"instructions": instructions(), "extension": extension_files()}
    return {"about": name, **build_key(), **({} if name == AMX else of_ours)}


def _tried_once(name: str, function: str) -> tuple[bool | None, Sequence[str]]:
    """The stored or new result of a trial: whether it works, and further words that it printed.

    None without a definite answer (no process could be started, a timeout): the next process tries
    again.
    """
    key = _trial_key(name)
    known = profile_store.recall(key)
    if known is None and (known := _tried(name, function)) is not None:
        profile_store.remember(key, known)
    if known is None:
        return None, ()
    words = known.get("words")
    return known.get(WORKS) is True, words if isinstance(words, list) else ()


def tell(*words: str) -> None:
    """Print the outcome, as the last line of a trial."""
    sys.stdout.write(" ".join(words) + "\n")


def without_core_dumps() -> None:
    """Disable core dumps in a child process that may crash."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def find_buffer_type(name: str) -> tuple[ctypes._Pointer[ctypes.c_void_p], int] | None:
    """ggml's list of extra buffer types, which a null ends, and the index of `name` in it.

    llama.cpp reads the list for each model, and takes the first type that supports a tensor.
    """
    get_types = devices.backend_function(
        *("CPU", "ggml_backend_dev_get_extra_bufts", ctypes.POINTER(POINTER), POINTER)
    )
    library = devices.ggml({"ggml_backend_buft_name": (TEXT, [POINTER])})
    types = get_types(None) if get_types and library else None
    i = 0
    while library and types and types[i]:
        if library.ggml_backend_buft_name(types[i]) == name.encode():
            return types, i
        i += 1
    return None


def build_key() -> dict[str, object]:
    """The processor, and the files of llama.cpp's libraries by size and time."""
    folder = Path(str(devices.libraries()[0]._name)).parent
    return {"cpu": devices.cpu_name(), "build": _files(sorted(folder.glob("*ggml*")))}


def extension_files() -> dict[str, list[int]]:
    """The file of ggufspec's extension, by size and time."""
    return _files([Path(str(_native.__file__))])


def _files(paths: Sequence[Path]) -> dict[str, list[int]]:
    stats = {path.name: path.stat() for path in paths}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _tried(name: str, function: str) -> dict[str, Any] | None:
    try:
        module = "attention_trials" if name == ATTENTION else "kernel_trials"
        done = child.call(f"ggufspec.llama.{module}", function)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        printed = (done.stdout.decode("ascii", "replace").splitlines() or [""])[-1].split()
        if done.returncode == 0 and printed and printed[0] in (WORKS, WRONG):
            return {WORKS: printed[0] == WORKS} | ({"words": printed[1:]} if printed[1:] else {})
        crashes = [-getattr(signal, each, 0) for each in _CRASHES]
        if done.returncode and (done.returncode in crashes or done.returncode >= _WINDOWS_CRASH):
            return {WORKS: False}
        reason = f"the child process ended with code {done.returncode}"
    logger.warning(
        "ggufspec: the %s kernels could not be tried (%s); this process does not use them, "
        "the next one tries again",
        name,
        reason,
    )
    return None


_REFUSAL = _insert()
