"""A llama.cpp context: memory for one sequence of tokens, and a batch to decode with.

Owns the pointers and checks every return value. Policy, such as what to decode, is the session's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec import _native, defaults
from ggufspec.core import Logits
from ggufspec.errors import ClosedError, DecodeError, ModelError, OptionError, OutOfMemoryError
from ggufspec.llama.devices import n_threads_default
from ggufspec.llama.log import listening, log
from ggufspec.llama.model import Model

KV_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, not named by llama-cpp-python
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
FLASH_ATTENTION = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_SEQUENCE = 0
_CLOSED = "this context is closed; load the model again"
_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

Checkpoint = NDArray[np.uint8]  # the part of a state that cannot be cut: of recurrent layers


@dataclass(frozen=True)
class ContextOptions:
    """How a context is made. `n_rows` is the most logits rows that one decode will be asked for."""

    n_ctx: int
    n_rows: int = 1
    n_batch: int = defaults.N_BATCH
    n_threads: int | None = None  # None: one per physical core
    flash_attention: str = defaults.FLASH_ATTENTION
    type_k: str = defaults.KV_TYPE
    type_v: str = defaults.KV_TYPE


class Context:
    """A context over a model, for one sequence. Close it before its model."""

    def __init__(self, model: Model, options: ContextOptions) -> None:
        """Raises OptionError for unknown values, OutOfMemoryError where it does not fit."""
        if model.n_ctx_max is not None and options.n_ctx > model.n_ctx_max:
            raise OptionError(
                f"a context of {options.n_ctx:,} tokens is too long for {model.path}, whose positions "
                f"end at {model.n_ctx_max:,}; choose at most that (n_ctx, -c)"
            )
        self.model = model
        self.n_ctx = options.n_ctx
        self.n_batch = max(min(options.n_batch, options.n_ctx), options.n_rows)
        self.n_vocab = model.vocab.n_tokens
        self.decode_seconds = 0.0  # wall time inside llama_decode so far
        self._pointer: int | None = self._make(options)
        try:
            memory = llama_cpp.llama_get_memory(self._pointer)
            if not memory:
                raise ModelError(
                    f"{model.path} has no memory for tokens ({model.description}): it makes "
                    "embeddings. Speculative decoding needs a model that writes text"
                )
            self._memory: int = memory
            self._make_batch()
        except BaseException:
            self.close()
            raise
        library = llama_cpp.llama_cpp._lib
        self._truncate = _address(library.llama_memory_seq_rm)
        self._get_logits = _address(library.llama_get_logits_ith)

    def _make(self, options: ContextOptions) -> int:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = 1
        params.n_outputs_max = options.n_rows
        n_threads = options.n_threads or n_threads_default()
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = _choice(
            FLASH_ATTENTION, options.flash_attention, "flash attention"
        )
        params.type_k = _choice(KV_TYPES, options.type_k, "type of the K cache")
        params.type_v = _choice(KV_TYPES, options.type_v, "type of the V cache")
        with listening() as heard:
            pointer: int | None = llama_cpp.llama_init_from_model(self.model.pointer, params)
            if not pointer:
                raise OutOfMemoryError(
                    f"no context of {options.n_ctx:,} tokens could be made for {self.model.path}: "
                    "use a smaller context (n_ctx, -c), fewer GPU layers (n_gpu_layers, -ngl), or "
                    f"another cache type.\n{heard.complaints()}"
                )
        return pointer

    def _make_batch(self) -> None:
        self._batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        for i in range(self.n_batch):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = _SEQUENCE
        shape = (self.n_batch,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._wanted = np.ctypeslib.as_array(self._batch.logits, shape)
        self._counting = np.arange(self.n_ctx + self.n_batch, dtype=np.int32)

    @property
    def pointer(self) -> int:
        """The llama_context pointer. Raises ClosedError after close."""
        if self._pointer is None:
            raise ClosedError(_CLOSED)
        return self._pointer

    def decode(self, tokens: Sequence[int], first: int, n_rows: int) -> None:
        """Evaluate `tokens` from position `first` on, and keep logits of the last `n_rows`.

        Raises DecodeError; the memory may then hold some of the tokens.
        """
        pointer = self.pointer
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = self._counting[first : first + n]
        self._wanted[:n] = 0
        self._wanted[n - n_rows : n] = 1
        self._batch.n_tokens = n
        log.inside += 1
        start = perf_counter()
        try:
            result = llama_cpp.llama_decode(pointer, self._batch)
            llama_cpp.llama_synchronize(pointer)
        finally:
            self.decode_seconds += perf_counter() - start
            log.inside -= 1
        if result:
            raise DecodeError(
                f"llama.cpp could not decode {n} tokens at position {first} (code {result}).\n"
                f"{log.complaints()}"
            )

    def rows(self, first: int, n_rows: int) -> Logits:
        """Logits (n_rows, n_vocab) of the last batch from its token `first` on, in place.

        Valid until the next decode.
        """
        return _native.logits_rows(self._get_logits, self.pointer, first, n_rows, self.n_vocab)

    def truncate(self, n_tokens: int) -> bool:
        """Forget all from position `n_tokens` on; False where the tail cannot be dropped."""
        if self._pointer is None:
            raise ClosedError(_CLOSED)
        return _native.truncate(self._truncate, self._memory, _SEQUENCE, n_tokens)

    def checkpoint(self) -> Checkpoint:
        """A copy of the state of the recurrent layers, as it is now."""
        size = llama_cpp.llama_state_seq_get_size_ext(self.pointer, _SEQUENCE, _PARTIAL)
        saved = np.empty(size, np.uint8)
        written = llama_cpp.llama_state_seq_get_data_ext(
            self.pointer, _bytes_of(saved), size, _SEQUENCE, _PARTIAL
        )
        if written != size:
            raise DecodeError(f"llama.cpp saved {written} of {size} bytes of the model's state")
        return saved

    def restore(self, saved: Checkpoint) -> None:
        """Go back to a checkpoint; what is not recurrent still has to be truncated."""
        read = llama_cpp.llama_state_seq_set_data_ext(
            self.pointer, _bytes_of(saved), saved.size, _SEQUENCE, _PARTIAL
        )
        if read == 0:
            raise DecodeError(f"llama.cpp refused {saved.size} bytes of the model's own state")

    def close(self) -> None:
        """Give the memory back. Closing twice is fine."""
        if hasattr(self, "_batch"):
            llama_cpp.llama_batch_free(self._batch)
            del self._batch, self._tokens, self._positions, self._wanted
        if self._pointer is not None:
            with listening():
                llama_cpp.llama_free(self._pointer)
            self._pointer = None


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _bytes_of(array: Checkpoint) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * array.size).from_buffer(array.data)


def _choice(choices: dict[str, int], name: str, what: str) -> int:
    if name not in choices:
        raise OptionError(f"{name!r} is no {what}; choose from {', '.join(choices)}")
    return choices[name]
