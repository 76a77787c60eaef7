"""Loads a target, and a draft for it, into an Engine: checks, defaults, and what is remembered.

Knows how they are loaded; nothing of what is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ggufspec.common import defaults, validate
from ggufspec.drafting import profile_store
from ggufspec.drafting.pair_profile import StoredProfile
from ggufspec.engine import fit
from ggufspec.engine.engine import Engine
from ggufspec.engine.fit import Asked, Placement, Placing
from ggufspec.errors import OptionError, OutOfMemoryError
from ggufspec.llama.context import Context, ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.profile_key import pair_key, profile_key
from ggufspec.llama.rpc import RpcConnections
from ggufspec.llama.vocab import check_same
from ggufspec.placement.rpc_address import addresses

LoadProgress = Callable[[str, float], None]  # ("target" or "draft", share of 1)

_MAX_THREADS = 512  # as in llama.cpp
_TINY_BYTES = 32 * 2**20  # waiting for a second thread takes longer than doing its work


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    n_ctx: int | None = None,
    n_batch: int | None = None,
    n_draft_max: int = defaults.N_DRAFT_MAX,
    n_slots: int = 1,
    n_gpu_layers: int | str = defaults.N_GPU_LAYERS,
    n_gpu_layers_draft: int | str = defaults.N_GPU_LAYERS,
    tensor_split: Sequence[float] = (),
    main_gpu: int | None = None,
    rpc: Sequence[str] = (),
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
    n_batch: prompt tokens per batch; None: 512. n_draft_max: the most that a round may draft.
    n_slots: texts that can be written at the same time; each has a context of n_ctx tokens.
    n_gpu_layers, n_gpu_layers_draft: layers on the GPU, the output counting as one; negative: all;
    "auto": as many of each as are predicted to be fastest together, within free memory.
    tensor_split: shares of the target's layers for several GPUs. main_gpu: the one for the draft.
    rpc: llama.cpp's RPC servers ("host:port"), whose devices take layers of the target as GPUs do
    and come before those here; with "auto" they get what GPUs here have no room for, as far as it
    fits. The draft stays here. llama.cpp ends the process where a server goes away.
    n_threads, n_threads_draft: None: one per physical core, and one in all for a tiny draft.
    flash_attention: "auto" (llama.cpp decides), "on", "off".
    type_k, type_v: types of the KV caches ("f16", "q8_0" ...).
    tuned: take what `ggufspec tune` has found for threads, flash attention and batches that are not
    given, and remember what passes of the pair cost.

    Where memory runs out, it is tried once more with less of what was not asked for. What was
    decided is told by the engine's `placement`.

    Raises ModelError, VocabError, OptionError, OutOfMemoryError, RpcError.
    """
    _check_count("n_ctx", n_ctx, 2**31 - 1)
    _check_count("n_batch", n_batch, 2**20)
    _check_count("n_draft_max", validate.whole("n_draft_max", n_draft_max), defaults.N_DRAFT_LIMIT)
    _check_count("n_slots", validate.whole("n_slots", n_slots), defaults.N_SLOTS_LIMIT)
    _check_count("n_threads", n_threads, _MAX_THREADS)
    _check_count("n_threads_draft", n_threads_draft, _MAX_THREADS)
    asked = Asked(
        n_slots=n_slots,
        n_gpu_layers=fit.layers("n_gpu_layers", n_gpu_layers),
        n_gpu_layers_draft=fit.layers("n_gpu_layers_draft", n_gpu_layers_draft),
        n_ctx=n_ctx,
        n_batch=n_batch,
        type_k=type_k,
        type_v=type_v,
        flash_attention=flash_attention,
        tensor_split=validate.shares("tensor_split", tensor_split),
        main_gpu=main_gpu,
    )
    files = _Files(
        validate.path("target", target),
        None if draft is None else validate.path("draft", draft),
        mmap,
        progress,
    )
    settings = _Settings(
        n_batch, n_draft_max, n_slots, n_threads, n_threads_draft, flash_attention, tuned
    )
    places = Placing(files.target, files.draft, asked)
    servers = RpcConnections(addresses("rpc", rpc))
    try:
        places.add(servers.gpus())
        first = places.first()
        try:
            return _load(files, settings, first, servers)
        except OutOfMemoryError:
            smaller = places.smaller(first)
            if smaller is None:
                raise
        return _load(files, settings, smaller, servers)
    except BaseException:
        servers.close()
        raise


