"""Chooses the devices of a target's and a draft's layers, by predicted tokens per second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from ggufspec.common import defaults
from ggufspec.common.facts import counted
from ggufspec.common.files import format_bytes
from ggufspec.models.shape import ModelShape
from ggufspec.placement.memory import CacheParams, ModelMemory
from ggufspec.placement.speeds import Machine, PassTimes, predict_speed

_SPARE = 384 * 2**20  # bytes of each GPU left free for its driver and for fragmentation
_LEAST_CTX = 1024
_CTX_STEP = 4096
# Shares of the free memory that a long context may take. The rest is for other programs and, on the
# host, for cached files. llama.cpp writes zeros into the whole cache before the first token.
_GPU_SHARE, _HOST_SHARE = 0.9, 0.25
_SMALLER_KV = "q8_0"
_DEPTH = 1 / 4  # average share of the context that a pass reads [judgement]
_KV_BLOCK = 32  # a quantized cache packs this many numbers of a head together


@dataclass(frozen=True)
class PlacementOptions(CacheParams):
    """The user's options; the plan chooses options that are None, and n_ctx if it is 0."""

    n_ctx: int = 0
    n_ctx_usual: int = defaults.N_CTX  # limit of a context that the plan chooses
    n_ctx_draft: int = 0  # cells of the draft per slot; 0, or above n_ctx: as many as the target
    n_batch: int = defaults.N_BATCH
    n_draft_max: int = defaults.N_DRAFT_MAX
    n_checkpoints: int = defaults.CTX_CHECKPOINTS
    n_gpu_layers: int | None = None
    n_gpu_layers_draft: int | None = None
    n_cpu_ffn: int | None = None  # first layers whose experts or feed-forward stay on the CPU
    n_cpu_ffn_draft: int = 0
    n_draft: int | None = None
    acceptance: float = defaults.ACCEPTANCE


@dataclass(frozen=True)
class OffloadPlan:
    """Where everything goes, and the predicted speed.

    Layers are counted as in llama.cpp, with the output as one more layer.
    """

    n_gpu_layers: int
    n_gpu_layers_draft: int
    split: tuple[int, ...]  # layers of the target on each GPU
    draft_gpu: int | None  # index of the draft's GPU
    caches: CacheParams
    gpu_bytes: tuple[int, ...]
    host_bytes: int
    n_draft: int  # draft length at the predicted speed
    tokens_per_second: float
    plain_tokens_per_second: float
    fits: bool
    offloads: bool = True  # a GPU computes prompts for the host's layers, too, and needs buffers
    n_cpu_ffn: int = 0  # first layers whose experts or feed-forward stay on the CPU in any case


def plan_offload(
    target: ModelShape, draft: ModelShape | None, machine: Machine, options: PlacementOptions
) -> OffloadPlan:
    """The fastest plan that fits; else the plan that lacks the least memory, with `fits` False.

    If memory is short, layers leave the GPU first, since that costs only time; then the context
    gets smaller, unless its size was given; then the KV cache gets 8 bits.
    """
    plans: list[OffloadPlan] = []
    for caches in _caches(target, draft, options):
        found = _best(target, draft, machine, options, caches)
        if found.fits:
            return found
        plans.append(found)
    return min(plans, key=lambda plan: plan.host_bytes)


def longest_context(
    target: ModelShape, draft: ModelShape | None, machine: Machine, options: PlacementOptions
) -> int:
    """The longest context, up to the target's training context, that costs no speed.

    At least the usual context. A longer one may take a share of the memory that the usual context
    leaves free, but moves no layers off the GPUs.
    """
    most: int = target.n_ctx_train or defaults.N_CTX
    sizes: list[int] = [*range(min(defaults.N_CTX, most), most, _CTX_STEP), most]

    def plan(n_ctx: int, machine: Machine) -> OffloadPlan:
        return _best(target, draft, machine, options, replace(options, n_ctx=n_ctx))

    def places(plan: OffloadPlan) -> tuple[int, int, int, bool]:
        return plan.n_gpu_layers, plan.n_cpu_ffn, plan.n_gpu_layers_draft, plan.offloads

    usual = plan(sizes[0], machine)
    if not usual.fits:
        return sizes[0]
    gpus = tuple(
        replace(gpu, n_free=used + round((gpu.n_free - used) * _GPU_SHARE))
        for gpu, used in zip(machine.gpus, usual.gpu_bytes or [0] * len(machine.gpus), strict=True)
    )
    n_host = machine.n_host_free
    if n_host is not None:
        n_host = usual.host_bytes + round((n_host - usual.host_bytes) * _HOST_SHARE)
    smaller = replace(machine, gpus=gpus, n_host_free=n_host)

    def is_too_long(n_ctx: int) -> bool:
        found = plan(n_ctx, smaller)
        return not found.fits or places(found) != places(usual)

    return sizes[max(bisect_left(sizes, True, key=is_too_long) - 1, 0)]


