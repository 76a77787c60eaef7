"""Where the layers of a target and of its draft go: chosen by predicted tokens a second. Pure.

Filling memory is not the aim: layers of the target on a GPU make each pass faster, a draft there
makes drafting faster, and both want the same room. Every number of draft layers is tried, on every
GPU; the target takes what is left; the fastest prediction wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ggufspec.common import defaults
from ggufspec.common.files import format_bytes
from ggufspec.models.shape import ModelShape
from ggufspec.placement.memory import Caches, Sizes
from ggufspec.placement.speeds import (
    GPU_BANDWIDTH,
    GPU_EFFICIENCY,
    HOST_BANDWIDTH,
    HOST_SLOPE,
    Bandwidths,
    Passes,
    best_round,
    known_bandwidth,
)

_SPARE = 384 * 2**20  # bytes of a GPU left to its driver and to fragments
_LEAST_CTX = 1024
_SMALLER_KV = "q8_0"
_KV_BLOCK = 32  # numbers of a head that such a cache packs together


@dataclass(frozen=True)
class Gpu:
    """A device with memory of its own. bandwidth: bytes/s on its box; None: by its name.

    is_remote: of an RPC server; it takes layers of targets only.
    """

    name: str
    n_free: int
    bandwidth: float | None = None
    is_remote: bool = False

    @property
    def nominal(self) -> float:
        """Bytes/s, a guess where nobody told."""
        return self.bandwidth or known_bandwidth(self.name) or GPU_BANDWIDTH


@dataclass(frozen=True)
class Machine:
    """What there is to compute with.

    host_bandwidth: bytes/s that passes of the processor really get, if known; host_slope: what each
    further token of a batch adds to them.
    """

    gpus: tuple[Gpu, ...]
    n_host_free: int | None
    host_bandwidth: float | None = None
    host_slope: float = HOST_SLOPE

    @property
    def n_remote(self) -> int:
        """How many GPUs are those of RPC servers; they come first."""
        return sum(gpu.is_remote for gpu in self.gpus)

    @property
    def bandwidths(self) -> Bandwidths:
        """For predictions; several GPUs count as one of their mean speed."""
        host = self.host_bandwidth or HOST_BANDWIDTH
        if not self.gpus:
            return Bandwidths(host=host, host_slope=self.host_slope)
        mean = sum(gpu.nominal for gpu in self.gpus) / len(self.gpus)
        return Bandwidths(mean * GPU_EFFICIENCY, host, host_slope=self.host_slope)


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None: whatever is best."""

    n_ctx: int | None = None
    n_batch: int = defaults.N_BATCH
    type_k: str = defaults.KV_TYPE
    type_v: str = defaults.KV_TYPE
    flash_attention: bool = True
    n_gpu_layers: int | None = None
    n_gpu_layers_draft: int | None = None
    n_draft: int | None = None
    acceptance: float = defaults.ACCEPTANCE
    n_slots: int = 1


@dataclass(frozen=True)
class OffloadPlan:
    """Where everything goes, and what is predicted of it.

    Layers are counted as llama.cpp does: the output is one more. split: layers of the target on
    each GPU; draft_gpu: the one that the draft is on. n_draft: the draft length of the prediction.
    """

    n_gpu_layers: int
    n_gpu_layers_draft: int
    split: tuple[int, ...]
    draft_gpu: int | None
    caches: Caches
    gpu_bytes: tuple[int, ...]
    host_bytes: int
    n_draft: int
    tokens_per_second: float
    plain_tokens_per_second: float
    fits: bool


def plan_offload(
    target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes
) -> OffloadPlan:
    """The best plan; of what does not fit, the one that lacks the least, with `fits` False.

    Where memory is short: layers leave the GPU first, since that costs only time; then a context
    that nobody asked for gets smaller; then caches get 8 bits.
    """
    plans: list[OffloadPlan] = []
    for caches in _caches(target, draft, wishes):
        found = _best(target, draft, machine, wishes, caches)
        if found.fits:
            return found
        plans.append(found)
    return min(plans, key=lambda plan: plan.host_bytes)


