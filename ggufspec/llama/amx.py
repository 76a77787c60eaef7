"""Keeps llama.cpp from using its AMX kernels in builds where they crash: see the guide."""

from __future__ import annotations

from functools import cache
from os import environ

from ggufspec.llama import kernels, trial
from ggufspec.llama.log import logger

VARIABLE = "GGUFSPEC_AMX"  # "on" or "off": skips the trial
BUFFER_TYPE = "AMX"  # its name in ggml

_TRIAL = "ggufspec.llama.amx_trial"


@cache
def leave_out_if_broken() -> bool:
    """Disable AMX for all models of this process if it does not work; true if it was disabled.

    Call it before the first model is loaded. It costs nothing where llama.cpp has no AMX.
    """
    kernels.register()  # before the list is read
    if trial.find_buffer_type(BUFFER_TYPE) is None or works():
        return False
    leave_out(BUFFER_TYPE)
    return True


def works() -> bool:
    """Whether AMX may be used, by the environment variable or else by a trial."""
    if (chosen := environ.get(VARIABLE)) in ("on", "off"):
        return chosen == "on"
    if (found := trial.outcome(BUFFER_TYPE, _TRIAL)) is None:
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
