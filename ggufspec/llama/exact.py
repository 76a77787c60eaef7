"""Checks that a row of a pass depends neither on the other tokens of the pass nor on its place."""

from __future__ import annotations

import numpy as np

from ggufspec.errors import OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.filler import filler_tokens
from ggufspec.llama.session import LlamaSession

_DEPTH = 20  # tokens before the passes that are compared


def check_exact(context: Context) -> None:
    """Compare a full pass with passes over one token and padding.

    Raises OptionError if the rows differ in any bit, or if the model cannot drop padding.
    """
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