def alternatives(
    target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes
) -> list[tuple[str, OffloadPlan]]:
    """Plans that people would compare, with what they are; the chosen one comes first."""
    chosen = plan_offload(target, draft, machine, wishes)

    def other(of_draft: ModelShape | None = draft, **changed: int) -> OffloadPlan:
        changes: dict[str, Any] = changed
        return _best(target, of_draft, machine, replace(wishes, **changes), chosen.caches)

    alone = other(None)
    is_idle = not chosen.n_draft and chosen.tokens_per_second <= alone.tokens_per_second
    if draft and alone.fits and (is_idle or not chosen.fits):
        found = [("chosen: no draft", alone), ("with the draft", chosen)]
    else:
        found = [("chosen", chosen), ("no draft", alone)]
    if draft and len(machine.gpus) > machine.n_remote:
        half, whole = draft.n_layers // 2, draft.n_layers + 1
        found += [
            ("draft on CPU", other(n_gpu_layers_draft=0)),
            ("half of the draft on GPU", other(n_gpu_layers_draft=half)),
            ("draft on GPU", other(n_gpu_layers_draft=whole)),
            ("only the draft on GPU", other(n_gpu_layers_draft=whole, n_gpu_layers=0)),
        ]
    if machine.gpus:
        found.append(("all on CPU", other(n_gpu_layers=0, n_gpu_layers_draft=0)))
    return found


def why(plan: OffloadPlan, target: ModelShape, draft: ModelShape | None, machine: Machine) -> str:
    """A plan in one line."""
    if machine.gpus:
        where = f"{plan.n_gpu_layers} of {target.n_layers + 1} layers of the target"
        n_here = len(machine.gpus) - machine.n_remote
        if draft and n_here:
            where += f" and {plan.n_gpu_layers_draft} of {draft.n_layers + 1} of the draft"
        places = [
            _counted(machine.n_remote, "RPC device"),
            "the GPU" if n_here == 1 else _counted(n_here, "GPU"),
        ]
        where += f" on {' and '.join(filter(None, places))}"
        free = sum(gpu.n_free for gpu in machine.gpus)
        where += f" ({format_bytes(sum(plan.gpu_bytes))} of {format_bytes(free)} free)"
    else:
        where = f"all layers on the processor ({format_bytes(plan.host_bytes)}): there is no GPU"
    speed = f"about {plan.tokens_per_second:.2g} tokens/s predicted"
    if plan.n_draft:
        speed += f", {plan.plain_tokens_per_second:.2g} without drafting"
    # How fast RPC devices are, and the network between, nobody knows.
    parts = [where] if machine.n_remote else [where, speed]
    if plan.caches.type_k == _SMALLER_KV:
        parts.append(f"caches in {_SMALLER_KV}")
    return "; ".join(parts)


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}" if n else ""


