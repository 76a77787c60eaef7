"""Computes the embeddings of texts: hidden states of a model, pooled or of each token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec.common.failures import closed_on_error
from ggufspec.errors import ClosedError, DecodeError, OptionError, OutOfMemoryError
from ggufspec.llama.devices import n_threads_default
from ggufspec.llama.log import listening, log
from ggufspec.llama.model import Model

_POOLINGS = {
    "none": llama_cpp.LLAMA_POOLING_TYPE_NONE,
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}
POOLINGS = tuple(_POOLINGS)
_N_CTX = 2048  # tokens, unless asked: the whole text is in one pass, whose memory grows with it


class Embedder:
    """A model with a context for one text at a time. For one thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int | None = None,
        n_gpu_layers: int = -1,
        n_threads: int | None = None,
        pooling: str | None = None,
    ) -> None:
        """n_ctx: maximum tokens of a text; None or 0: what the model was trained for, None: at
        most 2,048. pooling: one of POOLINGS; None: that of the file, or none.

        Raises ModelError, OptionError, OutOfMemoryError.
        """
        self._pointer: int | None = None
        self.model = Model(path, n_gpu_layers=n_gpu_layers, writes_text=False)
        self.vocab = self.model.vocab
        with closed_on_error(self.close):
            n_trained = self.model.n_ctx_train
            self.n_ctx = n_ctx or (n_trained if n_ctx == 0 else min(n_trained, _N_CTX))
            if self.n_ctx > n_trained:  # llama.cpp ends the process where positions are learned
                raise OptionError(
                    f"{path} was trained for {n_trained:,} tokens; choose at most that (-c)"
                )
            self._pointer = self._made(n_threads or n_threads_default(), pooling)
            self.pooling = self._pooling(self._pointer)

    def _made(self, n_threads: int, pooling: str | None) -> int:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.n_ctx
        params.n_threads = params.n_threads_batch = n_threads
        params.embeddings = True
        if pooling is not None:
            params.pooling_type = _POOLINGS[pooling]
        with listening():
            pointer: int | None = llama_cpp.llama_init_from_model(self.model.pointer, params)
            if not pointer:
                raise OutOfMemoryError(
                    f"no context of {self.n_ctx:,} tokens could be made for {self.model.path}: use "
                    f"a smaller one (-c), or fewer GPU layers (-ngl).\n{log.complaints()}"
                )
        return pointer

    def _pooling(self, pointer: int) -> str:
        found = llama_cpp.llama_pooling_type(pointer)
        for name, number in _POOLINGS.items():
            if number == found:
                return name
        raise OptionError(
            f"{self.model.path} ranks texts: use an embedding model, or choose a pooling "
            f"({', '.join(POOLINGS)}; --pooling)"
        )

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The embeddings (n, n_embd) of a text: one, or of each token without pooling.

        `tokens`: 1 to n_ctx. Raises DecodeError, ClosedError.
        """
        if self._pointer is None:
            raise ClosedError("this model is closed; load it again")
        n, width = len(tokens), self.model.n_embd_out
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            if memory := llama_cpp.llama_get_memory(self._pointer):
                llama_cpp.llama_memory_clear(memory, True)
            if code := log.during(llama_cpp.llama_decode, self._pointer, batch):
                raise DecodeError(
                    f"llama.cpp could not compute embeddings (code {code}).\n{log.complaints()}"
                )
            if self.pooling == "none":
                found = [llama_cpp.llama_get_embeddings_ith(self._pointer, i) for i in range(n)]
            else:
                found = [llama_cpp.llama_get_embeddings_seq(self._pointer, 0)]
            if not all(found):
                raise DecodeError("llama.cpp kept no embeddings of the text")
            return np.array([np.ctypeslib.as_array(each, (width,)) for each in found])
        finally:
            llama_cpp.llama_batch_free(batch)

    def close(self) -> None:
        """Free the memory. Closing twice is fine."""
        if self._pointer is not None:
            with listening():
                llama_cpp.llama_free(self._pointer)
            self._pointer = None
        self.model.close()
