"""A context without slots or checks, to time passes of a model before its own contexts are made."""

from __future__ import annotations

import ctypes
from time import perf_counter

import llama_cpp

from ggufspec import _native
from ggufspec.llama import devices
from ggufspec.llama.hidden_states import addresses
from ggufspec.llama.log import listening, log
from ggufspec.llama.threadpool import ThreadPools

_N_COPIED = 32  # tokens that are decoded; further cells are copies of theirs
_N_PADDING = 64


class BareContext:
    """A context of the model with this pointer. Close it before the model."""

    def __init__(
        self,
        model: int,
        n_most: int,
        n_before: int = 0,
        pools: ThreadPools | None = None,
        flash_attention: int = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
        uses_own: bool = False,
    ) -> None:
        """`n_most`: maximum tokens of a pass; `n_before`: maximum tokens before it, see `fill`.

        `pools`: shared with contexts that never compute at the same time; None: its own.
        `uses_own`: our kernels compute flash attention.
        """
        params = llama_cpp.llama_context_default_params()
        params.n_batch = params.n_ubatch = max(n_most, _N_COPIED if n_before else 1)
        params.n_ctx = n_before + params.n_batch + _N_PADDING
        params.n_threads = params.n_threads_batch = devices.n_threads_default()
        params.flash_attn_type = flash_attention
        params.n_seq_max, params.kv_unified = (2, True) if n_before else (1, False)
        self._native: _native.Context | None = None
        with listening():
            self.pointer: int | None = llama_cpp.llama_init_from_model(model, params)
            self._pools = pools or ThreadPools()
            if self.pointer is not None and (memory := llama_cpp.llama_get_memory(self.pointer)):
                self._pools.attach(self.pointer, params.n_threads, params.n_threads_batch)
                at = devices.address_of(self.pointer), devices.address_of(memory)
                self._native = _native.Context(
                    *at, params.n_batch, hidden_is_alone=False, shares_cells=False, **addresses()
                )
                self._native.uses_attention = uses_own
        vocab = llama_cpp.llama_model_get_vocab(model)
        n_tokens = max(llama_cpp.llama_vocab_n_tokens(vocab), 1)
        self._tokens = [(7 + 101 * i) % n_tokens for i in range(params.n_batch)]
        self._start = self._n_held = 0

    def seconds(self, n_tokens: int, n_rows: int) -> float | None:
        """Seconds of a pass with logits of its last `n_rows`; None if the model has no passes.

        Raises KeyboardInterrupt within the pass.
        """
        if self._native is None:
            return None
        self._native.truncate(self._start)
        part = 0, self._tokens[:n_tokens], min(n_rows, n_tokens), ()
        began = perf_counter()
        if log.during(self._native.decode, [part]):
            return None
        return perf_counter() - began

    def fill(self, n_tokens: int) -> bool:
        """Put `n_tokens` (a multiple of 32) into the cache: copies of 32. False if that fails."""
        context, native = self.pointer, self._native
        if context is None or native is None:
            return False
        if not n_tokens and not self._start:
            return True
        if not self._start:
            if self.seconds(_N_COPIED, 1) is None:
                return False
            self._start = self._n_held = _N_COPIED
        native.truncate(self._start)
        if self._n_held >= n_tokens:
            return True
        with listening():
            memory = llama_cpp.llama_get_memory(context)
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
        self.pointer = self._native = None
