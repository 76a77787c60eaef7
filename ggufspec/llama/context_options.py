"""The options of a context, and llama.cpp's numbers for their values."""

from __future__ import annotations

from dataclasses import dataclass

import llama_cpp

from ggufspec.common import defaults
from ggufspec.errors import OptionError

_GGML_TYPE_BF16 = 30  # not bound by llama-cpp-python
KV_TYPES: dict[str, int] = {
    name: getattr(llama_cpp, f"GGML_TYPE_{name.upper()}", _GGML_TYPE_BF16)
    for name in defaults.KV_TYPES
}
FLASH_ATTENTION = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

# Attention puts much of its weight on a text's first tokens, and models write nonsense without
# them. Four are enough (StreamingLLM, arxiv.org/abs/2309.17453).
N_FIRST = 4


@dataclass(frozen=True)
class ContextOptions:
    """The options of a context.

    n_ctx: tokens per sequence. n_kept: cells per sequence, which hold the first N_FIRST and the
    newest tokens of a longer text; 0: cells for all tokens. n_rows: maximum rows of logits per
    sequence in one decode. n_rollback: recurrent states kept per sequence, so that as many tokens
    at the end of the last decode can be dropped; each takes as much memory as the state.
    n_leaves: maximum leaves of a tree; see Context.n_leaves for what a model supports. is_exact:
    every pass with logits is padded to n_rows tokens, in a sequence of its own. offloads: a GPU
    computes prompts for the layers of the host, too. n_checkpoints: message ends whose recurrent
    state is kept: see Checkpoints.
    """

    n_ctx: int
    n_rows: int = 1
    n_sequences: int = 1
    n_batch: int = defaults.N_BATCH
    n_threads: int | None = None  # None: one per physical core
    flash_attention: str = defaults.FLASH_ATTENTION
    type_k: str = defaults.KV_TYPE
    type_v: str = defaults.KV_TYPE
    n_rollback: int = 0
    n_leaves: int = 1
    is_exact: bool = False
    offloads: bool = True
    n_kept: int = 0
    n_checkpoints: int = defaults.CTX_CHECKPOINTS

    @property
    def n_cells(self) -> int:
        """Cells of the cache for each sequence, with those of padding."""
        return self.n_kept or self.n_ctx + (self.n_rows if self.is_exact else 0)

    @property
    def description(self) -> str:
        """Length and number of slots, for messages."""
        each = f"context of {self.n_kept or self.n_ctx:,} tokens"
        n = self.n_sequences
        return each if n == 1 else f"{each} for each of {n} slots (n_slots, --slots)"


def choice(choices: dict[str, int], name: str, what: str) -> int:
    if name not in choices:
        raise OptionError(f"{name!r} is no {what}; choose from {', '.join(choices)}")
    return choices[name]
