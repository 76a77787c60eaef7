"""Copies the state of a sequence out of llama.cpp's memory and back."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec.common.files import format_bytes
from ggufspec.errors import DecodeError

State = NDArray[np.uint8]


def state_of(context: int, sequence: int, flags: int, what: str) -> State:
    """A copy of the state; `flags`: LLAMA_STATE_SEQ_FLAGS_*. Raises DecodeError naming `what`."""
    size = llama_cpp.llama_state_seq_get_size_ext(context, sequence, flags)
    try:
        state = np.empty(size, np.uint8)
    except MemoryError as error:
        needed = format_bytes(size)
        raise DecodeError(f"there is no memory for a copy of {what}, which has {needed}") from error
    written = llama_cpp.llama_state_seq_get_data_ext(context, _buffer(state), size, sequence, flags)
    if written != size:
        raise DecodeError(f"llama.cpp saved {written} of {size} bytes of {what}")
    return state


def set_state(context: int, sequence: int, flags: int, state: State) -> int:
    """Replace the state by a copy; returns the bytes that llama.cpp has read, 0 on an error."""
    buffer = _buffer(state)
    return int(llama_cpp.llama_state_seq_set_data_ext(context, buffer, state.size, sequence, flags))


def repeat(context: int, n_times: int) -> bool:
    """Add what sequence 0 holds to it so many times, by way of sequence 1; False if that fails.

    Much faster than reading a text. The caches of both sequences are one. Raises DecodeError.
    """
    memory, state = llama_cpp.llama_get_memory(context), state_of(context, 0, 0, "its cells")
    for _ in range(n_times):
        if not set_state(context, 1, 0, state):
            return False
        llama_cpp.llama_memory_seq_cp(memory, 1, 0, -1, -1)
    llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
    return True


def _buffer(state: State) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * state.size).from_buffer(state.data)
