"""The options of a context, and the caches that are refused: too small, or too large."""

from __future__ import annotations

from dataclasses import dataclass

import llama_cpp

from ggufspec.common import defaults
from ggufspec.errors import OptionError, OutOfMemoryError
from ggufspec.llama import kernels
from ggufspec.llama.devices import offload_devices, physical_memory, takes_tensor
from ggufspec.llama.model import AttentionHeads, Model
from ggufspec.models.header import read_header
from ggufspec.models.shape import shape_of
from ggufspec.placement.memory import VALUE_BYTES, CacheParams, cache_bytes

_GGML_TYPE_BF16 = 30  # not bound by llama-cpp-python
KV_TYPES: dict[str, int] = {
    name: getattr(llama_cpp, f"GGML_TYPE_{name.upper()}", _GGML_TYPE_BF16)
    for name in defaults.KV_TYPES
}
OWN = "own"  # flash attention that ggufspec's kernels compute, as far as they can
FLASH_ATTENTION = {
    OWN: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
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
    n_leaves: maximum leaves of a tree; see Context.n_leaves for what a model supports. offloads:
    a GPU computes prompts for the layers of the host, too. n_checkpoints: message ends whose
    recurrent state is kept: see Checkpoints. varies_threads: use fewer where that is faster.
    is_unified: one cache for all sequences, also where they cannot share passes.
    """

    n_ctx: int
    n_rows: int = 1
    n_sequences: int = 1
    n_batch: int = defaults.N_BATCH
    n_threads: int | None = None  # None: one per physical core
    varies_threads: bool = False
    flash_attention: str = defaults.FLASH_ATTENTION
    type_k: str = defaults.KV_TYPE
    type_v: str = defaults.KV_TYPE
    n_rollback: int = 0
    n_leaves: int = 1
    offloads: bool = True
    n_kept: int = 0
    n_checkpoints: int = defaults.CTX_CHECKPOINTS
    is_unified: bool = False

    @property
    def n_cells(self) -> int:
        """Cells of the cache for each sequence."""
        return self.n_kept or self.n_ctx

    @property
    def description(self) -> str:
        """Length and number of slots, for messages."""
        each = f"context of {self.n_kept or self.n_ctx:,} tokens"
        n = self.n_sequences
        return each if n == 1 else f"{each} for each of {n} slots (n_slots, --slots)"


def default_attention(*models: Model | None) -> str:
    """Ours, where all layers of these models are on the CPU and it works; else llama.cpp's."""
    is_placed = any(model.n_gpu_layers for model in models if model is not None)
    return defaults.FLASH_ATTENTION if is_placed or kernels.attention_refusal() else OWN


def choice(choices: dict[str, int], name: str, what: str) -> int:
    if name not in choices:
        raise OptionError(f"{name!r} is no {what}; choose from {', '.join(choices)}")
    return choices[name]


def check_cache(model: Model, options: ContextOptions) -> None:
    """Raise OutOfMemoryError: the operating system, or ggml, would end the process."""
    if not model.n_gpu_layers:
        _check_memory(model, options)
    elif model.attention_heads is not None:
        _check_tensors(model, options, model.attention_heads)


def check_kept(model: Model, options: ContextOptions, *, is_head: bool) -> None:
    """Raise OptionError where a cache cannot leave out tokens, or has no room for drafts."""
    if not options.n_kept:
        return
    why = None
    if is_head:
        why = "a draft head, which reads each token of the target"
    elif not model.can_drop_tail:
        why = "a model with recurrent layers, whose state has no tokens to leave out"
    if why is not None:
        raise OptionError(
            f"{model.path} is {why}: leave out the size of its context (n_ctx_draft, -cd)"
        )
    # So that some of the newest tokens stay where a whole draft is rejected.
    least = 2 * (options.n_rows + N_FIRST)
    if options.n_kept < least:
        raise OptionError(
            f"a draft context of {options.n_kept:,} tokens is too small for drafts of "
            f"{options.n_rows:,}: use at least {least:,} (n_ctx_draft, -cd), or shorter drafts "
            "(n_draft_max, --draft-n)"
        )


def _check_memory(model: Model, options: ContextOptions) -> None:
    if (memory := physical_memory()) is None:
        return
    if model.can_drop_tail:
        n_bytes = (VALUE_BYTES[options.type_k] + VALUE_BYTES[options.type_v]) / 2
        needed = options.n_cells * options.n_sequences * model.n_kv_values * n_bytes
    else:  # llama.cpp does not report which layers have a state
        caches = CacheParams(
            *(options.n_ctx, options.n_batch, options.type_k, options.type_v),
            n_slots=options.n_sequences,
            n_draft_max=options.n_rollback,
        )
        needed = sum(cache_bytes(shape_of(read_header(model.path)), caches))
    if needed > memory:
        raise OutOfMemoryError(
            f"a {options.description} needs {needed / 1e9:,.0f} GB for {model.path}, this machine "
            f"has {memory / 1e9:,.0f} GB: use a smaller one (n_ctx, -c)"
        )


def _check_tensors(model: Model, options: ContextOptions, heads: AttentionHeads) -> None:
    """No K or V cache of a layer may exceed a device's largest tensor, a limit of drivers."""
    n_cells = options.n_cells * options.n_sequences * heads.n_kv
    tensors = ((options.type_k, heads.n_keys), (options.type_v, heads.n_values))
    for device in offload_devices():
        if device.name in model.devices and not all(
            takes_tensor(device, KV_TYPES[name], n_cells * n) for name, n in tensors
        ):
            raise OutOfMemoryError(
                f"the cache of a {options.description} has larger tensors than {device.name} "
                f"({device.description}) computes with, for {model.path}: use a smaller one "
                "(n_ctx, -c), caches of another type (-ctk q8_0 -ctv q8_0), or no GPU "
                "layers (-ngl 0; of a draft, -ngld 0)"
            )
