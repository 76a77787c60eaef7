"""Finds out at loading whether a context with LoRA adapters has the memory for their products."""

from __future__ import annotations

from ggufspec.errors import DecodeError, OutOfMemoryError
from ggufspec.llama.context import Context


def check_room(context: Context) -> None:
    """If it has adapters, decode one token: llama.cpp allocates for them with the first pass.

    Raises OutOfMemoryError, for which loading tries smaller values.
    """
    if not context.model.adapters:
        return
    try:
        context.decode([0], 0)
    except DecodeError as error:
        raise OutOfMemoryError(
            f"the LoRA adapters of {context.model.path} leave too little memory for its passes: "
            f"use a smaller context (n_ctx, -c), or fewer GPU layers (n_gpu_layers, -ngl).\n{error}"
        ) from error
    context.truncate(0)