def alternatives(
    target: ModelShape, draft: ModelShape | None, machine: Machine, options: PlacementOptions
) -> list[tuple[str, OffloadPlan]]:
    """(name, plan) of plans worth comparing; the chosen plan comes first."""
    chosen = plan_offload(target, draft, machine, options)

    def other(of_draft: ModelShape | None = draft, **changed: int) -> OffloadPlan:
        changes: dict[str, Any] = changed
        return _best(target, of_draft, machine, replace(options, **changes), chosen.caches)

    alone = other(None)
    is_idle = not chosen.n_draft and chosen.tokens_per_second <= alone.tokens_per_second
    if draft and alone.fits and (is_idle or not chosen.fits):
        found = [("chosen: no draft", alone), ("with the draft", chosen)]
    else:
        found = [("chosen", chosen), ("no draft", alone)]
    if draft and not draft.is_inside and len(machine.gpus) > machine.n_remote:
        half, whole = draft.n_layers // 2, draft.n_layers + 1
        found += [
            ("draft on CPU", other(n_gpu_layers_draft=0)),
            ("half of the draft on GPU", other(n_gpu_layers_draft=half)),
            ("draft on GPU", other(n_gpu_layers_draft=whole)),
            ("only the draft on GPU", other(n_gpu_layers_draft=whole, n_gpu_layers=0)),
        ]
    if machine.gpus:
        if chosen.n_gpu_layers <= target.n_layers or chosen.n_cpu_ffn:
            found.append(("whole layers", other(n_cpu_ffn=0)))
            name = "experts on CPU" if target.n_experts else "feed-forward on CPU"
            found.append((name, other(n_cpu_ffn=target.n_layers)))
        found.append(("all on CPU", other(n_gpu_layers=0, n_gpu_layers_draft=0)))
    return found


def describe(
    plan: OffloadPlan, target: ModelShape, draft: ModelShape | None, machine: Machine
) -> str:
    where = f"{plan.n_gpu_layers} of {target.n_layers + 1} layers of the target"
    if plan.n_cpu_ffn and plan.n_gpu_layers:
        where += f" without {ffn_name(target)} of the first {plan.n_cpu_ffn}"
    n_here = len(machine.gpus) - machine.n_remote
    if draft and n_here and not draft.is_inside:
        where += f" and {plan.n_gpu_layers_draft} of {draft.n_layers + 1} of the draft"
    places = [counted(machine.n_remote, "RPC device")] if machine.n_remote else []
    if n_here:
        places.append("the GPU" if n_here == 1 else counted(n_here, "GPU"))
    where += f" on {' and '.join(places)}"
    used, free = sum(plan.gpu_bytes), sum(gpu.n_free for gpu in machine.gpus)
    where += f" ({format_bytes(used)} of {format_bytes(free)} free)"
    if not plan.n_gpu_layers and any(gpu.is_measured for gpu in machine.gpus):
        where += ", by what earlier runs measured"
    speeds = plan.tokens_per_second, plan.plain_tokens_per_second
    drafting, plain = (f"{at:.2g}" if at < 99 else f"{at:,.0f}" for at in speeds)
    speed = f"about {drafting} tokens/s predicted"
    if plan.n_draft:
        speed += f", {plain} without drafting"
    # The speed of RPC devices, and of the network, is unknown.
    parts = [where] if machine.n_remote else [where, speed]
    if plan.caches.type_k == _SMALLER_KV:
        parts.append(f"KV cache in {_SMALLER_KV}")
    return "; ".join(parts)


