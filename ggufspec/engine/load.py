"""Loads a target, a draft for it, and one for the draft, into an Engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from ggufspec.common import defaults, validate
from ggufspec.common.progress import LoadProgress
from ggufspec.drafting import profile_store
from ggufspec.drafting.pair_profile import StoredProfile
from ggufspec.drafting.strategies.ngram import TextStore
from ggufspec.engine import fit
from ggufspec.engine.chat_template import check_template
from ggufspec.engine.engine import Engine
from ggufspec.engine.fit import Fit, LoadOptions
from ggufspec.engine.load_models import load_models
from ggufspec.engine.pair import Pair, add_texts, read_texts
from ggufspec.engine.prompt_cache import n_cache_bytes
from ggufspec.engine.speeds import timed_start
from ggufspec.errors import OptionError, OutOfMemoryError
from ggufspec.llama import kernels
from ggufspec.llama.attention import Attention, UsualText, measure_attention
from ggufspec.llama.context import Context, HeadLink
from ggufspec.llama.context_checks import check_exact, check_room
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.head import Head
from ggufspec.llama.model import Model
from ggufspec.llama.profile_key import pair_key, profile_key
from ggufspec.llama.rpc import RpcConnections
from ggufspec.llama.threadpool import end_threads
from ggufspec.llama.vocab_map import VocabMap, map_of
from ggufspec.models.adapters import adapters_of
from ggufspec.models.head_facts import MTP
from ggufspec.models.key_overrides import key_overrides_of, rope_of
from ggufspec.placement.memory import n_leaves
from ggufspec.placement.overrides import overrides_of
from ggufspec.placement.rpc_address import addresses

FIT = "fit"

# A draft model this small is faster with one thread than with two; a head, which also reads what
# the target has accepted, is not (EAGLE-3 of 10 MB for SmolLM2 135M: 70 against 77 tokens/s).
_TINY_BYTES = 32 * 2**20


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    n_ctx: int | str | None = None,
    n_ctx_draft: int | None = None,
    n_batch: int | None = None,
    n_draft_max: int | None = None,
    n_slots: int = 1,
    exact: bool = False,
    n_gpu_layers: int | str = defaults.N_GPU_LAYERS,
    n_gpu_layers_draft: int | str = defaults.N_GPU_LAYERS,
    override_tensor: Sequence[str] = (),
    n_cpu_moe: int | None = None,
    n_cpu_ffn: int | None = None,
    override_tensor_draft: Sequence[str] = (),
    n_cpu_moe_draft: int | None = None,
    n_cpu_ffn_draft: int | None = None,
    lora: Sequence[str | Path | tuple[str | Path, float]] = (),
    lora_draft: Sequence[str | Path | tuple[str | Path, float]] = (),
    tensor_split: Sequence[float] = (),
    main_gpu: int | None = None,
    rpc: Sequence[str] = (),
    n_threads: int | None = None,
    n_threads_draft: int | None = None,
    flash_attention: str = defaults.FLASH_ATTENTION,
    usual_text: tuple[int, int] | None = None,
    type_k: str = defaults.KV_TYPE,
    type_v: str = defaults.KV_TYPE,
    mmap: bool = True,
    mlock: bool = False,
    repack: bool = True,
    op_offload: bool | None = None,
    override_kv: Sequence[str] = (),
    rope_scaling: str | None = None,
    rope_scale: float | None = None,
    rope_freq_base: float | None = None,
    rope_freq_scale: float | None = None,
    yarn_orig_ctx: int | None = None,
    tuned: bool = True,
    chat_template: str | None = None,
    draft_texts: Sequence[str | Path] = (),
    n_remembered: int = defaults.N_REMEMBERED,
    cache_ram: int | None = None,
    ctx_checkpoints: int = defaults.CTX_CHECKPOINTS,
    progress: LoadProgress | None = None,
) -> Engine:
    """Load a target GGUF model and, if given, a draft for it.

    target, draft: paths of files; `ggufspec.models.resolve` returns them for names. A draft is a
    small model, or a head that reads the target's hidden states: the file of a DFlash, EAGLE-3 or
    MTP head (often mtp-*.gguf), or "mtp" for the MTP head in the target's own file.
    n_ctx: tokens of prompt and text together; 0: what the target was trained for; None: that, at
    most 4096; "fit": that, or less where it would not fit into free memory.
    n_ctx_draft: tokens that the cache of a draft model holds: of a longer text the first and the
    newest, which changes what is drafted, not what is written. None: all of n_ctx. Not for heads,
    nor for drafts with recurrent layers.
    n_batch: prompt tokens per batch; None: 512.
    n_draft_max: maximum drafted tokens per round; None: 16, or 3 if `exact`.
    n_slots: texts that can be written at the same time; each has a context of n_ctx tokens.
    exact: compute each token in a pass over n_draft_max + 1 tokens, so that greedy text is equal
    bit for bit with and without drafts, in each slot and whatever else is written: see the guide.
    Checked with a few passes; raises OptionError for models and drafts for which it cannot hold.
    n_gpu_layers, n_gpu_layers_draft: layers on the GPU, the output counting as one; negative: all;
    "auto": the numbers that are predicted to be fastest together, within free memory.
    A head in the target's own file ("mtp") is where the target's last layers are.
    override_tensor: "PATTERN=TYPE", as llama.cpp's -ot: tensors whose name has a match of the
    regular expression are in that buffer type, such as CPU. n_cpu_moe: the experts of so many
    layers, from the first, stay on the CPU; n_cpu_ffn: the feed-forward matrices of dense layers;
    negative: of all. Without any of these and with n_gpu_layers "auto", the number is chosen, too.
    The same with _draft, for a draft model.
    lora: files of LoRA adapters for the target (GGUF), or pairs of a file and a scale; their sum is
    added to its weights in each pass. lora_draft: for a draft model.
    tensor_split: shares of the target's layers for several GPUs. main_gpu: the one for the draft.
    rpc: llama.cpp's RPC servers ("host:port"), whose devices take layers of the target as GPUs do
    and come before the local ones; with "auto" they get what does not fit on local GPUs, as far as
    they have room. The draft stays local. llama.cpp ends the process if a server disconnects.
    n_threads, n_threads_draft: None: one per physical core, and a single one for a tiny draft;
    fewer while other programs use the cores.
    flash_attention: "auto" (measured once on CPUs, else llama.cpp decides), "on", "off".
    usual_text: tokens of the prompt and of the answer that "auto" decides for; None: short texts.
    type_k, type_v: types of the KV caches ("f16", "q8_0" ...).
    mlock: keep the models in RAM, never swapped. repack: let kernels store weights in another form.
    op_offload: whether a GPU reads prompts with the layers of the host; None: where it is faster.
    override_kv: "KEY=TYPE:VALUE" (int, float, bool, str): values of the target's header.
    rope_scaling ("none", "linear", "yarn"), rope_scale, rope_freq_base, rope_freq_scale (1 /
    rope_scale), yarn_orig_ctx: for longer contexts than the training's, also of a draft model.
    tuned: use what `ggufspec tune` found for threads, flash attention and batches that are not
    given; without it, measure flash attention on CPUs, once and for about a second. Store this, and
    what passes of the pair cost.
    chat_template: a Jinja template that replaces that of the target's file.
    draft_texts: files (UTF-8) that texts may repeat, such as the code that is edited; n-grams draft
    from them. They change no text's distribution.
    n_remembered: tokens of written texts that n-grams draft from, too, the latest; 0: none. Where
    several users share an engine, the time of a text can tell what others have written.
    cache_ram: MiB of memory for the caches of texts whose slot another text has got, so that their
    next turn is not read again; None: a quarter of what is free once all is loaded, at most 8,192.
    ctx_checkpoints: states kept per slot at the ends of messages, for models with recurrent layers,
    so that a turn that departs there (without earlier reasoning) reads only what is new.
    progress: called at the start and the end of each step, and within most: see LoadProgress.

    A draft of another vocabulary drafts the tokens that both have: the engine's `notes` say how
    many these are.

    If memory runs out, loading is tried again with smaller values of what was not given. The
    engine's `placement` says what was chosen.

    Raises ModelError, VocabError, OptionError, PromptError, OutOfMemoryError, RpcError.
    """
    validate.function("progress", progress)
    if validate.whole("n_remembered", n_remembered) < 0:
        raise OptionError(f"n_remembered is {n_remembered}; it must be at least 0")
    texts = read_texts(draft_texts)
    n_draft_default = defaults.N_DRAFT_FIXED if exact else defaults.N_DRAFT_MAX
    options = LoadOptions(
        target=validate.path("target", target),
        draft=MTP if draft == MTP else None if draft is None else validate.path("draft", draft),
        n_ctx=None if n_ctx == FIT or n_ctx is None else validate.whole("n_ctx", n_ctx),
        n_ctx_usual=None if n_ctx == FIT else defaults.N_CTX,
        n_ctx_draft=n_ctx_draft,
        n_batch=n_batch,
        n_draft_max=n_draft_default if n_draft_max is None else n_draft_max,
        n_slots=n_slots,
        exact=validate.switch("exact", exact),
        n_gpu_layers=fit.layers("n_gpu_layers", n_gpu_layers),
        n_gpu_layers_draft=fit.layers("n_gpu_layers_draft", n_gpu_layers_draft),
        overrides=overrides_of("", override_tensor, n_cpu_moe, n_cpu_ffn),
        overrides_draft=overrides_of(
            "_draft", override_tensor_draft, n_cpu_moe_draft, n_cpu_ffn_draft
        ),
        lora=adapters_of("lora", lora),
        lora_draft=adapters_of("lora_draft", lora_draft),
        tensor_split=validate.shares("tensor_split", tensor_split),
        main_gpu=None if main_gpu is None else validate.whole("main_gpu", main_gpu),
        n_threads=n_threads,
        n_threads_draft=n_threads_draft,
        flash_attention=flash_attention,
        usual_text=None if usual_text is None else _usual_text(usual_text),
        type_k=type_k,
        type_v=type_v,
        mmap=validate.switch("mmap", mmap),
        mlock=validate.switch("mlock", mlock),
        repack=validate.switch("repack", repack),
        op_offload=None if op_offload is None else validate.switch("op_offload", op_offload),
        override_kv=key_overrides_of("override_kv", override_kv),
        rope=rope_of(rope_scaling, rope_scale, rope_freq_base, rope_freq_scale, yarn_orig_ctx),
        tuned=validate.switch("tuned", tuned),
        chat_template=None
        if chat_template is None
        else validate.text("chat_template", chat_template),
        cache_ram=cache_ram,
        ctx_checkpoints=ctx_checkpoints,
    )
    if chat_template is not None:
        check_template(chat_template)
    places = Fit(options)
    servers = RpcConnections(addresses("rpc", rpc))
    with ExitStack() as undone:
        undone.callback(servers.close)
        places.add(servers.gpus())
        tell = progress or (lambda what, share: None)
        tell("kernels", 0.0)
        kernels.prepare(repack=repack)
        tell("kernels", 1.0)
        placed = places.first()
        while True:
            try:
                engine = _load(placed, servers, places, TextStore(n_remembered), tell)
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
    contexts: list[Context] = []
    vocab_map: VocabMap | None = None
    with ExitStack() as stack:
        for model in load_models(options, head, servers.devices, tell):
            models.append(stack.enter_context(closing(model)))
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
            if its_settings.is_exact:
                check_exact(context)
        draft = contexts[1] if contexts[1:] else None
        of_draft = _profile(contexts[1:], 1, options, places) if draft and not head else None
        resources = ExitStack()
        pair = Pair(
            contexts[0],
            Head(link, draft) if link and draft else draft,
            n_draft_max=options.n_draft_max,
            vocab_map=vocab_map,
            stored_profile=_profile(contexts, options.n_slots, options, places, attention),
            stored_profile_of_draft=of_draft,
            texts=texts,
            n_cache_bytes=n_cache_bytes(options.cache_ram),
            resources=resources,
        )
        engine = Engine(
            pair,
            placement=options.placement,
            attention=attention.reason,
            file_sampling=places.file_sampling,
            chat_template=options.chat_template,
        )
        tell("contexts", 1.0)
        resources.callback(servers.close)
        resources.push(stack.pop_all())  # last: until here, the stack closes them if this raises
        return engine


def _settings(
    models: Sequence[Model], options: LoadOptions, places: Fit
) -> tuple[list[ContextOptions], Attention]:
    """How the context of each model is made, and how attention was chosen."""
    target, head = models[0], places.head
    draft = models[1] if models[1:] else None
    n_padding = options.n_draft_max + 1 if options.exact else 0
    limits = [target.n_ctx_train]
    limits += [model.n_ctx_max - n_padding for model in models if model.n_ctx_max]
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
    if options.tuned and options.flash_attention == defaults.FLASH_ATTENTION:
        tuned = found.flash_attention and Attention(found.flash_attention)
        attention = tuned or measure_attention(target, draft, shared, options.usual_text)
        shared = replace(shared, flash_attention=attention.setting)
    of_target = replace(
        shared,
        n_rows=options.n_draft_max + 1,
        n_threads=options.n_threads or found.n_threads,
        varies_threads=options.n_threads is None and not options.exact,
        n_rollback=options.n_rollback,
        n_checkpoints=options.ctx_checkpoints,
        n_leaves=1 if options.exact else n_leaves(options.n_slots, options.n_draft_max),
        is_exact=options.exact,
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
        varies_threads=not (options.n_threads or options.n_threads_draft or options.exact),
    )
    return [of_target, of_draft], attention


def _profile(
    contexts: Sequence[Context],
    n_slots: int,
    options: LoadOptions,
    places: Fit,
    attention: Attention | None = None,
) -> StoredProfile:
    """What is known of the costs of the first context, for which the second one drafts."""
    models = [context.model for context in contexts]
    n_most = contexts[0].n_rows * n_slots
    draft = models[1] if models[1:] else None
    predicted = places.predicted_costs([model.n_gpu_layers for model in models], options, n_most)
    return StoredProfile(
        profile_key(*contexts) if options.tuned else None,
        timed_start(models[0], draft, n_most, attention) or predicted.start,
        predicted.assumed,
        contexts[1].n_per_step if contexts[1:] else 1,
    )


def _usual_text(lengths: Sequence[int]) -> UsualText:
    found = validate.tokens("usual_text", lengths)
    if len(found) != 2 or min(found) < 0:
        raise OptionError(
            f"usual_text is {lengths!r}; give the tokens of the prompt and of the answer, such as "
            "(5000, 200)"
        )
    return UsualText(*found)
