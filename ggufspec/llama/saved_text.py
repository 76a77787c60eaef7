"""Copies the state of a text out of llama.cpp's memory and back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.types import n_same, token_array
from ggufspec.errors import DecodeError
from ggufspec.llama.context import Checkpoint, Context
from ggufspec.llama.log import listening
from ggufspec.llama.sequence_state import State, set_state, state_of


class SavedText(NamedTuple):
    """tokens: that the cells are of. cells: in llama.cpp's form. checkpoints: see LlamaSession.

    n_prompt: tokens of the last prompt, in an exact context. n_least: a text that begins with fewer
    of the tokens cannot go on from the cells. state (1, width): of a head, the target's hidden
    state of the last token.
    """

    tokens: array[int]
    cells: State
    checkpoints: Sequence[tuple[int, Checkpoint]] = ()
    n_prompt: int = 0
    n_least: int = 0
    state: NDArray[np.float32] | None = None

    @property
    def n_bytes(self) -> int:
        n_saved = sum(saved.nbytes for _, saved in self.checkpoints)
        n_state = 0 if self.state is None else self.state.nbytes
        return int(self.cells.nbytes) + n_saved + n_state + len(self.tokens) * self.tokens.itemsize

    def n_usable(self, tokens: Sequence[int]) -> int:
        """Length of the prefix of a text that need not be decoded once this is restored."""
        n = n_same(self.tokens, token_array(tokens))
        if n >= self.n_least:
            return n
        return max((n_saved for n_saved, _ in self.checkpoints if n_saved <= n), default=0)


def save(context: Context, sequence: int) -> SavedText | None:
    """A copy of a sequence's state; None if it is empty, or lacks the state after its tokens.

    Raises DecodeError, ClosedError.
    """
    tokens = array("i", context.native.cells(sequence))
    if not tokens or not context.truncate(len(tokens), sequence):
        return None
    with listening():
        cells = state_of(context.pointer, sequence, 0, "a text")
    if not cells.size:
        raise DecodeError("llama.cpp saved nothing of a text")
    # A recurrent state covers all tokens. For layers with windows, llama.cpp saves only the cells
    # that the end of the text sees, so that one token can be dropped.
    is_recurrent = context.n_droppable is not None
    n_least = len(tokens) if is_recurrent else n_firm(context, len(tokens))
    return SavedText(tokens, cells, n_least=n_least)


def n_firm(context: Context, n_tokens: int) -> int:
    """How many of a restored text's `n_tokens` can no longer be dropped.

    A text with a shorter common prefix continues from a checkpoint, or is read from its start.
    """
    return max(n_tokens - 1, 0) if context.model.has_windows else 0


def restore(context: Context, saved: SavedText, sequence: int) -> None:
    """Replace a sequence's state by a saved one. Raises DecodeError, ClosedError.

    `saved` is of a context of the same model, with caches of the same types. After an error, or a
    Ctrl-C, the sequence holds nothing.
    """
    context.truncate(0, sequence)
    context.native.begin_restore(context.n_cells(sequence), sequence)  # empty until all is copied
    with listening() as log:
        read = set_state(context.pointer, sequence, 0, saved.cells)
    if read != saved.cells.size:
        context.truncate(0, sequence)
        raise DecodeError(
            f"llama.cpp restored {read} of {saved.cells.size} bytes of a text. {log.complaints()}"
        )
    context.native.hold(saved.tokens, sequence)  # type: ignore[arg-type]  # int32
