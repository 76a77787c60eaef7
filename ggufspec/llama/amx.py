"""Keeps llama.cpp from using its AMX kernels in builds where they crash: see the guide."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from functools import cache
from os import environ
from pathlib import Path

import numpy as np

from ggufspec.common import child
from ggufspec.drafting import profile_store
from ggufspec.llama import devices
from ggufspec.llama.devices import POINTER, TEXT
from ggufspec.llama.log import logger

VARIABLE = "GGUFSPEC_AMX"  # "on" or "off": skips the trial
BUFFER_TYPE = "AMX"  # its name in ggml
WORKS, WRONG = "works", "wrong"  # printed by the trial

_CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP")
_WINDOWS_CRASH = 0xC0000000  # NTSTATUS codes of severity error
_MODEL = Path(__file__).parent.parent / "standin" / "classics-draft.gguf"  # for the trial
_TOKENS = range(10, 26)
_ROUNDING = 0.2  # of the spread of the logits; wrong logits are off by as much as the spread


@cache
def leave_out_if_broken() -> bool:
    """Keep all models of this process from using AMX if it does not work; whether that was done.

    Call it before the first model is loaded. It costs nothing where llama.cpp has no AMX.
    """
    if _find(BUFFER_TYPE) is None or works():
        return False
    leave_out(BUFFER_TYPE)
    return True


def works() -> bool:
    """Whether AMX may be used: as the user says, as an earlier trial found, or by a trial now.

    A trial without a definite answer (no process could be started, a timeout) counts as failed for
    this call, and is not remembered.
    """
    if (chosen := environ.get(VARIABLE)) in ("on", "off"):
        return chosen == "on"
    key = {"about": BUFFER_TYPE, "cpu": devices.cpu_name(), "build": _build()}
    if (known := profile_store.recall(key)) is not None:
        found = known.get(WORKS)
    elif (found := _try()) is not None:
        profile_store.remember(key, {WORKS: found})
    if found is False:
        logger.warning(
            "ggufspec: the AMX kernels of this llama.cpp build do not work (tried once, "
            "remembered): other kernels are used. %s=on uses AMX anyway, off hides this message",
            VARIABLE,
        )
    return found is True


def leave_out(name: str) -> None:
    """Remove a buffer type from ggml's list, for the rest of this process."""
    while (found := _find(name)) is not None:
        types, i = found
        while types[i]:
            types[i] = types[i + 1]
            i += 1


def run_trial() -> None:
    """Print WORKS, or WRONG where the logits are wrong. For a child process, which may crash.

    A pass over one token uses no tiles, so it gives the logits to compare with.
    """
    from ggufspec.llama.context import Context
    from ggufspec.llama.context_options import ContextOptions
    from ggufspec.llama.model import Model

    environ[VARIABLE] = "on"
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens = [*_TOKENS]
    model = Model(_MODEL, n_gpu_layers=0)
    context = Context(model, ContextOptions(n_ctx=64, n_rows=len(tokens), n_threads=2))
    context.decode(tokens, len(tokens), 0)
    batched = np.array(context.rows(0, len(tokens)))
    context.truncate(0, 0)
    for token, row in zip(tokens, batched, strict=True):
        context.decode([token], 1, 0)
        single = np.array(context.rows(0, 1)[0])
        if not np.abs(row - single).max() < _ROUNDING * np.ptp(single):
            sys.stdout.write(WRONG + "\n")
            return
    sys.stdout.write(WORKS + "\n")


def _try() -> bool | None:
    """Whether AMX works, found by a child process; None without a definite answer."""
    try:
        done = child.call("ggufspec.llama.amx", "run_trial")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        printed = done.stdout.decode("ascii", "replace").split()[-1:]
        if done.returncode == 0 and printed in ([WORKS], [WRONG]):
            return printed == [WORKS]
        crashes = [-getattr(signal, name, 0) for name in _CRASHES]
        if done.returncode and (done.returncode in crashes or done.returncode >= _WINDOWS_CRASH):
            return False
        reason = f"the child process ended with code {done.returncode}"
    logger.warning(
        "ggufspec: the AMX kernels could not be tried (%s); this process does not use them, "
        "the next one tries again",
        reason,
    )
    return None


def _build() -> dict[str, list[int]]:
    folder = Path(str(devices.libraries()[0]._name)).parent
    stats = {path.name: path.stat() for path in sorted(folder.glob("*ggml*"))}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _find(name: str) -> tuple[ctypes._Pointer[ctypes.c_void_p], int] | None:
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
