"""A draft model for llama-cpp-python's own speculation: `llama_cpp.Llama(draft_model=...)`."""

from __future__ import annotations

import os
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, finalize

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from ggufspec.common import defaults, validate
from ggufspec.decoding.types import Session
from ggufspec.errors import NoRoomError, OptionError
from ggufspec.llama.attention import known_attention
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab import Vocab
from ggufspec.llama.vocab_map import MappedSession, map_of
from ggufspec.models.header import read_header
from ggufspec.models.heads import check_model
from ggufspec.models.shape import shape_of


class DraftModel(LlamaDraftModel):  # type: ignore[misc]  # llama_cpp has no types
    """Drafts the most likely tokens of a small GGUF model.

        llama_cpp.Llama("large.gguf", draft_model=ggufspec.DraftModel("small.gguf"))

    A draft of another vocabulary drafts the tokens that both have. llama-cpp-python accepts a
    drafted token if it equals the sampled one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_draft: int = defaults.N_DRAFT_FIXED,
        n_ctx: int = defaults.N_CTX,
        n_gpu_layers: int = defaults.ALL_LAYERS,
        n_threads: int | None = None,
    ) -> None:
        """`n_ctx`: that of the target. Raises ModelError, OptionError, OutOfMemoryError."""
        for name, value in (("n_draft", n_draft), ("n_ctx", n_ctx), ("n_threads", n_threads)):
            if value is not None and validate.whole(name, value) < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")
        self.n_draft = n_draft
        path = validate.path("path", path)
        n_gpu_layers = validate.whole("n_gpu_layers", n_gpu_layers)
        header = read_header(path)
        check_model(header)
        shape_of(header)  # raises where llama.cpp would end the process
        self._model = Model(path, n_gpu_layers=n_gpu_layers)
        try:
            options = ContextOptions(n_ctx=n_ctx, n_threads=n_threads)
            attention = known_attention(self._model, None, options)
            options = replace(options, flash_attention=attention.setting)
            self._context = Context(self._model, options)
        except BaseException:
            self._model.close()
            raise
        self._free = finalize(self, _free, self._context, self._model, os.getpid())
        self._free.atexit = False
        self._session = LlamaSession(self._context, drafts=True)
        self._targets: WeakKeyDictionary[Any, tuple[Session, frozenset[int]]] = WeakKeyDictionary()

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """At most n_draft tokens that follow `input_ids` (n); none at the end of the context.

        Raises DecodeError, ClosedError, VocabError if the Llama has no token of this vocabulary.
        """
        # llama-cpp-python passes token ids only: the target is the caller's `self`.
        caller = sys._getframe(1).f_locals.get("self")
        session, stop_tokens = self._target(caller)
        tokens = array("i", input_ids.tolist())
        n_known = len(tokens)
        n_max = min(self.n_draft, self._context.n_ctx - n_known) if n_known else 0
        for _ in range(n_max):
            try:
                logits = session.score(tokens)
            except NoRoomError:
                break
            tokens.append(int(logits[0].argmax()))
            if tokens[-1] in stop_tokens:
                break
        return np.array(tokens[n_known:], dtype=np.intc)

    def _target(self, caller: object) -> tuple[Session, frozenset[int]]:
        """The session for the calling Llama, and the tokens that end its texts."""
        if not isinstance(caller, llama_cpp.Llama):
            return self._session, self._model.vocab.stop_tokens
        known = self._targets.get(caller)
        if known is None:
            vocab = Vocab(caller.model)
            vocab_map = map_of(vocab, self._model.vocab)
            session = MappedSession(self._session, vocab_map) if vocab_map else self._session
            known = self._targets[caller] = session, vocab.stop_tokens
        return known

    def close(self) -> None:
        """Free the memory, as happens once nothing refers to it. Closing twice is fine."""
        self._free()


def _free(context: Context, model: Model, pid: int) -> None:
    if pid == os.getpid():  # in a forked process it is not ours
        context.close()
        model.close()
