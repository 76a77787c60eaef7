"""A llama.cpp context that only times passes of a model, at a chosen depth of the cache."""

from __future__ import annotations

import ctypes
from time import perf_counter
from typing import Any

import llama_cpp

from ggufspec.llama import devices
from ggufspec.llama.log import listening
from ggufspec.llama.threadpool import ThreadPools

_N_COPIED = 32  # tokens that are decoded; further cells are copies of theirs
_N_PADDING = 64


class BareContext:
    """A context of the model with this pointer. Close it before the model."""

    def __init__(
        self,
        model: int,
        n_most: int,
        *,
        n_before: int = 0,
        flash_attention: int = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
        pools: ThreadPools | None = None,
    ) -> None:
        """`n_most`: maximum tokens of a pass; `n_before`: maximum tokens before it, see `fill`.

        `pools`: shared with contexts that never compute at the same time; None: its own.
        """
        params = llama_cpp.llama_context_default_params()
        params.n_batch = params.n_ubatch = max(n_most, _N_COPIED if n_before else 1)
        params.n_ctx = n_before + params.n_batch + _N_PADDING
        params.n_threads = params.n_threads_batch = devices.n_threads_default()
        params.flash_attn_type = flash_attention
        params.n_seq_max, params.kv_unified = (2, True) if n_before else (1, False)
        with listening():
            self.pointer: int | None = llama_cpp.llama_init_from_model(model, params)
            self._pools = pools or ThreadPools()
            if self.pointer is not None:
                self._pools.attach(self.pointer, params.n_threads, params.n_threads_batch)
        vocab = llama_cpp.llama_model_get_vocab(model)
        n_tokens = max(llama_cpp.llama_vocab_n_tokens(vocab), 1)
        self._batch: Any = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        for i in range(params.n_batch):
            self._batch.token[i] = (7 + 101 * i) % n_tokens
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
        self._start = self._n_held = 0

    def seconds(self, n_tokens: int, n_rows: int) -> float | None:
        """Seconds of a pass with logits of its first `n_rows`; None if the model has no passes."""
        if self.pointer is None:
            return None
        memory = llama_cpp.llama_get_memory(self.pointer)
        llama_cpp.llama_memory_seq_rm(memory, 0, self._start, -1)
        return self._decode(self.pointer, n_tokens, n_rows)

    def _decode(self, context: int, n_tokens: int, n_rows: int) -> float | None:
        for i in range(n_tokens):
            self._batch.pos[i], self._batch.logits[i] = self._start + i, i < n_rows
        self._batch.n_tokens = n_tokens
        began = perf_counter()
        if llama_cpp.llama_decode(context, self._batch):
            return None
        llama_cpp.llama_synchronize(context)
        return perf_counter() - began

    def fill(self, n_tokens: int) -> bool:
        """Put `n_tokens` (a multiple of 32) into the cache; False if that fails.

        Decodes the first 32. Further cells are copies of these, at the same positions.
        """
        context = self.pointer
        if context is None:
            return False
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_seq_rm(memory, 0, self._start, -1)
        if not self._start:
            if self._decode(context, _N_COPIED, 1) is None:
                return False
            self._start = self._n_held = _N_COPIED
        if self._n_held >= n_tokens:
            return True
        with listening():
            size = llama_cpp.llama_state_seq_get_size(context, 0)
            state = (ctypes.c_uint8 * size)()
            if not llama_cpp.llama_state_seq_get_data(context, state, size, 0):
                return False
            while self._n_held < n_tokens:
                # The copies get cells of another sequence, which are then added to the first one.
                if not llama_cpp.llama_state_seq_set_data(context, state, size, 1):
                    return False
                llama_cpp.llama_memory_seq_cp(memory, 1, 0, -1, -1)
                self._n_held += _N_COPIED
            llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
        return True

    def close(self) -> None:
        """Free the memory. Twice is fine."""
        if self.pointer is not None:
            with listening():
                llama_cpp.llama_free(self.pointer)
                self._pools.release(self.pointer)
        if self._batch is not None:
            llama_cpp.llama_batch_free(self._batch)
        self.pointer = self._batch = None
