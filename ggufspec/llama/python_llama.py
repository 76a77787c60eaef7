"""A draft model for llama-cpp-python's own loop, and that loop as a baseline."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, finalize

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from ggufspec.common import defaults, validate
from ggufspec.common.failures import closed_on_error
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Session
from ggufspec.errors import DecodeError, NoRoomError, OptionError, OutOfMemoryError
from ggufspec.llama import kernels
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions, default_attention
from ggufspec.llama.mapped_session import MappedSession
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab import Vocab
from ggufspec.llama.vocab_map import map_of
from ggufspec.models.adapters import Adapter
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
        with closed_on_error(self._model.close):
            attention = default_attention(self._model)
            options = ContextOptions(n_ctx, n_threads=n_threads, flash_attention=attention)
            self._context = Context(self._model, options)
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


# llama.cpp rounds the context up to a multiple of this; llama-cpp-python's arrays do not.
_CONTEXT_MULTIPLE = 256


@dataclass(frozen=True)
class BaselineRequest:
    tokens: Sequence[int]
    sampling: Sampling
    n_tokens: int
    seed: int
    ignore_eos: bool
    dry_sequence_breakers: Sequence[str] = ()


@dataclass(frozen=True)
class BaselineText:
    """Statistics of one text of a baseline, defined as in ggufspec's own.

    `n_generated` tokens took `generation_seconds`; they include the accepted ones.
    """

    n_prompt: int
    n_generated: int
    n_drafted: int
    n_accepted: int
    prompt_seconds: float
    first_token_seconds: float
    generation_seconds: float
    tokens: Sequence[int] = ()

    @property
    def n_rounds(self) -> int:
        """Number of rounds: each adds one token of the target to its accepted ones."""
        return self.n_generated - self.n_accepted

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, without the prompt; 0 if no time was measured."""
        return self.n_generated / self.generation_seconds if self.generation_seconds > 0 else 0.0


class PythonLlama:
    """A `llama_cpp.Llama` at its defaults, in this process."""

    sampling_options = (  # those that its loop has
        *("temperature", "top_k", "top_p", "min_p", "typical_p"),
        *("repeat_penalty", "frequency_penalty", "presence_penalty"),
    )

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int,
        n_threads: int,
        n_gpu_layers: int,
        adapter: Adapter | None = None,
    ) -> None:
        """Raises OutOfMemoryError."""
        kernels.leave_out_broken_amx()
        try:
            self._llama: Any = llama_cpp.Llama(
                str(path),
                n_ctx=rounded_context(n_ctx),
                n_threads=n_threads,
                n_threads_batch=n_threads,
                n_gpu_layers=n_gpu_layers,
                lora_path=str(adapter.path) if adapter else None,
                lora_scale=adapter.scale if adapter else 1.0,
                verbose=False,
            )
        except (ValueError, MemoryError) as error:
            raise OutOfMemoryError(
                f"llama-cpp-python cannot load {path} a second time ({error}); leave it out, or "
                "use a smaller context (-c)"
            ) from error
        self._stop_tokens = Vocab(self._llama.model).stop_tokens

    def write(self, request: BaselineRequest) -> BaselineText:
        """Write n_tokens after the first token, whose time counts as prompt processing.

        Only `sampling_options` are used. The loop cannot ban tokens: with `ignore_eos` the end
        token is written, and the text continues after it. Raises DecodeError.
        """
        n_prompt = len(request.tokens)
        n_tokens = min(request.n_tokens, self._llama.n_ctx() - n_prompt)
        stop_tokens = frozenset() if request.ignore_eos else self._stop_tokens
        self._llama.reset()
        self._llama.set_seed(request.seed)
        options = {name: getattr(request.sampling, name) for name in self.sampling_options}
        options["temp"] = options.pop("temperature")
        tokens: list[int] = []
        started = first = perf_counter()
        try:
            for token in self._llama.generate(list(request.tokens), **options):
                if not tokens:
                    first = perf_counter()
                tokens.append(token)
                if len(tokens) > n_tokens or token in stop_tokens:
                    break
        except RuntimeError as error:
            raise DecodeError(
                f"llama-cpp-python failed after {n_prompt:,} tokens of the prompt and "
                f"{len(tokens):,} generated ones: {error}"
            ) from error
        ended = perf_counter()
        return BaselineText(
            n_prompt=n_prompt,
            n_generated=len(tokens) - 1,
            n_drafted=0,
            n_accepted=0,
            prompt_seconds=first - started,
            first_token_seconds=first - started,
            generation_seconds=ended - first,
            tokens=tuple(tokens),
        )

    def close(self) -> None:
        """Free the memory. Closing twice is fine."""
        self._llama.close()


def rounded_context(n_ctx: int) -> int:
    """`n_ctx` rounded to a size that llama.cpp keeps: llama-cpp-python's arrays must match it."""
    return -(-n_ctx // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE
