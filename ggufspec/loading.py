"""Loads a target, and a draft for it, into an Engine: checks, defaults, and what is remembered.

Knows how they are loaded; nothing of what is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ggufspec import checks, defaults, remembered
from ggufspec.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.knowledge import Memory
from ggufspec.llama.context import Context, ContextOptions
from ggufspec.llama.facts import facts, pair_facts
from ggufspec.llama.model import Model
from ggufspec.llama.vocab import check_same

LoadProgress = Callable[[str, float], None]  # ("target" or "draft", share of 1)

_MAX_THREADS = 512  # as in llama.cpp
_TINY_BYTES = 32 * 2**20  # waiting for a second thread takes longer than doing its work


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    n_ctx: int | None = None,
    n_batch: int = defaults.N_BATCH,
    n_draft_max: int = defaults.N_DRAFT_MAX,
    n_gpu_layers: int = defaults.ALL_LAYERS,
    n_gpu_layers_draft: int = defaults.ALL_LAYERS,
    n_threads: int | None = None,
    n_threads_draft: int | None = None,
    flash_attention: str = defaults.FLASH_ATTENTION,
    type_k: str = defaults.KV_TYPE,
    type_v: str = defaults.KV_TYPE,
    mmap: bool = True,
    tuned: bool = True,
    progress: LoadProgress | None = None,
) -> Engine:
    """Load a target GGUF model and, if given, the draft that writes ahead for it.

    target, draft: paths of files; `ggufspec.models.resolve` makes them of names.
    n_ctx: tokens that prompt and text may have together; None: the target's own, at most 4096.
    n_batch: prompt tokens per batch. n_draft_max: the most that a round may draft.
    n_gpu_layers, n_gpu_layers_draft: layers on the GPU; negative: all.
    n_threads, n_threads_draft: None: one per physical core, and one in all for a tiny draft.
    flash_attention: "auto" (llama.cpp decides), "on", "off".
    type_k, type_v: types of the KV caches ("f16", "q8_0" ...).
    tuned: take what `ggufspec tune` has found for threads and flash attention that are not given,
    and remember what passes of the pair cost.

    Raises ModelError, VocabError, OptionError, OutOfMemoryError.
    """
    _check_count("n_ctx", n_ctx, 2**31 - 1)
    _check_count("n_batch", checks.whole("n_batch", n_batch), 2**20)
    _check_count("n_draft_max", checks.whole("n_draft_max", n_draft_max), defaults.N_DRAFT_LIMIT)
    for name, n_layers in (
        ("n_gpu_layers", n_gpu_layers),
        ("n_gpu_layers_draft", n_gpu_layers_draft),
    ):
        if abs(checks.whole(name, n_layers)) >= 2**31:
            raise OptionError(f"{name} is {n_layers}; no model has so many layers (-1: all)")
    _check_count("n_threads", n_threads, _MAX_THREADS)
    _check_count("n_threads_draft", n_threads_draft, _MAX_THREADS)
    with ExitStack() as stack:

        def opened(whose: str, path: str | Path, n_layers: int) -> Model:
            heard = progress and partial(progress, whose)
            file = checks.path(whose, path)
            return stack.enter_context(
                closing(Model(file, n_gpu_layers=n_layers, mmap=mmap, progress=heard))
            )

        target_model = opened("target", target, n_gpu_layers)
        models = [target_model]
        draft_model = None
        if draft is not None:
            draft_model = opened("draft", draft, n_gpu_layers_draft)
            check_same(target_model.vocab, draft_model.vocab)
            models.append(draft_model)
        options = ContextOptions(
            n_ctx=n_ctx or _default_n_ctx(models),
            n_batch=n_batch,
            n_threads=n_threads,
            flash_attention=flash_attention,
            type_k=type_k,
            type_v=type_v,
        )
        if tuned:
            found = remembered.settings(pair_facts(target_model, draft_model, options))
            n_threads_draft = n_threads_draft or found.n_threads_draft
            options = replace(options, n_threads=n_threads or found.n_threads)
            if flash_attention == defaults.FLASH_ATTENTION and found.flash_attention:
                options = replace(options, flash_attention=found.flash_attention)
        target_context = Context(target_model, replace(options, n_rows=n_draft_max + 1))
        stack.callback(target_context.close)
        draft_context = None
        if draft_model is not None:
            n_own = n_threads_draft or (1 if draft_model.n_bytes < _TINY_BYTES else n_threads)
            draft_context = Context(
                draft_model, replace(options, n_threads=n_own, n_rows=defaults.N_PROBED)
            )
            stack.callback(draft_context.close)
        return Engine(
            target_context,
            draft_context,
            n_draft_max=n_draft_max,
            memory=Memory(facts(target_context, draft_context)) if tuned else None,
            resources=stack.pop_all(),
        )


def _default_n_ctx(models: Sequence[Model]) -> int:
    """The target's own context, as far as that is affordable and every model can go."""
    limits = [model.n_ctx_max for model in models]
    trained = models[0].n_ctx_train or defaults.N_CTX
    return min(defaults.N_CTX, trained, *(limit for limit in limits if limit))


def _check_count(name: str, value: int | None, most: int) -> None:
    if value is not None and not 1 <= checks.whole(name, value) <= most:
        raise OptionError(f"{name} is {value}; it must be from 1 to {most:,}")
