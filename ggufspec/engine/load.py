"""Loads a target, a draft for it, and one for the draft, into an Engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ggufspec.common import defaults, validate
from ggufspec.common.progress import LoadProgress, Share
from ggufspec.common.reading import read_text
from ggufspec.drafting import profile_store
from ggufspec.drafting.pair_profile import StoredProfile
from ggufspec.drafting.strategies.ngram import TextStore
from ggufspec.engine.chat_template import check_template
from ggufspec.engine.engine import Engine
from ggufspec.engine.fit import Fit
from ggufspec.engine.load_options import LoadOptions
from ggufspec.engine.pair import Pair, add_texts
from ggufspec.engine.prompt_cache import n_cache_bytes
from ggufspec.errors import ModelError, OutOfMemoryError
from ggufspec.llama import kernels
from ggufspec.llama.context import Context, HeadLink
from ggufspec.llama.context_checks import check_exact, check_room
from ggufspec.llama.context_options import ContextOptions, default_attention
from ggufspec.llama.head import Head
from ggufspec.llama.kernel_offer import Placed
from ggufspec.llama.model import Model, usable_devices
from ggufspec.llama.projector import Projector
from ggufspec.llama.rpc import RemoteDevice, RpcConnections
from ggufspec.llama.threadpool import end_threads
from ggufspec.llama.vocab_map import VocabMap, map_of
from ggufspec.measure import kernels as kernel_choice
from ggufspec.measure.attention import Attention, UsualText, measure_attention
from ggufspec.measure.pairs import first_costs, pair_key, profile_key
from ggufspec.models.head_facts import MTP, HeadFacts
from ggufspec.placement.memory import n_leaves
from ggufspec.placement.speeds import Shares

# A draft model this small is faster with one thread than with two; a head, which also reads what
# the target has accepted, is not (EAGLE-3 of 10 MB for SmolLM2 135M: 70 against 77 tokens/s).
_TINY_BYTES = 32 * 2**20


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    n_ctx: int | str | None = None,
    n_slots: int = 1,
    n_gpu_layers: int | str = defaults.N_GPU_LAYERS,
    n_gpu_layers_draft: int | str = defaults.N_GPU_LAYERS,
    n_threads: int | None = None,
    flash_attention: str = defaults.FLASH_ATTENTION,
    exact: bool = False,
    lora: Sequence[str | Path | tuple[str | Path, float]] = (),
    chat_template: str | None = None,
    draft_texts: Sequence[str | Path] = (),
    progress: LoadProgress | None = None,
    **more: Any,
) -> Engine:
    """Load a target GGUF model and, if given, a draft for it.

    target, draft: paths of files; `ggufspec.models.resolve` returns them for names. A draft is a
    small model, or a head that reads the target's hidden states: the file of a DFlash, EAGLE-3 or
    MTP head (often mtp-*.gguf), or "mtp" for the MTP head in the target's own file.
    n_ctx: tokens of prompt and text together; 0: what the target was trained for; None: that, at
    most 4096; "fit": that, or less where it would not fit into free memory.
    n_slots: texts that can be written at the same time; each has a context of n_ctx tokens.
    n_gpu_layers, n_gpu_layers_draft: layers on the GPU; -1: all; "auto": the fastest that fit.
    progress: called at the start and the end of each step, and within most: see LoadProgress.
    more: all other options, by the names in LoadOptions; the guide has a table of them.

    If memory runs out, loading is tried again with smaller values of what was not given. The
    engine's `placement` says what was chosen. A draft of another vocabulary drafts the tokens that
    both have: the engine's `notes` say how many these are.

    Raises ModelError, VocabError, OptionError, PromptError, OutOfMemoryError, RpcError; TypeError
    for an unknown option.
    """
    validate.function("progress", progress)
    named = {
        "n_ctx": n_ctx,
        "n_slots": n_slots,
        "n_gpu_layers": n_gpu_layers,
        "n_gpu_layers_draft": n_gpu_layers_draft,
        "n_threads": n_threads,
        "flash_attention": flash_attention,
        "exact": exact,
        "lora": lora,
        "chat_template": chat_template,
        "draft_texts": draft_texts,
    }
    options = LoadOptions.of(target, draft, {**named, **more})
    texts = [read_text(file, "the draft text") for file in options.draft_texts]
    if options.chat_template is not None:
        check_template(options.chat_template)
    places = Fit(options)
    servers = RpcConnections(options.rpc)
    with ExitStack() as undone:
        undone.callback(servers.close)
        places.add(servers.gpus())
        tell = progress or (lambda what, share: None)
        tell("kernels", 0.0)
        kernels.prepare(repack=options.repack)
        tell("kernels", 1.0)
        placed = places.first()
        while True:
            try:
                engine = _load(placed, servers, places, TextStore(options.n_remembered), tell)
                break
            except OutOfMemoryError:
                smaller = places.smaller(placed)
                if smaller is None:
                    raise
            placed = smaller
        undone.callback(engine.close)
        end_threads()  # texts may be written in another thread
        add_texts(engine.pair, texts, progress)
        undone.pop_all()
    return engine


def _load(
    options: LoadOptions,
    servers: RpcConnections,
    places: Fit,
    texts: TextStore,
    tell: LoadProgress,
) -> Engine:
    """Load what was placed. The engine closes `servers`; if this raises, they stay open."""
    head = places.head
    models: list[Model] = []  # of the target and the draft
    reasons: list[str] = []  # of their kernels
    contexts: list[Context] = []
    vocab_map: VocabMap | None = None
    with ExitStack() as stack:
        for model, reason in _models(options, head, servers.devices, tell):
            models.append(stack.enter_context(closing(model)))
            reasons += [f"{model.path.name}: {reason}"] if reason else []
            if model is not models[0] and head is None:
                vocab_map = map_of(models[0].vocab, model.vocab)
        if options.draft == MTP:
            models *= 2
        tell("contexts", 0.0)
        settings, attention = _settings(models, options, places)
        link = None
        for model, its_settings in zip(models, settings, strict=False):
            link = HeadLink(contexts[0], head) if contexts and head else None
            # Not of contexts on other devices, which may compute at the same time.
            pools = (made.pools for made in contexts if made.model.places & model.places)
            context = Context(model, its_settings, link=link, pools=next(pools, None))
            contexts.append(stack.enter_context(closing(context)))
            check_room(context)
        draft = contexts[1] if contexts[1:] else None
        for projector, about in _projectors(options, contexts[0], draft, vocab_map):
            if projector is not None:
                stack.enter_context(closing(projector))
            reasons.append(about)
        if options.exact:
            check_exact(contexts[0])
        of_draft = _profile(contexts[1:], 1, options, places)[0] if draft and not head else None
        stored_profile, assumed = _profile(contexts, options.n_slots, options, places)
        resources = ExitStack()
        pair = Pair(
            contexts[0],
            Head(link, draft) if link and draft else draft,
            n_draft_max=options.n_draft_max,
            vocab_map=vocab_map,
            stored_profile=stored_profile,
            stored_profile_of_draft=of_draft,
            assumed=assumed,
            texts=texts,
            n_cache_bytes=n_cache_bytes(options.cache_ram),
            is_exact=options.exact,
            resources=resources,
        )
        engine = Engine(
            pair,
            placement=options.placement,
            kernels=reasons,
            attention=attention.reason,
            file_sampling=places.file_sampling,
            chat_template=options.chat_template,
            template_variables=options.template_variables,
        )
        tell("contexts", 1.0)
        resources.callback(servers.close)
        resources.push(stack.pop_all())  # last: until here, the stack closes them if this raises
        return engine


def _models(
    options: LoadOptions, head: HeadFacts | None, rpc: Sequence[RemoteDevice], tell: LoadProgress
) -> Iterator[tuple[Model, str | None]]:
    """Load target and draft where the options place them, with why their kernels are used.

    The caller closes each model. Raises ModelError, OptionError, OutOfMemoryError.
    """
    chosen = options.n_gpu_layers, options.n_gpu_layers_draft  # None: there is no GPU
    n_target, n_draft = (defaults.ALL_LAYERS if n is None else n for n in chosen)
    shared: dict[str, Any] = {name: getattr(options, name) for name in ("mmap", "mlock", "repack")}
    tell("target", 0.0)
    yield _measured(
        options.target,
        partial(tell, "target"),
        measures=not options.exact,
        rpc=rpc,
        mtp=options.draft == MTP,
        overrides=options.overrides or (),
        adapters=options.lora,
        key_overrides=options.override_kv,
        n_gpu_layers=n_target,
        tensor_split=options.tensor_split,
        **shared,
    )
    tell("target", 1.0)
    if options.draft is None or options.draft == MTP:
        return
    shared |= {"overrides": options.overrides_draft or (), "n_gpu_layers": n_draft}
    # A head that reads memory of the target can use all devices that this may be on:
    # llama.cpp ends the process where a context has not the device of a tensor.
    reads_target = head is not None and (head.shares_cache or head.borrows_output)
    of_rpc: dict[str, Any] = {"rpc": rpc}
    of_gpu = {"gpu": options.main_gpu, "key_overrides": options.override_kv_draft}
    shared |= of_rpc if reads_target else of_gpu
    shared |= {"adapters": options.lora_draft, "progress": partial(tell, "draft")}
    tell("draft", 0.0)
    if head is None:
        yield _measured(Path(options.draft), **shared)
    else:
        yield Model(Path(options.draft), is_head=True, mtp=head.kind == MTP, **shared), None
    tell("draft", 1.0)


def _measured(
    path: Path, progress: Share, *, measures: bool = True, **how: Any
) -> tuple[Model, str | None]:
    rpc = [device.name for device in how.get("rpc", ())]
    devices = usable_devices(rpc, how.get("gpu"))
    placed = Placed(devices, how["n_gpu_layers"], how["overrides"] if devices else ())

    def make(types: Collection[str] | None, share: Share) -> Model:
        return Model(path, own_kernels=types, progress=share, **how)

    measures = measures and how["repack"]
    return kernel_choice.load(make, path, placed, measures=measures, progress=progress)


def _settings(
    models: Sequence[Model], options: LoadOptions, places: Fit
) -> tuple[list[ContextOptions], Attention]:
    target, head = models[0], places.head
    draft = models[1] if models[1:] else None
    limits = [target.n_ctx_train]
    limits += [model.n_ctx_max for model in models if model.n_ctx_max]
    shared = ContextOptions(
        n_ctx=options.n_ctx or min(filter(None, [options.n_ctx_usual, *limits])),
        n_sequences=options.n_slots,
        flash_attention=options.flash_attention,
        type_k=options.type_k,
        type_v=options.type_v,
    )
    found, attention = profile_store.TunedSettings(), Attention()
    if options.tuned:
        found = profile_store.settings(pair_key(target, draft, shared))
    n_batch = options.n_batch or found.n_batch or defaults.N_BATCH
    offloads = options.offloads and places.offloads(n_batch)
    shared = replace(shared, n_batch=n_batch, offloads=offloads)
    if options.flash_attention == defaults.FLASH_ATTENTION:
        if options.exact or not options.tuned:
            attention = Attention(default_attention(target, draft))
        elif found.flash_attention:
            attention = Attention(found.flash_attention)
        else:
            attention = measure_attention(target, draft, shared, _usual(options))
        shared = replace(shared, flash_attention=attention.setting)
    of_target = replace(
        shared,
        n_rows=options.n_draft_max + 1,
        n_threads=options.n_threads or found.n_threads,
        varies_threads=options.n_threads is None,
        n_rollback=options.n_rollback,
        n_checkpoints=options.ctx_checkpoints,
        n_leaves=n_leaves(options.n_slots, options.n_draft_max),
    )
    is_tiny = draft is not None and draft.n_bytes < _TINY_BYTES
    n_threads = 1 if head is None and is_tiny else options.n_threads
    n_kept = options.n_ctx_draft or 0
    of_draft = replace(
        shared,
        n_rows=head.n_rows(options.n_draft_max) if head else max(options.n_draft_max, 2),
        n_kept=n_kept if n_kept < shared.n_ctx else 0,
        n_batch=options.n_batch or found.n_batch_draft or defaults.N_BATCH,
        n_threads=options.n_threads_draft or found.n_threads_draft or n_threads,
        varies_threads=not (options.n_threads or options.n_threads_draft),
    )
    return [of_target, of_draft], attention


def _profile(
    contexts: Sequence[Context],
    n_slots: int,
    options: LoadOptions,
    places: Fit,
) -> tuple[StoredProfile, Sequence[Shares]]:
    """What is known of the costs of the first context, for which the second one drafts.

    With the seconds that are assumed of a token with each model: see PairCosts.
    """
    models = [context.model for context in contexts]
    n_most = contexts[0].n_rows * n_slots
    draft = contexts[1] if contexts[1:] else None
    predicted = places.predicted_costs([model.n_gpu_layers for model in models], options, n_most)
    known = first_costs(contexts[0], draft, n_most, _usual(options)) if options.tuned else None
    return StoredProfile(
        profile_key(*contexts) if options.tuned else None,
        known or predicted.start,
        contexts[1].n_per_step if contexts[1:] else 1,
    ), predicted.assumed


def _usual(options: LoadOptions) -> UsualText | None:
    return UsualText(*options.usual_text) if options.usual_text else None


def _projectors(
    options: LoadOptions, target: Context, draft: Context | None, vocab_map: VocabMap | None
) -> Iterator[tuple[Projector | None, str]]:
    """Load the projectors of target and draft, each with a line about it. The caller closes them.

    Raises ModelError for one that was named and cannot be used.
    """
    if (path := options.projector) is None:
        return
    projector, about = _loaded(path, target, is_named=options.mmproj is not None)
    yield projector, about
    if draft is not None and draft.link is not None:
        _give(projector, draft)  # a head, which reads the target's hidden states
        return
    path_draft = options.projector_draft
    if draft is None or path_draft is None or projector is None:
        return
    is_named, is_same = options.mmproj_draft is not None, path_draft.resolve() == path.resolve()
    if why := _why_blind(draft, vocab_map):
        if is_named:
            raise ModelError(f"leave out {path_draft} (mmproj_draft, --mmproj-draft): {why}")
        yield None, why
    elif is_same and projector.fits(draft.model):
        _give(projector, draft)
        yield None, _about(projector, draft)
    elif is_named or not is_same:
        projector.draft, about = _loaded(path_draft, draft, is_named=is_named)
        yield projector.draft, about


def _loaded(path: Path, context: Context, *, is_named: bool) -> tuple[Projector | None, str]:
    try:
        projector = Projector(
            path, context.model, n_threads=context.n_threads, n_batch=context.n_batch
        )
    except ModelError as error:
        if is_named:
            raise
        return None, f"{path.name} is not used: {error}"
    _give(projector, context)
    return projector, _about(projector, context)


def _about(projector: Projector, context: Context) -> str:
    return f"{context.model.path.name} reads images with {projector.path.name}"


def _give(projector: Projector | None, context: Context) -> None:
    context.projector, context.native.has_images = projector, projector is not None


def _why_blind(draft: Context, vocab_map: VocabMap | None) -> str | None:
    """Why a draft model reads texts without their images; None: it can read them."""
    name = draft.model.path.name
    if vocab_map is not None:
        return f"{name} reads texts without their images: it has another vocabulary"
    if draft.options.n_kept:
        return f"{name} reads texts without their images: its context is shorter than the target's"
    return None
