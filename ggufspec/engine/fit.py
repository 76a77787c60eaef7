"""Chooses where a pair goes on this machine, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from ggufspec.common import defaults
from ggufspec.engine.load_options import LoadOptions
from ggufspec.engine.options import file_sampling
from ggufspec.engine.speeds import (
    PairCosts,
    PlacedShape,
    machine_for,
    predicted_costs,
    with_measured_speeds,
)
from ggufspec.errors import OptionError
from ggufspec.llama.build import why_no_gpu
from ggufspec.llama.devices import buffer_types, free_memory, gpus
from ggufspec.models.adapters import with_adapters
from ggufspec.models.head_facts import HeadFacts
from ggufspec.models.header import Header, read_header
from ggufspec.models.heads import check_model
from ggufspec.models.key_overrides import with_key_overrides
from ggufspec.models.projectors import projector_bytes
from ggufspec.models.shape import ModelShape, draft_shape, shape_of, with_kept
from ggufspec.placement.memory import n_rollback
from ggufspec.placement.overrides import Overrides, check_buffers, check_patterns, on_cpu, stays
from ggufspec.placement.plan import (
    OffloadPlan,
    PlacementOptions,
    describe,
    longest_context,
    plan_offload,
)
from ggufspec.placement.speeds import Gpu, Machine, PassTimes, with_less_memory

# Shares of the free memory of GPUs that further attempts plan with: a driver may report memory as
# free that other programs use. The last attempt leaves GPUs out.
_SMALLER = (0.85, 0.6, 0.0)
_MOST_GPUS = 16  # GGML_CUDA_MAX_DEVICES and its like in llama.cpp


class Fit:
    """Chooses where a pair goes: a first placement, and a smaller one if memory runs out.

    head: the draft, if it is a head; None: it is a model, or there is none.
    """

    def __init__(self, options: LoadOptions) -> None:
        """Raises ModelError for files whose headers cannot be right, VocabError, OptionError."""
        header = read_header(options.target)
        check_model(header)
        keys = (*options.rope.overrides(header.architecture), *options.override_kv)
        # The last of a key takes precedence.
        options = replace(options, override_kv=tuple({each.key: each for each in keys}.values()))
        header = with_key_overrides(header, options.override_kv)
        self.file_sampling = file_sampling(header.values)
        adapted = with_adapters(header, options.lora)
        self._target = _kept(shape_of(adapted), adapted, options.overrides)
        if options.overrides is not None:
            n_kept = self._target.n_layers if options.overrides else 0
            options = replace(options, n_cpu_ffn=n_kept)
        self._draft: ModelShape | None = None
        self.head: HeadFacts | None = None
        if options.draft is not None:
            self._draft, self.head = draft_shape(header, options.draft)
            if self.head is None and isinstance(options.draft, Path) and any(options.rope):
                keys = options.rope.overrides(read_header(options.draft).architecture)
                options = replace(options, override_kv_draft=keys)
            if options.overrides_draft or options.lora_draft:
                self._draft = self._changed_draft(options)
            if options.overrides_draft:
                options = replace(options, n_cpu_ffn_draft=self._draft.n_layers)
        elif options.lora_draft:
            raise OptionError(
                "lora_draft (--lora-draft) needs a draft model: name one with draft= (--draft)"
            )
        self._n_projectors = sum(map(projector_bytes, self._projectors(options)))
        if options.n_ctx == 0:
            options = replace(options, n_ctx=self._target.n_ctx_train or defaults.N_CTX)
        n_kept = n_rollback(self._target, options.n_draft_max, options.n_slots)
        self._options = replace(options, n_rollback=n_kept)
        self._gpus = gpus()
        self._shares, self._is_shorter = list(_SMALLER), False  # for the attempts after the first
        if len(options.tensor_split) > _MOST_GPUS:
            raise OptionError(
                f"tensor_split has {len(options.tensor_split)} shares; llama.cpp supports at most "
                f"{_MOST_GPUS} GPUs"
            )
        if options.main_gpu is not None and not 0 <= options.main_gpu < max(len(self._gpus), 1):
            found = ", ".join(f"{i} ({gpu.name})" for i, gpu in enumerate(self._gpus))
            advice = f"numbers them {found}. Choose one" if found else "found none: leave it out"
            raise OptionError(
                f"there is no GPU {options.main_gpu}; llama.cpp {advice} (main_gpu, -mg)"
            )

    def _projectors(self, options: LoadOptions) -> set[Path]:
        """The files of the projectors. Raises OptionError for one of a draft that reads none."""
        writes_text = self._draft is not None and self.head is None
        if options.mmproj_draft is not None and not (writes_text and options.projector):
            raise OptionError(
                "mmproj_draft (--mmproj-draft) needs a draft model, and a target that reads images "
                "(mmproj, -mm)"
            )
        found = options.projector, options.projector_draft if writes_text else None
        return {path for path in found if path is not None}

    def _changed_draft(self, options: LoadOptions) -> ModelShape:
        """The shape of the draft with its adapters and overrides, which a head cannot have.

        Raises OptionError, ModelError.
        """
        if self.head is not None or not isinstance(options.draft, Path):
            what = (
                "the overrides for the draft (-otd, --cpu-moe-draft, --n-cpu-moe-draft, "
                "--n-cpu-ffn-draft)"
            )
            what = what if options.overrides_draft else "lora_draft (--lora-draft)"
            raise OptionError(
                f"the draft is a head, whose tensors stay on the target's devices as they are: "
                f"leave out {what}"
            )
        header = with_adapters(read_header(options.draft), options.lora_draft)
        return _kept(shape_of(header), header, options.overrides_draft)

    def add(self, remote: Sequence[Gpu]) -> None:
        """Add devices of RPC servers, for the target only; they come first, as in llama.cpp."""
        self._gpus = (*remote, *self._gpus)
        if len(self._gpus) > _MOST_GPUS:
            raise OptionError(
                f"rpc adds {len(remote)} devices, {len(self._gpus)} with the local GPUs; llama.cpp "
                f"supports at most {_MOST_GPUS}. Name fewer servers"
            )

    @property
    def _is_open(self) -> bool:
        options = self._options
        return bool(self._gpus) and None in (options.n_gpu_layers, options.n_gpu_layers_draft)

    def first(self) -> LoadOptions:
        """The options; values that were not given are chosen by free memory and predicted speed."""
        if self._options.n_ctx_usual is None:
            n_ctx = longest_context(self._target, self._draft, self._machine(), self._wishes())
            self._options = replace(self._options, n_ctx_usual=n_ctx)
        if self._is_open:
            return self._planned(self._machine())
        return replace(self._options, placement=self._unused)

    def alone(self, n_host: int | None) -> OffloadPlan:
        """The plan for the pair alone on this machine, with `n_host` bytes of its memory.

        A context whose size is not given fits half of the memory, so that a second pair may fit.
        """
        wishes, machine = self._wishes(), replace(self._machine(), n_host_free=n_host)
        if self._options.n_ctx is None:
            half = replace(self._machine(0.5), n_host_free=n_host and n_host // 2)
            n_ctx = longest_context(self._target, self._draft, half, wishes)
            wishes = replace(wishes, n_ctx_usual=n_ctx)
        return plan_offload(self._target, self._draft, machine, wishes)

    @property
    def _unused(self) -> str | None:
        options = self._options
        asked = options.n_gpu_layers or options.n_gpu_layers_draft
        if self._gpus or not (asked or options.tensor_split or options.main_gpu is not None):
            return None
        return f"no layers were offloaded: {why_no_gpu()}; see `ggufspec devices`"

    def smaller(self, used: LoadOptions) -> LoadOptions | None:
        """Options that need less memory than `used`; None if nothing is left to reduce."""
        while self._is_open and self._shares:
            found = self._planned(self._machine(self._shares.pop(0)))
            if replace(found, placement=used.placement) != used:
                return found
        if used.offloads and self._gpus and used.n_gpu_layers == used.n_gpu_layers_draft == 0:
            return replace(used, offloads=False)
        if self._options.n_ctx is not None or self._is_shorter:
            return None
        self._is_shorter = True
        n_ctx = (used.n_ctx or self._default_n_ctx()) // 2
        why = f"a context of {n_ctx:,} tokens: there was no memory for twice as many"
        return replace(
            used,
            n_ctx=max(n_ctx, 1),
            placement="; ".join(filter(None, (self._unused, why))),
        )

    def offloads(self, n_batch: int) -> bool:
        """Whether a GPU reads prompts with the host's layers, too: not if measured slower."""
        if self._options.op_offload is not None:
            return self._options.op_offload
        times = PassTimes(self._target, self._known.bandwidths)
        return not self._gpus or times.copying_pays(n_batch)

    def predicted_costs(
        self, n_gpu_layers: Sequence[int], used: LoadOptions, n_most: int
    ) -> PairCosts:
        """Predicted costs of the pair, or of the draft alone, for passes of up to `n_most` tokens.

        n_gpu_layers: of target and draft, or of the draft alone. used: the options that they were
        loaded with.
        """
        shapes = [(self._target, used.n_cpu_ffn), (self._draft, used.n_cpu_ffn_draft)]
        known = [(shape, kept or 0) for shape, kept in shapes if shape][-len(n_gpu_layers) :]
        of, *drafts = (
            PlacedShape(shape, n, kept)
            for (shape, kept), n in zip(known, n_gpu_layers, strict=True)
        )
        return predicted_costs(of, drafts[0] if drafts else None, self._known, n_most)

    def _default_n_ctx(self) -> int:
        usual = self._options.n_ctx_usual or defaults.N_CTX
        return min(usual, self._target.n_ctx_train or defaults.N_CTX)

    @cached_property
    def _known(self) -> Machine:
        """The devices after `add`, as earlier runs measured them: reads all stored profiles."""
        machine = machine_for(self._gpus, None, self._target)
        is_known = bool(self._gpus) and self._options.tuned
        return with_measured_speeds(machine, self._target.n_bytes) if is_known else machine

    def _machine(self, share: float = 1.0) -> Machine:
        left = tuple(replace(gpu, n_free=round(gpu.n_free * share)) for gpu in self._known.gpus)
        machine = replace(self._known, gpus=left, n_host_free=free_memory())
        return with_less_memory(machine, self._n_projectors)

    def _wishes(self) -> PlacementOptions:
        options = self._options
        return PlacementOptions(
            n_ctx=options.n_ctx or 0,
            n_ctx_usual=options.n_ctx_usual or defaults.N_CTX,
            n_ctx_draft=options.n_ctx_draft or 0,
            n_batch=options.n_batch or defaults.N_BATCH,
            type_k=options.type_k,
            type_v=options.type_v,
            flash_attention=options.flash_attention != "off",
            n_gpu_layers=options.n_gpu_layers,
            n_gpu_layers_draft=options.n_gpu_layers_draft,
            n_cpu_ffn=options.n_cpu_ffn,
            n_cpu_ffn_draft=options.n_cpu_ffn_draft or 0,
            n_slots=options.n_slots,
            n_draft_max=options.n_draft_max,
            n_checkpoints=options.ctx_checkpoints,
        )

    def _planned(self, machine: Machine) -> LoadOptions:
        options = self._options
        plan = plan_offload(self._target, self._draft, machine, self._wishes())
        left_out = ""
        if self._draft is not None and self._draft.is_inside and options.n_gpu_layers is None:
            alone = plan_offload(self._target, None, machine, self._wishes())
            if alone.fits and alone.tokens_per_second > plan.tokens_per_second:
                # Other drafts have a plan without them on the GPU; a head is where the target is.
                left_out = (
                    "; its MTP head is left out: it takes memory of layers, and "
                    f"{plan.tokens_per_second:.2g} tokens/s are predicted with it (-ngl keeps it)"
                )
                self._draft, self.head, plan = None, None, alone
                self._options = options = replace(options, draft=None)
        is_split = len(machine.gpus) > 1 and plan.n_gpu_layers > 0
        gpu_draft = plan.draft_gpu
        if gpu_draft is not None:  # a number among the local GPUs, where drafts are loaded
            gpu_draft -= sum(gpu.is_remote for gpu in machine.gpus)
        is_shorter = plan.caches.n_ctx < self._default_n_ctx()
        return replace(
            options,
            n_gpu_layers=plan.n_gpu_layers,
            n_gpu_layers_draft=plan.n_gpu_layers_draft,
            n_cpu_ffn=plan.n_cpu_ffn,
            overrides=on_cpu(self._target.ffn_pattern, plan.n_cpu_ffn)
            if options.overrides is None
            else options.overrides,
            n_ctx=plan.caches.n_ctx if is_shorter else options.n_ctx,
            type_k=plan.caches.type_k,
            type_v=plan.caches.type_v,
            tensor_split=options.tensor_split or (plan.split if is_split else ()),
            main_gpu=gpu_draft if options.main_gpu is None else options.main_gpu,
            offloads=plan.offloads if options.op_offload is None else options.op_offload,
            placement=self._described(plan, machine) + left_out,
        )

    def _described(self, plan: OffloadPlan, machine: Machine) -> str:
        if not self._options.overrides:
            return describe(plan, self._target, self._draft, machine)
        line = describe(replace(plan, n_cpu_ffn=0), self._target, self._draft, machine)
        return f"{line}; the tensors that you named are where you put them"


def _kept(shape: ModelShape, header: Header, overrides: Overrides | None) -> ModelShape:
    """The shape with the tensors that overrides keep on the CPU. Raises OptionError."""
    if not overrides:
        return shape
    check_buffers(overrides, buffer_types())
    check_patterns(overrides, str(header.paths[0]), header.tensor_names)
    return with_kept(shape, header, partial(stays, overrides))
