"""Checks of a new context that decode: the room for LoRA adapters, and that passes are exact."""

from __future__ import annotations

import numpy as np

from ggufspec.errors import DecodeError, OptionError, OutOfMemoryError
from ggufspec.llama.context import Context
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab_map import filler_tokens

_DEPTH = 20  # tokens before the passes that are compared


def check_exact(context: Context) -> None:
    """Compare passes with padded ones. Raises OptionError if a bit differs or padding stays."""
    name = context.model.path.name
    if not context.model.can_drop_tail:
        raise OptionError(
            f"exact (--exact) does not work with {name}: its recurrent layers would read the "
            "padding; leave it out"
        )
    n_rows = min(context.n_rows, context.n_ctx)
    first = min(_DEPTH, context.n_ctx - n_rows) + 1
    tokens, session = filler_tokens(context.model.vocab, first + n_rows - 1), LlamaSession(context)
    together = session.score(tokens[:first], tokens[first:]).copy()
    for i, row in enumerate(together):
        if not np.array_equal(row, session.score(tokens[: first + i])[0]):
            raise OptionError(
                f"exact (--exact) does not work with {name} on this machine: the logits of token "
                f"{i + 1} of a pass depend on the tokens beside it; leave it out"
            )
    session.forget()


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
