"""Checks of a new context that decode: the room for LoRA adapters, and that passes are exact."""

from __future__ import annotations

import numpy as np

from ggufspec.errors import DecodeError, OptionError, OutOfMemoryError
from ggufspec.llama import kernels
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import OWN
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab_map import filler_tokens
from ggufspec.models.header import read_header

_DEPTH = 20  # tokens before the passes that are compared


def check_exact(context: Context) -> None:
    """Raise OptionError unless a token's logits depend on its text alone, to the last bit."""
    found = _found_inexact(context)
    if (why := why_inexact(context) or found) is not None:
        raise OptionError(
            f"exact (--exact) does not work with {context.model.path.name} here: {why}; leave it "
            "out"
        )


def why_inexact(context: Context) -> str | None:
    """Why a token's logits may depend on more than its text; None: our kernels compute everything.

    Then they depend neither on how many tokens a pass has, nor on where their cells lie. The
    context must have decoded a batch.
    """
    model = context.model
    if model.devices:
        return f"{', '.join(model.devices)} computes layers, and rounds by the size of a pass"
    if not model.can_drop_tail:
        return "llama.cpp's kernels compute its recurrent layers"
    if model.adapters:
        return "llama.cpp's kernels compute its LoRA adapters"
    if (refusal := kernels.attention_refusal()) is not None:
        return f"llama.cpp computes its attention, since ggufspec's cannot be used ({refusal})"
    if context.options.flash_attention != OWN:
        return "llama.cpp computes its attention, as asked (flash_attention, -fa)"
    used = {*map(str.upper, model.kernels.types)}
    if others := sorted({each.type for each in read_header(model.path).matrices} - used):
        why = kernels.status().reason
        return f"llama.cpp's kernels compute its {' and '.join(others)} weights" + (
            f" ({why})" if why else ""
        )
    if not context.native.has_own_attention:
        cache = f"{context.options.type_k} and {context.options.type_v}"
        return f"ggufspec's attention has no code for its heads, or for caches of {cache}"
    return None


def _found_inexact(context: Context) -> str | None:
    """Compare a pass after a prompt in one piece with passes over single tokens."""
    n_rows = min(context.n_rows, context.n_ctx)
    first = min(_DEPTH, context.n_ctx - n_rows) + 1
    tokens, session = filler_tokens(context.model.vocab, first + n_rows - 1), LlamaSession(context)
    together = session.score(tokens[:first], tokens[first:]).copy()
    session.forget()
    for n in range(1, len(tokens) + 1):
        row = session.score(tokens[:n])[0]
        if n >= first and not np.array_equal(row, together[n - first]):
            return f"the logits of token {n} depend on the size of a pass"
    session.forget()
    return None


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