def _caches(target: ModelShape, draft: ModelShape | None, wishes: Wishes) -> Iterator[Caches]:
    """From what was asked for to what takes less."""
    limit = target.n_ctx_train or defaults.N_CTX
    n_ctx = wishes.n_ctx or min(defaults.N_CTX, limit)
    made = Caches(
        n_ctx,
        wishes.n_batch,
        wishes.type_k,
        wishes.type_v,
        wishes.flash_attention,
        wishes.n_slots,
    )
    yield made
    while wishes.n_ctx is None and made.n_ctx // 2 >= _LEAST_CTX:
        made = replace(made, n_ctx=made.n_ctx // 2)
        yield made
    is_untouched = (made.type_k, made.type_v) == (defaults.KV_TYPE,) * 2 and made.flash_attention
    heads = [each.n_embd_head for each in (target, draft) if each]
    if is_untouched and not any(n % _KV_BLOCK for n in heads):
        yield replace(made, type_k=_SMALLER_KV, type_v=_SMALLER_KV)


def _best(
    target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes, caches: Caches
) -> OffloadPlan:
    return max(_plans(target, draft, machine, wishes, caches), key=_worth)


def _plans(
    target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes, caches: Caches
) -> Iterator[OffloadPlan]:
    sizes = Sizes(target, caches)
    sizes_draft = Sizes(draft, caches) if draft else None
    passes = Passes(target, machine.bandwidths)
    passes_draft = Passes(draft, machine.bandwidths) if draft else None
    for n_gpu_layers_draft, draft_gpu in _draft_places(sizes_draft, machine, wishes):
        on_gpu = on_host = 0
        if sizes_draft:
            on_gpu, on_host = sizes_draft.taken(n_gpu_layers_draft)
        rooms = [
            gpu.n_free - _SPARE - (on_gpu if i == draft_gpu else 0)
            for i, gpu in enumerate(machine.gpus)
        ]
        for n_gpu_layers in _target_places(sizes, rooms, wishes, machine.n_remote):
            split = sizes.split(n_gpu_layers, rooms, machine.n_remote)
            is_draft_in = draft_gpu is None or rooms[draft_gpu] >= 0
            fits_gpus = split is not None and is_draft_in
            if split is None:
                split = [n_gpu_layers, *[0] * (len(rooms) - 1)] if rooms else []
            host = sizes.taken(n_gpu_layers).host + on_host
            fits_host = machine.n_host_free is None or host <= machine.n_host_free
            best = best_round(
                *(passes, passes_draft, n_gpu_layers, n_gpu_layers_draft),
                *(wishes.acceptance, wishes.n_draft),
            )
            yield OffloadPlan(
                n_gpu_layers=n_gpu_layers,
                n_gpu_layers_draft=n_gpu_layers_draft,
                split=tuple(split),
                draft_gpu=draft_gpu,
                caches=caches,
                gpu_bytes=_on_gpus(sizes, split, on_gpu, draft_gpu),
                host_bytes=host,
                n_draft=best.n_draft,
                tokens_per_second=best.tokens_per_second,
                plain_tokens_per_second=1 / passes.seconds(n_gpu_layers),
                fits=fits_gpus and fits_host,
            )


def _draft_places(
    sizes: Sizes | None, machine: Machine, wishes: Wishes
) -> Iterator[tuple[int, int | None]]:
    """How many layers of the draft, and on which GPU."""
    here = range(machine.n_remote, len(machine.gpus))
    if sizes is None or not here or wishes.n_gpu_layers_draft == 0:
        yield 0, None
        return
    asked = wishes.n_gpu_layers_draft
    counts: Sequence[int] = range(sizes.n_units + 1)
    if asked is not None:
        counts = [sizes.n_units if asked < 0 else min(asked, sizes.n_units)]
    for n in counts:
        for i in here if n else [None]:
            yield n, i


def _target_places(
    sizes: Sizes, rooms: Sequence[int], wishes: Wishes, n_remote: int
) -> Sequence[int]:
    asked = wishes.n_gpu_layers
    if not rooms:
        return [0]
    if asked is not None:
        return [sizes.n_units if asked < 0 else min(asked, sizes.n_units)]
    n_fitting = sizes.n_fitting(rooms, n_remote)
    # Who names servers wants them used, and how fast they are cannot be foretold.
    return [n_fitting] if n_remote else sorted({0, n_fitting})


def _on_gpus(
    sizes: Sizes, split: Sequence[int], draft_bytes: int, draft_gpu: int | None
) -> tuple[int, ...]:
    found = []
    left = sum(split)
    for i, n in enumerate(split):
        n_bytes = sum(sizes.units[left - n : left]) + (sizes.compute if n else 0)
        left -= n
        found.append(n_bytes + (draft_bytes if i == draft_gpu else 0))
    return tuple(found)


def _worth(plan: OffloadPlan) -> tuple[bool, float, int]:
    return plan.fits, plan.tokens_per_second, -sum(plan.gpu_bytes)
