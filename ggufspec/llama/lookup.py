"""llama-cpp-python's own loop, with its prompt lookup or without, as others would call it.

Knows `llama_cpp.Llama` and a clock; nothing of our engine, which it is compared with.

The first token comes with the prompt; the seconds of generation are those of the ones behind it.
Its loop has no ban of tokens: where the end of a text is to be ignored, the end is written, and
the text goes on behind it.
"""

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
from ggufspec.llama import amx
from ggufspec.llama.vocab import Vocab

TAKEN = (  # options of sampling that its loop has
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty"),
)
_CELLS = 256  # llama.cpp makes a context of a multiple of these, llama-cpp-python's arrays do not


@dataclass(frozen=True)
class Written:
    """One text: `tokens` has the first one too, `n_generated` and the seconds have not."""

    n_generated: int
    n_drafted: int
    n_accepted: int
    prompt_seconds: float  # to the first token
    generation_seconds: float
    tokens: tuple[int, ...]


class PythonLlama:
    """A `llama_cpp.Llama` at its defaults, in this process."""

    def __init__(
        self, path: Path, *, n_ctx: int, n_threads: int, n_gpu_layers: int, n_drafted: int
    ) -> None:
        """`n_drafted`: what its lookup drafts at most; 0: it has none.

        Raises OutOfMemoryError where it does not load.
        """
        self._draft = _Counted(n_drafted) if n_drafted else None
        amx.leave_out_if_broken()
        try:
            self._llama: Any = llama_cpp.Llama(
                str(path),
                n_ctx=whole_cells(n_ctx),
                n_threads=n_threads,
                n_threads_batch=n_threads,
                n_gpu_layers=n_gpu_layers,
                draft_model=self._draft,
                logits_all=self._draft is not None,  # else it breaks behind the first batch
                verbose=False,
            )
        except (ValueError, MemoryError) as error:
            raise OutOfMemoryError(
                f"llama-cpp-python cannot load {path} once more ({error}); leave it out, or take a "
                "smaller context (-c)"
            ) from error
        self._stop_tokens = Vocab(self._llama.model).stop_tokens

    def write(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        n_tokens: int,
        seed: int,
        ignore_eos: bool,
    ) -> Written:
        """A text of n_tokens behind the first. Of `sampling`, TAKEN counts. Raises DecodeError."""
        n_tokens = min(n_tokens, self._llama.n_ctx() - len(prompt))
        stop_tokens = frozenset() if ignore_eos else self._stop_tokens
        draft = self._draft or _Counted(0)
        draft.begin()
        self._llama.reset()
        self._llama.set_seed(seed)
        asked = {name: getattr(sampling, name) for name in TAKEN}
        asked["temp"] = asked.pop("temperature")
        written: list[int] = []
        started = read = perf_counter()
        try:
            for token in self._llama.generate(list(prompt), **asked):
                if not written:
                    read = perf_counter()
                written.append(token)
                draft.hear(token)
                if len(written) > n_tokens or token in stop_tokens:
                    break
        except RuntimeError as error:
            raise DecodeError(
                f"llama-cpp-python failed behind {len(prompt):,} tokens and {len(written):,} more: "
                f"{error}"
            ) from error
        ended = perf_counter()
        return Written(
            n_generated=len(written) - 1,
            n_drafted=draft.n_drafted,
            n_accepted=draft.n_accepted,
            prompt_seconds=read - started,
            generation_seconds=ended - read,
            tokens=tuple(written),
        )

    def close(self) -> None:
        """Give the memory back. Closing twice is fine."""
        self._llama.close()


class _Counted(LlamaDraftModel):  # type: ignore[misc]  # llama_cpp has no types
    """Its prompt lookup, with a count of what became of the drafts."""

    def __init__(self, n_drafted: int) -> None:
        self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=n_drafted)
        self.begin()

    def begin(self) -> None:
        self.n_drafted = self.n_accepted = 0
        self._ahead: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        draft: NDArray[np.intc] = self._lookup(input_ids, **kwargs)
        self.n_drafted += len(draft)
        self._ahead = draft.tolist()
        return draft

    def hear(self, token: int) -> None:
        """The next token of the text: a drafted one, or the target's own, which ends a round."""
        self.n_accepted += bool(self._ahead) and self._ahead.pop(0) == token


def whole_cells(n_ctx: int) -> int:
    """A context that llama.cpp does not make larger: drafts would outgrow the arrays beside it."""
    return -(-n_ctx // _CELLS) * _CELLS


def n_logits_bytes(n_ctx: int, n_vocab: int) -> int:
    """Bytes of the logits that a `Llama` with a draft keeps: a row for each cell of its context."""
    return whole_cells(n_ctx) * n_vocab * np.dtype(np.single).itemsize
