"""What a session holds of a text, copied out of llama.cpp's memory, and back into it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec.errors import DecodeError
from ggufspec.llama.context import Checkpoint, Context
from ggufspec.llama.log import listening

Bytes = NDArray[np.uint8]


class SavedText(NamedTuple):
    """tokens: that the cells are of. cells: in llama.cpp's form. checkpoints: see LlamaSession.

    n_prompt: tokens of the last prompt, in an exact context.
    """

    tokens: array[int]
    cells: Bytes
    checkpoints: Sequence[tuple[int, Checkpoint]] = ()
    n_prompt: int = 0

    @property
    def n_bytes(self) -> int:
        n_saved = sum(saved.nbytes for _, saved in self.checkpoints)
        return int(self.cells.nbytes) + n_saved + len(self.tokens) * self.tokens.itemsize


def save(context: Context, sequence: int) -> SavedText:
    """A copy of what a sequence holds. Raises DecodeError, ClosedError."""
    with listening():
        size = llama_cpp.llama_state_seq_get_size_ext(context.pointer, sequence, 0)
        cells = np.empty(size, np.uint8)
        written = llama_cpp.llama_state_seq_get_data_ext(
            context.pointer, _buffer(cells), size, sequence, 0
        )
    if not size or written != size:
        raise DecodeError(f"llama.cpp saved {written} of {size} bytes of a text")
    return SavedText(context.cells(sequence), cells)


def restore(context: Context, saved: SavedText, sequence: int) -> None:
    """Have a sequence hold what was saved, and nothing else. Raises DecodeError, ClosedError.

    `saved` is of a context of the same model, with caches of the same types. After an error the
    sequence holds nothing.
    """
    context.truncate(0, sequence)
    with listening() as log:
        read = llama_cpp.llama_state_seq_set_data_ext(
            context.pointer, _buffer(saved.cells), saved.cells.size, sequence, 0
        )
    if read != saved.cells.size:
        context.truncate(0, sequence)
        raise DecodeError(
            f"llama.cpp restored {read} of {saved.cells.size} bytes of a text. {log.complaints()}"
        )
    context.hold(saved.tokens, sequence)


def _buffer(data: Bytes) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * data.size).from_buffer(data.data)