def ffn_name(shape: ModelShape) -> str:
    """Name of the parts that `n_cpu_ffn` keeps on the CPU."""
    return "experts" if shape.n_experts else "feed-forward networks"


def _caches(
    target: ModelShape, draft: ModelShape | None, options: PlacementOptions
) -> Iterator[CacheParams]:
    usual = min(options.n_ctx_usual, target.n_ctx_train or defaults.N_CTX)
    made: CacheParams = replace(options, n_ctx=options.n_ctx or usual)
    yield made
    while not options.n_ctx and made.n_ctx // 2 >= _LEAST_CTX:
        made = replace(made, n_ctx=made.n_ctx // 2)
        yield made
    is_untouched = (made.type_k, made.type_v) == (defaults.KV_TYPE,) * 2 and made.flash_attention
    heads = [each.n_embd_head for each in (target, draft) if each]
    if is_untouched and not any(n % _KV_BLOCK for n in heads):
        yield replace(made, type_k=_SMALLER_KV, type_v=_SMALLER_KV)


def _best(
    target: ModelShape,
    draft: ModelShape | None,
    machine: Machine,
    options: PlacementOptions,
    caches: CacheParams,
) -> OffloadPlan:
    def rank(plan: OffloadPlan) -> tuple[bool, float, int]:
        return plan.fits, plan.tokens_per_second, -sum(plan.gpu_bytes)

    best = max(_plans(target, draft, machine, options, caches, offloads=True), key=rank)
    pays = PassTimes(target, machine.bandwidths).copying_pays(caches.n_batch)
    if not machine.gpus or (best.fits and pays):
        return best
    alone = _plans(target, draft, machine, options, caches, offloads=False)
    return max([best, *alone], key=rank)


def _plans(
    target: ModelShape,
    draft: ModelShape | None,
    machine: Machine,
    options: PlacementOptions,
    caches: CacheParams,
    offloads: bool,
) -> Iterator[OffloadPlan]:
    """All plans with these caches; `offloads` False: only plans with all layers on the host."""
    n_depth = round(caches.n_ctx * _DEPTH)
    target_memory = cache(partial(ModelMemory, target, caches))  # by `n_cpu_ffn`
    target_times = cache(partial(PassTimes, target, machine.bandwidths, n_depth=n_depth))
    n_rows = max(caches.n_draft_max, 2)  # staged drafts need as many
    if draft is not None and draft.n_row_values:  # a head
        n_rows = draft.n_step_tokens
    n_ctx = min(options.n_ctx_draft or caches.n_ctx, caches.n_ctx)
    of_draft = replace(caches, n_ctx=n_ctx, n_draft_max=0, n_rows=n_rows, n_checkpoints=0)
    n_kept = options.n_cpu_ffn_draft
    draft_memory = ModelMemory(draft, of_draft, n_kept) if draft else None
    draft_times = PassTimes(draft, machine.bandwidths, n_kept) if draft else None
    has_gpu = offloads and len(machine.gpus) > machine.n_remote
    for n_gpu_layers_draft, draft_gpu in _draft_places(draft_memory, machine, options):
        on_gpu, on_host = 0, 0
        if draft_memory is not None:
            on_gpu, on_host = draft_memory.use(n_gpu_layers_draft, has_gpu)
        prompt_gpu = machine.n_remote if draft_gpu is None else draft_gpu  # of the draft
        rooms = [
            gpu.n_free - _SPARE - (on_gpu if i == prompt_gpu else 0)
            for i, gpu in enumerate(machine.gpus)
        ]
        places = _target_places(target_memory, rooms, machine.n_remote, options)
        for n_gpu_layers, n_cpu_ffn in places:
            memory, times = target_memory(n_cpu_ffn), target_times(n_cpu_ffn)
            if draft and draft.is_inside and bool(n_gpu_layers) != bool(n_gpu_layers_draft):
                continue
            if not offloads and (n_gpu_layers or n_gpu_layers_draft):
                continue
            split = memory.split(n_gpu_layers, rooms, machine.n_remote) if offloads else None
            is_draft_in = not on_gpu or rooms[prompt_gpu] >= 0
            fits_gpus = not offloads or (split is not None and is_draft_in)
            if split is None:
                split = [n_gpu_layers, *[0] * (len(rooms) - 1)] if rooms else []
            gpu_bytes = _on_gpus(memory, split, machine.n_remote, has_gpu)
            if gpu_bytes and on_gpu:
                gpu_bytes[prompt_gpu] += on_gpu
            host = memory.use(n_gpu_layers, has_gpu).host + on_host
            shared = zip(gpu_bytes, machine.gpus, strict=True)
            needed = host + sum(n_bytes for n_bytes, gpu in shared if gpu.is_shared)
            fits_host = machine.n_host_free is None or needed <= machine.n_host_free
            best = predict_speed(
                *(times, draft_times, n_gpu_layers, n_gpu_layers_draft),
                *(options.acceptance, options.n_draft),
            )
            yield OffloadPlan(
                n_gpu_layers=n_gpu_layers,
                n_gpu_layers_draft=n_gpu_layers_draft,
                split=tuple(split),
                draft_gpu=draft_gpu,
                caches=caches,
                gpu_bytes=tuple(gpu_bytes),
                host_bytes=host,
                n_draft=best.n_draft,
                tokens_per_second=best.tokens_per_second,
                plain_tokens_per_second=1 / times.seconds(n_gpu_layers),
                fits=fits_gpus and fits_host,
                offloads=offloads,
                n_cpu_ffn=n_cpu_ffn,
            )


def _draft_places(
    memory: ModelMemory | None, machine: Machine, options: PlacementOptions
) -> Iterator[tuple[int, int | None]]:
    """(GPU layers of the draft, its GPU) to try; a head in the target's file follows the target."""
    if memory and memory.shape.is_inside and machine.gpus:
        for n in memory.counts(options.n_gpu_layers) or (memory.n_units, 0):
            yield n, len(machine.gpus) - 1 if n else None
        return
    here = range(machine.n_remote, len(machine.gpus))
    if memory is None or not here or options.n_gpu_layers_draft == 0:
        yield 0, None
        return
    for n in memory.counts(options.n_gpu_layers_draft) or range(memory.n_units + 1):
        for i in here if n else [None]:
            yield n, i


def _target_places(
    memory_of: Callable[[int], ModelMemory],
    rooms: Sequence[int],
    n_remote: int,
    options: PlacementOptions,
) -> Iterator[tuple[int, int]]:
    """(GPU layers of the target, `n_cpu_ffn`) to try. memory_of: its memory by `n_cpu_ffn`."""
    kept = options.n_cpu_ffn or 0
    memory = memory_of(kept)
    if not rooms:
        yield 0, kept
        return
    if counts := memory.counts(options.n_gpu_layers):
        yield from ((n, kept) for n in counts)
        return
    n_fitting = memory.n_fitting(rooms, n_remote)
    yield n_fitting, kept
    if n_remote:
        return  # the user named RPC servers: use them, as their speed cannot be predicted
    yield 0, kept
    if options.n_cpu_ffn is None and n_fitting < memory.n_units:
        n_layers = memory.shape.n_layers
        most = memory_of(n_layers).n_fitting(rooms)
        if most < memory.n_units:
            yield most, n_layers
            return
        least = bisect_left(
            range(n_layers), True, key=lambda n: memory_of(n).n_fitting(rooms) == memory.n_units
        )
        yield memory.n_units, least


def _on_gpus(memory: ModelMemory, split: Sequence[int], n_remote: int, has_gpu: bool) -> list[int]:
    """Bytes of the target on each GPU; the first local GPU computes prompts for the host."""
    found = []
    left = n_layers = sum(split)
    n_gpus = 1 if n_remote else len(split)
    for i, n in enumerate(split):
        is_used = n or (has_gpu and i == n_remote and n_layers < memory.n_units)
        buffers = memory.gpu_buffers(n_layers, n_gpus) if is_used else 0
        found.append(sum(memory.units[left - n : left]) + buffers)
        left -= n
    return found