@dataclass(frozen=True)
class _Files:
    target: Path
    draft: Path | None
    mmap: bool
    progress: LoadProgress | None

    def opened(self, whose: str, path: Path, **place: Any) -> Model:
        heard = self.progress and partial(self.progress, whose)
        return Model(path, mmap=self.mmap, progress=heard, **place)


@dataclass(frozen=True)
class _Settings:
    n_batch: int | None
    n_draft_max: int
    n_slots: int
    n_threads: int | None
    n_threads_draft: int | None
    flash_attention: str
    tuned: bool


def _load(files: _Files, settings: _Settings, place: Placement, servers: RpcConnections) -> Engine:
    with ExitStack() as stack:
        target_model = files.opened(
            "target",
            files.target,
            n_gpu_layers=place.n_gpu_layers,
            tensor_split=place.tensor_split,
            rpc=servers.devices,
        )
        models = [stack.enter_context(closing(target_model))]
        draft_model = None
        if files.draft is not None:
            draft_model = files.opened(
                "draft", files.draft, n_gpu_layers=place.n_gpu_layers_draft, gpu=place.gpu_draft
            )
            models.append(stack.enter_context(closing(draft_model)))
            check_same(target_model.vocab, draft_model.vocab)
        options = ContextOptions(
            n_ctx=place.n_ctx or _default_n_ctx(models),
            n_sequences=settings.n_slots,
            flash_attention=settings.flash_attention,
            type_k=place.type_k,
            type_v=place.type_v,
        )
        found = profile_store.TunedSettings()
        if settings.tuned:
            found = profile_store.settings(pair_key(target_model, draft_model, options))
        if settings.flash_attention == defaults.FLASH_ATTENTION and found.flash_attention:
            options = replace(options, flash_attention=found.flash_attention)
        of_target = replace(
            options,
            n_rows=settings.n_draft_max + 1,
            n_batch=settings.n_batch or found.n_batch or defaults.N_BATCH,
            n_threads=settings.n_threads or found.n_threads,
        )
        target_context = Context(target_model, of_target)
        stack.callback(target_context.close)
        draft_context = None
        if draft_model is not None:
            usual = 1 if draft_model.n_bytes < _TINY_BYTES else settings.n_threads
            of_draft = replace(
                options,
                n_rows=defaults.N_PROBED,
                n_batch=settings.n_batch or found.n_batch_draft or defaults.N_BATCH,
                n_threads=settings.n_threads_draft or found.n_threads_draft or usual,
            )
            draft_context = Context(draft_model, of_draft)
            stack.callback(draft_context.close)
        resources = ExitStack()
        resources.callback(servers.close)
        resources.push(stack.pop_all())
        return Engine(
            target_context,
            draft_context,
            n_draft_max=settings.n_draft_max,
            stored_profile=StoredProfile(profile_key(target_context, draft_context))
            if settings.tuned
            else None,
            placement=place.why,
            resources=resources,
        )


def _default_n_ctx(models: Sequence[Model]) -> int:
    """The target's own context, as far as that is affordable and every model can go."""
    limits = [model.n_ctx_max for model in models]
    trained = models[0].n_ctx_train or defaults.N_CTX
    return min(defaults.N_CTX, trained, *(limit for limit in limits if limit))


def _check_count(name: str, value: int | None, most: int) -> None:
    if value is not None and not 1 <= validate.whole(name, value) <= most:
        raise OptionError(f"{name} is {value}; it must be from 1 to {most:,}")
