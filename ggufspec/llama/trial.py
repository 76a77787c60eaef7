"""Tries kernels in a child process, which may crash, once for each build and processor."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ggufspec import _native
from ggufspec.common import child
from ggufspec.drafting import profile_store
from ggufspec.llama import devices
from ggufspec.llama.devices import POINTER, TEXT
from ggufspec.llama.log import logger

WORKS, WRONG = "works", "wrong"  # the first word of the last line that a trial prints

_CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP")
_WINDOWS_CRASH = 0xC0000000  # NTSTATUS codes of severity error
_WORDS = "words"


class Outcome(NamedTuple):
    """Whether kernels work, and the further words that the trial printed."""

    works: bool
    words: Sequence[str] = ()


def outcome(name: str, function: str, **facts: object) -> Outcome | None:
    """The result of a function of kernel_trials, stored or new; None without a definite answer.

    facts: what the result depends on besides the processor and llama.cpp's build. Without a
    definite answer (no process could be started, a timeout), the next process tries again.
    """
    key = {"about": name, "cpu": devices.cpu_name(), "build": build(), **facts}
    if (known := profile_store.recall(key)) is None:
        if (found := _try(name, function)) is None:
            return None
        known = {WORKS: found.works, **({_WORDS: [*found.words]} if found.words else {})}
        profile_store.remember(key, known)
    return Outcome(known.get(WORKS) is True, [str(each) for each in known.get(_WORDS) or ()])


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


def build() -> dict[str, list[int]]:
    """The files of llama.cpp's libraries, by size and time."""
    folder = Path(str(devices.libraries()[0]._name)).parent
    return _files(sorted(folder.glob("*ggml*")))


def extension() -> dict[str, list[int]]:
    """The file of ggufspec's extension, by size and time."""
    return _files([Path(str(_native.__file__))])


def _files(paths: Sequence[Path]) -> dict[str, list[int]]:
    stats = {path.name: path.stat() for path in paths}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _try(name: str, function: str) -> Outcome | None:
    """The outcome of a trial; None without a definite one."""
    try:
        done = child.call("ggufspec.llama.kernel_trials", function)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        printed = (done.stdout.decode("ascii", "replace").splitlines() or [""])[-1].split()
        if done.returncode == 0 and printed and printed[0] in (WORKS, WRONG):
            return Outcome(printed[0] == WORKS, printed[1:])
        crashes = [-getattr(signal, each, 0) for each in _CRASHES]
        if done.returncode and (done.returncode in crashes or done.returncode >= _WINDOWS_CRASH):
            return Outcome(False)
        reason = f"the child process ended with code {done.returncode}"
    logger.warning(
        "ggufspec: the %s kernels could not be tried (%s); this process does not use them, "
        "the next one tries again",
        name,
        reason,
    )
    return None
