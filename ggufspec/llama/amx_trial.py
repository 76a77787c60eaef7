"""Tries llama.cpp's AMX kernels on a small model."""

from __future__ import annotations

from os import environ
from pathlib import Path

import numpy as np

from ggufspec.llama import amx, kernels, trial
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model

_MODEL = Path(__file__).parent.parent / "standin" / "classics-draft.gguf"
_TOKENS = range(10, 26)
_ROUNDING = 0.2  # of the spread of the logits; wrong logits are off by as much as the spread


def run_trial() -> None:
    """Print WORKS, or WRONG if the logits are wrong. Runs in a child process, which may crash.

    The reference is a pass over one token, which uses no AMX tiles.
    """
    environ[amx.VARIABLE] = "on"
    environ[kernels.VARIABLE] = "off"  # else ggufspec's kernels would compute
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
