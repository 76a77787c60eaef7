"""llama-cpp-python's own generation loop as a baseline, and the types that all baselines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from numpy.typing import NDArray

from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import DecodeError, OutOfMemoryError
from ggufspec.llama import kernels
from ggufspec.llama.vocab import Vocab
from ggufspec.models.adapters import Adapter

SAMPLING_OPTIONS = (  # those that llama-cpp-python's loop has
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty"),
)
# llama.cpp rounds the context up to a multiple of this; llama-cpp-python's arrays do not.
_CONTEXT_MULTIPLE = 256


@dataclass(frozen=True)
class BaselineRequest:
    """A request for one text of a baseline."""

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

    sampling_options = SAMPLING_OPTIONS

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int,
        n_threads: int,
        n_gpu_layers: int,
        n_drafted: int,
        adapter: Adapter | None = None,
    ) -> None:
        """n_drafted: the most tokens of its prompt lookup; 0: none. Raises OutOfMemoryError."""
        self._draft = _CountingLookup(n_drafted)
        kernels.leave_out_broken_amx()
        try:
            self._llama: Any = llama_cpp.Llama(
                str(path),
                n_ctx=rounded_context(n_ctx),
                n_threads=n_threads,
                n_threads_batch=n_threads,
                n_gpu_layers=n_gpu_layers,
                draft_model=self._draft if n_drafted else None,
                logits_all=bool(n_drafted),  # without it, drafting fails after the first batch
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

        Only SAMPLING_OPTIONS are used. The loop cannot ban tokens: with `ignore_eos` the end token
        is written, and the text continues after it. Raises DecodeError.
        """
        n_prompt = len(request.tokens)
        n_tokens = min(request.n_tokens, self._llama.n_ctx() - n_prompt)
        stop_tokens = frozenset() if request.ignore_eos else self._stop_tokens
        self._draft.reset()
        self._llama.reset()
        self._llama.set_seed(request.seed)
        options = {name: getattr(request.sampling, name) for name in SAMPLING_OPTIONS}
        options["temp"] = options.pop("temperature")
        tokens: list[int] = []
        started = first = perf_counter()
        try:
            for token in self._llama.generate(list(request.tokens), **options):
                if not tokens:
                    first = perf_counter()
                tokens.append(token)
                self._draft.count(token)
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
            n_drafted=self._draft.n_drafted,
            n_accepted=self._draft.n_accepted,
            prompt_seconds=first - started,
            first_token_seconds=first - started,
            generation_seconds=ended - first,
            tokens=tuple(tokens),
        )

    def close(self) -> None:
        """Free the memory. Closing twice is fine."""
        self._llama.close()


class _CountingLookup(LlamaDraftModel):  # type: ignore[misc]  # llama_cpp has no types
    """llama-cpp-python's prompt lookup, with counts of drafted and accepted tokens."""

    def __init__(self, n_drafted: int) -> None:
        self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=n_drafted)
        self.reset()

    def reset(self) -> None:
        self.n_drafted = self.n_accepted = 0
        self._pending: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        draft: NDArray[np.intc] = self._lookup(input_ids, **kwargs)
        self.n_drafted += len(draft)
        self._pending = draft.tolist()
        return draft

    def count(self, token: int) -> None:
        """Count the next token: accepted if drafted; else it is the target's and ends a round."""
        self.n_accepted += bool(self._pending) and self._pending.pop(0) == token


def rounded_context(n_ctx: int) -> int:
    """`n_ctx` rounded to a size that llama.cpp keeps: llama-cpp-python's arrays must match it."""
    return -(-n_ctx // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE


def n_logits_bytes(n_ctx: int, n_vocab: int) -> int:
    """Bytes of the logits that a `Llama` with a draft keeps: one row for each context position."""
    return rounded_context(n_ctx) * n_vocab * np.dtype(np.single).itemsize
