"""Checks at loading that a context with LoRA adapters has memory for their products."""

from __future__ import annotations

from ggufspec.errors import DecodeError, OutOfMemoryError
from ggufspec.llama.context import Context


def check_room(context: Context) -> None:
    """Decode one token if the model has adapters: llama.cpp allocates for them in the first pass.

    Raises OutOfMemoryError, after which loading tries smaller values.
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
