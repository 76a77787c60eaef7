"""Where a pair goes on this machine. Reads headers and asks devices; loads nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ggufspec.common import defaults, validate
from ggufspec.drafting import profile_store
from ggufspec.drafting.cost_model import CostModel
from ggufspec.errors import OptionError
from ggufspec.llama.devices import free_memory, gpus, machine
from ggufspec.models.header import read_header
from ggufspec.models.shape import shape_of
from ggufspec.placement.memory import VALUE_BYTES
from ggufspec.placement.plan import Gpu, Machine, PlacementOptions, describe, plan_offload
from ggufspec.placement.speeds import HOST_SLOPE, host_bandwidth

_SMALLER = 0.85  # of the free memory of GPUs, what a second attempt reckons with
_MOST_LAYERS = 2**31
_MOST_GPUS = 16  # GGML_CUDA_MAX_DEVICES and its like in llama.cpp
_FEW = 8  # tokens of a batch, as drafting makes them


@dataclass(frozen=True)
class Placement:
    """How to load: see ggufspec.load. why: one line for the user; None: nothing was decided."""

    n_gpu_layers: int
    n_gpu_layers_draft: int
    n_ctx: int | None
    type_k: str
    type_v: str
    tensor_split: Sequence[float] = ()
    gpu_draft: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class Asked:
    """What the user said about it; None: choose. Negative layers: all of them."""

    n_gpu_layers: int | None
    n_gpu_layers_draft: int | None
    n_ctx: int | None
    n_batch: int | None
    type_k: str
    type_v: str
    flash_attention: str
    tensor_split: Sequence[float] = ()
    main_gpu: int | None = None
    n_slots: int = 1


class Placing:
    """The first placement of a pair, and a smaller one if that fails."""

    def __init__(self, target: Path, draft: Path | None, asked: Asked) -> None:
        """Raises ModelError for files that cannot be what they say."""
        self._target = shape_of(read_header(target))
        self._draft = shape_of(read_header(draft)) if draft else None
        self._asked = asked
        self._gpus = gpus()
        for which, type_ in (("K", asked.type_k), ("V", asked.type_v)):
            if type_ not in VALUE_BYTES:
                raise OptionError(
                    f"{type_!r} is no type of the {which} cache; choose from "
                    f"{', '.join(VALUE_BYTES)}"
                )
        if len(asked.tensor_split) > _MOST_GPUS:
            raise OptionError(
                f"tensor_split has {len(asked.tensor_split)} shares; llama.cpp knows at most "
                f"{_MOST_GPUS} GPUs"
            )
        if asked.main_gpu is not None and not 0 <= asked.main_gpu < max(len(self._gpus), 1):
            found = ", ".join(f"{i}: {gpu.name}" for i, gpu in enumerate(self._gpus)) or "none"
            raise OptionError(
                f"there is no GPU {asked.main_gpu}; llama.cpp sees {found}. Choose one of them "
                "(main_gpu, -mg)"
            )

    def add(self, remote: Sequence[Gpu]) -> None:
        """Devices of RPC servers, for the target only; they come first, as in llama.cpp."""
        self._gpus = (*remote, *self._gpus)
        if len(self._gpus) > _MOST_GPUS:
            raise OptionError(
                f"rpc adds {len(remote)} devices, {len(self._gpus)} with the GPUs here; llama.cpp "
                f"knows at most {_MOST_GPUS}. Name fewer servers"
            )

    def first(self) -> Placement:
        """Where everything goes, if nothing went wrong yet."""
        asked = self._asked
        if not self._gpus or None not in (asked.n_gpu_layers, asked.n_gpu_layers_draft):
            return Placement(
                defaults.ALL_LAYERS if asked.n_gpu_layers is None else asked.n_gpu_layers,
                defaults.ALL_LAYERS
                if asked.n_gpu_layers_draft is None
                else asked.n_gpu_layers_draft,
                asked.n_ctx,
                asked.type_k,
                asked.type_v,
                asked.tensor_split,
                asked.main_gpu,
            )
        return self._planned(self._machine(1.0), asked)

    def smaller(self, used: Placement) -> Placement | None:
        """After memory has run out: what takes less; None where the user left no choice."""
        asked = self._asked
        if self._gpus and None in (asked.n_gpu_layers, asked.n_gpu_layers_draft):
            found = self._planned(self._machine(_SMALLER), asked)
            if found != used:
                return found
        if asked.n_ctx is not None:
            return None
        n_ctx = self._default_n_ctx() // 2
        return replace(
            used,
            n_ctx=max(n_ctx, 1),
            why=f"a context of {n_ctx:,} tokens, since there was no memory for twice as many",
        )

    def _default_n_ctx(self) -> int:
        return min(defaults.N_CTX, self._target.n_ctx_train or defaults.N_CTX)

    def _machine(self, share: float) -> Machine:
        left = tuple(replace(gpu, n_free=round(gpu.n_free * share)) for gpu in self._gpus)
        return Machine(left, free_memory())

    def _planned(self, machine: Machine, asked: Asked) -> Placement:
        wishes = PlacementOptions(
            n_ctx=asked.n_ctx,
            n_batch=asked.n_batch or defaults.N_BATCH,
            type_k=asked.type_k,
            type_v=asked.type_v,
            flash_attention=asked.flash_attention != "off",
            n_gpu_layers=asked.n_gpu_layers,
            n_gpu_layers_draft=asked.n_gpu_layers_draft,
            n_slots=asked.n_slots,
        )
        plan = plan_offload(self._target, self._draft, machine, wishes)
        is_split = len(machine.gpus) > 1 and plan.n_gpu_layers > 0
        gpu_draft = plan.draft_gpu
        if gpu_draft is not None:  # of those here, as drafts are loaded
            gpu_draft -= sum(gpu.is_remote for gpu in machine.gpus)
        is_shorter = plan.caches.n_ctx < self._default_n_ctx()
        return Placement(
            plan.n_gpu_layers,
            plan.n_gpu_layers_draft,
            plan.caches.n_ctx if is_shorter else asked.n_ctx,
            plan.caches.type_k,
            plan.caches.type_v,
            asked.tensor_split or (plan.split if is_split else ()),
            gpu_draft if asked.main_gpu is None else asked.main_gpu,
            describe(plan, self._target, self._draft, machine),
        )


def layers(name: str, value: int | str) -> int | None:
    """A number of layers, or None for "auto". Raises OptionError."""
    if value == defaults.N_GPU_LAYERS:
        return None
    if isinstance(value, str):
        raise OptionError(f"{name} is {value!r}; it must be a whole number, or 'auto'")
    found = validate.whole(name, value)
    if abs(found) >= _MOST_LAYERS:
        raise OptionError(f"{name} is {value}; no model has so many layers (-1: all)")
    return found


class Measured(NamedTuple):
    """What passes were found to take on this machine: see Machine."""

    bandwidth: float
    slope: float


def measured_host() -> Measured | None:
    """From what is remembered of the pair with the largest target; None where there is nothing.

    The largest, since small models live in caches.
    """
    best: tuple[int, Measured] | None = None
    here = machine()
    for record in profile_store.records():
        pair = record.facts.get("pair", {})
        target, seconds = pair.get("target", {}), _pass_seconds(record.document)
        n_bytes, n_params = target.get("n_bytes", 0), target.get("n_params", 0)
        is_of_here = pair.get("machine") == here and not target.get("n_gpu_layers") and n_params
        if not is_of_here or 1 not in seconds or (best and n_bytes <= best[0]):
            continue
        one = seconds.pop(1)
        slopes = [(of / one - 1) / (n - 1) for n, of in seconds.items() if 2 <= n <= _FEW]
        slope = statistics.median(slopes) if slopes else HOST_SLOPE
        bandwidth = host_bandwidth(n_bytes, 8 * n_bytes / n_params, one)
        best = n_bytes, Measured(bandwidth, max(slope, 0.0))
    return best[1] if best else None


def _pass_seconds(document: Mapping[str, Any]) -> dict[int, float]:
    """By size, as a record has them; nothing where it has none that can be trusted."""
    try:
        costs = CostModel.of_document(document["costs"], _FEW)
    except (KeyError, TypeError, ValueError):
        return {}
    found = {n: costs.curve[n - 1] for n in range(2, _FEW + 1) if costs.n_measured(n)}
    return {1: costs.plain, **found}
