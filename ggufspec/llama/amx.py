"""Keeps llama.cpp from using its AMX kernels in builds where they crash: see the guide."""

from __future__ import annotations

from functools import cache
from os import environ
from pathlib import Path

import numpy as np

from ggufspec.llama import kernels, trial
from ggufspec.llama.log import logger

VARIABLE = "GGUFSPEC_AMX"  # "on" or "off": skips the trial
BUFFER_TYPE = "AMX"  # its name in ggml

_MODEL = Path(__file__).parent.parent / "standin" / "classics-draft.gguf"  # for the trial
_TOKENS = range(10, 26)
_ROUNDING = 0.2  # of the spread of the logits; wrong logits are off by as much as the spread


@cache
def leave_out_if_broken() -> bool:
    """Keep all models of this process from using AMX if it does not work; whether that was done.

    Call it before the first model is loaded. It costs nothing where llama.cpp has no AMX.
    """
    kernels.register()  # before the list is read
    if trial.find_buffer_type(BUFFER_TYPE) is None or works():
        return False
    leave_out(BUFFER_TYPE)
    return True


def works() -> bool:
    """Whether AMX may be used: as the user says, or as a trial has found."""
    if (chosen := environ.get(VARIABLE)) in ("on", "off"):
        return chosen == "on"
    if (found := trial.outcome(BUFFER_TYPE, __name__)) is None:
        return False
    if not found.works:
        logger.warning(
            "ggufspec: the AMX kernels of this llama.cpp build do not work (tried once, "
            "remembered): other kernels are used. %s=on uses AMX anyway, off hides this message",
            VARIABLE,
        )
    return found.works


def leave_out(name: str) -> None:
    """Remove a buffer type from ggml's list, for the rest of this process."""
    while (found := trial.find_buffer_type(name)) is not None:
        types, i = found
        while types[i]:
            types[i] = types[i + 1]
            i += 1


def run_trial() -> None:
    """Tell WORKS, or WRONG where the logits are wrong. For a child process, which may crash.

    A pass over one token uses no tiles, so it gives the logits to compare with.
    """
    from ggufspec.llama.context import Context
    from ggufspec.llama.context_options import ContextOptions
    from ggufspec.llama.model import Model

    environ[VARIABLE] = "on"
    trial.without_core_dumps()
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
            trial.tell(trial.WRONG)
            return
    trial.tell(trial.WORKS)
