"""llama.cpp's kernels for AMX, left out where they end the process. Knows ggml's list of buffers.

ldtilecfg reads 64 bytes, and GCC's header tells the compiler of 8: in optimized builds it reads
what happens to lie on the stack, and the processor refuses it (general protection fault with the
first pass over two tokens; llama.cpp issue 20824, pull request 26954). Nobody can see that from
outside, so a child process tries them, once for each build; without them llama.cpp takes its next
best kernels.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np

from ggufspec.drafting import profile_store
from ggufspec.llama import devices
from ggufspec.llama.log import listening, logger

VARIABLE = "GGUFSPEC_AMX"  # "on", "off": what a trial would find out otherwise
_NAME = b"AMX"
_TRY_SECONDS = 60.0  # of the child; it starts an interpreter
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from ggufspec.llama import amx; amx.try_out()"
_WORKS = "works"
_MODEL = Path(__file__).parent.parent / "standin" / "classics-draft.gguf"
_TOKENS = range(10, 26)
_ROUNDING = 0.2  # of the spread of logits; what is wrong is as far off as the spread


@cache
def leave_out_if_broken() -> bool:
    """Let no model of this process use AMX if that does not work; whether it was left out.

    Call it before the first model is loaded. Where there is no AMX it costs nothing.
    """
    if _place() is None or _works():
        return False
    logger.warning(
        "the AMX kernels of this llama.cpp do not work, as compiled: others are used (%s=on, or "
        "off, spares the trial)",
        VARIABLE,
    )
    while (place := _place()) is not None:
        kinds, i = place
        while kinds[i]:
            kinds[i] = kinds[i + 1]
            i += 1
    return True


def try_out() -> None:
    """Print that AMX works, if it does; ends the process if not. For a child.

    Passes over one token use no tiles: what they say is compared with a pass over all.
    """
    from ggufspec.llama.context import Context, ContextOptions
    from ggufspec.llama.model import Model

    os.environ[VARIABLE] = "on"
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens = [*_TOKENS]
    model = Model(_MODEL, n_gpu_layers=0)
    context = Context(model, ContextOptions(n_ctx=64, n_rows=len(tokens), n_threads=2))
    context.decode(tokens, len(tokens), 0)
    together = np.array(context.rows(0, len(tokens)))
    context.truncate(0, 0)
    for token, row in zip(tokens, together, strict=True):
        context.decode([token], 1, 0)
        alone = np.array(context.rows(0, 1)[0])
        if not np.abs(row - alone).max() < _ROUNDING * np.ptp(alone):
            return
    sys.stdout.write(_WORKS + "\n")


def _works() -> bool:
    asked = os.environ.get(VARIABLE, "")
    if asked in ("on", "off"):
        return asked == "on"
    facts = {"about": _NAME.decode(), "cpu": devices.cpu_name(), "build": _build()}
    known = profile_store.recall(facts)
    if known is None:
        known = {_WORKS: _tried()}
        profile_store.remember(facts, known)
    return known.get(_WORKS) is True


def _tried() -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, *sys.path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [_WORKS.encode()]


def _build() -> dict[str, list[int]]:
    """Tells this build of llama.cpp from others."""
    folder = Path(str(devices.libraries()[0]._name)).parent
    stats = {path.name: path.stat() for path in sorted(folder.glob("*ggml*"))}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _place() -> tuple[ctypes._Pointer[ctypes.c_void_p], int] | None:
    """ggml's own list of kinds of buffers, ended by a null, and where AMX is in it.

    llama.cpp asks for it with each model, and takes the first kind that knows a tensor.
    """
    with listening():
        llama_cpp.llama_backend_init()
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library = devices.ggml(
        {
            "ggml_backend_reg_by_name": (pointer, [text]),
            "ggml_backend_reg_get_proc_address": (pointer, [pointer, text]),
            "ggml_backend_buft_name": (text, [pointer]),
        }
    )
    registry = library and library.ggml_backend_reg_by_name(b"CPU")
    if not library or not registry:
        return None
    address = library.ggml_backend_reg_get_proc_address(
        registry, b"ggml_backend_dev_get_extra_bufts"
    )
    kinds = address and ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(None)
    i = 0
    while kinds and kinds[i]:
        if library.ggml_backend_buft_name(kinds[i]) == _NAME:
            return kinds, i
        i += 1
    return None
