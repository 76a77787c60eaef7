"""`ggufspec plan`: predicts where the layers of a pair go, and how fast it runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ggufspec.cli import render, shared
from ggufspec.cli.loading import AUTO_DRAFT
from ggufspec.cli.options import added, gathered, options
from ggufspec.cli.text_settings import refuse_without_draft, was_given
from ggufspec.common.facts import counted
from ggufspec.common.files import format_bytes
from ggufspec.models.adapters import adapters_of
from ggufspec.models.draft_proposal import propose_draft
from ggufspec.models.gguf_file import DENSE, EXPERTS
from ggufspec.models.head_facts import MTP
from ggufspec.models.header import read_header
from ggufspec.models.heads import is_head
from ggufspec.models.named_shape import adapted_shape, shapes_of_pair
from ggufspec.models.projectors import check_projector, projector_beside, projector_bytes
from ggufspec.models.pull import locate
from ggufspec.models.shape import ModelShape
from ggufspec.models.vocabulary_overlap import MAX_PADDING
from ggufspec.placement.overrides import on_cpu
from ggufspec.placement.plan import OffloadPlan, PlacementOptions, alternatives, ffn_name
from ggufspec.placement.speeds import Gpu, Machine, experts_note, with_less_memory

_LIKELY_FREE = 0.94  # share of a GPU's memory that desktop and driver leave free
_OPTIONS = {EXPERTS: "--n-cpu-moe", DENSE: "--n-cpu-ffn"}


@click.command(name="plan", cls=shared.SectionedCommand)
@added(*options("pair", "target", "draft"))
@gathered("hardware", *options("hardware"), *options("load", "rpc"))
@gathered(
    "wished", *options("wished"), *options("load", "n_ctx", "n_ctx_draft", "type_k", "type_v")
)
@gathered("adapters", *options("load", "lora", "lora_draft"))
@gathered("projecting", *options("load", "mmproj", "mmproj_draft", "mmproj_auto"))
@added(*options("output", "as_json"))
def command(
    target: str,
    draft: str | None,
    hardware: dict[str, Any],
    wished: dict[str, Any],
    adapters: dict[str, tuple[tuple[str, float], ...]],
    projecting: dict[str, Any],
    as_json: bool,
) -> None:
    """Predict the speed of a pair for several placements of its layers. Loads no model.

    A draft on the GPU is faster, but takes memory from layers of the target. Experts of a mixture
    can stay on the CPU while the rest of their layers is on the GPU. The first row is what
    `-ngl auto -ngld auto` chooses, or the target alone if that is faster. Predictions come from
    bytes and bandwidths: they rank placements better than they predict speeds. `ggufspec devices`
    lists the GPUs of this machine.

    \b
      ggufspec plan --target 70B-Q3_K_S --draft 8B-Q3_K_L --vram 24GiB --ram 64GiB
      ggufspec plan --target large.gguf --draft small.gguf --vram 24GiB,12GiB --acceptance 0.7
    """
    if hardware["rpc"] and hardware["vram"] is not None:
        raise click.UsageError("--vram is for another machine, --rpc for this one: leave one out")
    if draft == AUTO_DRAFT:
        proposal = propose_draft(target)
        render.note(f"drafting with {proposal.name}: {proposal.why}")
        draft = proposal.name
    if draft is None:
        refuse_without_draft()
    shape, shape_draft = shapes_of_pair(target, draft)
    writes_text = draft is not None and draft != MTP and not _is_head(draft)
    if adapters["lora"]:
        shape = adapted_shape(target, adapters_of("--lora", adapters["lora"]))
    if adapters["lora_draft"] and draft is not None:
        if not writes_text:
            raise click.UsageError("--lora-draft needs a draft model, and the draft is a head")
        shape_draft = adapted_shape(draft, adapters_of("--lora-draft", adapters["lora_draft"]))
    shapes = {"target": shape, "draft": shape_draft}
    if shape_draft and abs(shape.n_vocab - shape_draft.n_vocab) > MAX_PADDING:
        render.note(
            f"the target has {shape.n_vocab:,} tokens, the draft {shape_draft.n_vocab:,}: it "
            "drafts only tokens that both have, so fewer are accepted (--acceptance)"
        )
    machine = _machine(shape, hardware)
    if projecting["mmproj_draft"] and not writes_text:
        raise click.UsageError("--mmproj-draft needs a draft model")
    for projector in _projectors(target, draft if writes_text else None, **projecting):
        n_bytes = projector_bytes(check_projector(projector).paths[0])
        machine = with_less_memory(machine, n_bytes)
        if not as_json:
            render.echo(f"projector: {projector.name}, {format_bytes(n_bytes)} with its buffers")
    n_ctx, n_draft = wished["n_ctx"], wished["n_draft"]
    wished |= {
        "n_ctx": shape.n_ctx_train if n_ctx == 0 else n_ctx or 0,
        "n_ctx_draft": wished["n_ctx_draft"] or 0,
        "n_draft": None if isinstance(n_draft, str) else n_draft,
    }
    wishes = PlacementOptions(**wished)
    plans = alternatives(shape, shape_draft, machine, wishes)
    if as_json:
        document: dict[str, Any] = {
            whose: each and {"name": each.name, "n_layers": each.n_layers, "n_bytes": each.n_bytes}
            for whose, each in shapes.items()
        }
        document |= {
            "machine": asdict(machine),
            "bandwidths": machine.bandwidths._asdict(),
            "acceptance": wishes.acceptance,
            "plans": [{"way": name, **asdict(plan)} for name, plan in plans],
            "versions": render.versions(),
        }
        render.echo_json(document)
    else:
        _print(plans, shapes, shape, machine, wishes.acceptance, hardware["rpc"])
        is_here = hardware["vram"] is None and not hardware["rpc"]
        if is_here and (paths := locate(target)) is not None:
            _print_kernels(paths[0], plans[0][1], shape)


def _projectors(
    target: str,
    draft: str | None,
    mmproj: Path | None,
    mmproj_draft: Path | None,
    mmproj_auto: bool,
) -> list[Path]:
    """The projectors that `load` would use for a target and a draft model, each once."""
    found = list[Path]()
    for name, given in ((target, mmproj), (draft, mmproj_draft)):
        paths = locate(name) if name is not None and mmproj_auto else None
        path = given or (projector_beside(paths[0]) if paths is not None else None)
        if path is None:
            break  # without one of the target, that of the draft is not used
        if path not in found:
            found.append(path)
    return found


def _is_head(name: str) -> bool:
    paths = locate(name, heads=True)
    return paths is not None and is_head(read_header(paths[0]))


def _machine(shape: ModelShape, hardware: Mapping[str, Any]) -> Machine:
    from ggufspec.engine.speeds import machine_for, with_measured_speeds
    from ggufspec.llama.devices import free_memory, gpus
    from ggufspec.llama.rpc import RpcConnections
    from ggufspec.placement import rpc_address as servers

    vram, ram = hardware["vram"], hardware["ram"]
    if vram is None:
        with closing(RpcConnections(servers.addresses("--rpc", hardware["rpc"]))) as remote:
            found = (*remote.gpus(), *gpus())
    else:
        found = tuple(Gpu("a GPU", round(size * _LIKELY_FREE)) for size in vram if size)
    if gpu_bandwidth := hardware["gpu_bandwidth"]:
        found = tuple(replace(gpu, bandwidth=float(gpu_bandwidth)) for gpu in found)
    if ram is None and vram is None:
        ram = free_memory()
    machine = machine_for(found, ram, shape)
    if ram_bandwidth := hardware["ram_bandwidth"]:
        machine = replace(machine, host_bandwidth=float(ram_bandwidth))
    return with_measured_speeds(machine, shape.n_bytes) if vram is None else machine


def _print(
    plans: list[tuple[str, OffloadPlan]],
    shapes: Mapping[str, ModelShape | None],
    target: ModelShape,
    machine: Machine,
    acceptance: float,
    rpc: tuple[str, ...],
) -> None:
    for whose, shape in shapes.items():
        if shape:
            about = "" if shape.is_exact else "about "
            render.echo(
                f"{whose}: {shape.name}, {counted(shape.n_layers, 'layer')}, {about}"
                f"{format_bytes(shape.n_bytes)}"
            )
    for gpu in machine.gpus:
        known = "nominal" if gpu.bandwidth or not gpu.is_remote else "assumed (--gpu-bandwidth)"
        speed = f"{_bytes_rate(gpu.nominal)} {known}"
        if gpu.is_measured:
            speed = f"{_bytes_rate(gpu.effective)} measured"
        render.echo(f"{gpu.name}: {format_bytes(gpu.n_free)} free, {speed}")
    ram = "" if machine.n_host_free is None else f"{format_bytes(machine.n_host_free)} free, "
    measured = "" if machine.host_bandwidth else " assumed (--ram-bandwidth)"
    render.echo(f"CPU: {ram}{_bytes_rate(machine.bandwidths.host)}{measured}")
    if draft := shapes["draft"]:
        source = "" if was_given("acceptance") else "; assumed (--acceptance)"
        render.echo(
            f"acceptance: {acceptance:.0%} of tokens, if those before were accepted{source}"
        )
    placed = None if draft is None or draft.is_inside else draft
    render.echo("GPU layers of target and draft, memory of GPUs and host, draft length n:")
    rows = [["placement", "target", "on CPU", "draft", "GPU", "host", "n", "tokens/s"]]
    for i, (name, plan) in enumerate(plans):
        if any(plan == other for _, other in plans[:i]):
            continue
        place = name if plan.fits else f"{name}: too large"
        layers = f"{plan.n_gpu_layers}/{target.n_layers + 1}"
        split = f"{ffn_name(target)} of {plan.n_cpu_ffn}" if _is_split(plan) else ""
        layers_draft = f"{plan.n_gpu_layers_draft}/{placed.n_layers + 1}" if placed else ""
        on_gpus = format_bytes(sum(plan.gpu_bytes)) if machine.gpus else ""
        memory = [on_gpus, format_bytes(plan.host_bytes)]
        n, speed = str(plan.n_draft or ""), f"{plan.tokens_per_second:.2f}"
        rows.append([place, layers, split, layers_draft, *memory, n, speed])
    render.echo_rows(rows)
    chosen = plans[0][1]
    if chosen.n_gpu_layers <= target.n_layers or chosen.n_cpu_ffn:
        from ggufspec.engine.speeds import weights_note

        render.echo(f"\nThe target's weights are {weights_note(target.matrix_type)}.")
    if target.n_experts:
        render.echo(f"\nExperts: {experts_note(target.n_experts, target.n_experts_used)}.")
    if not chosen.fits:
        render.echo("\nNone of these fits: use a smaller quantization or a smaller model.")
        return
    if _is_split(chosen):
        (kept,) = on_cpu(target.ffn_pattern, chosen.n_cpu_ffn)
        render.echo(f"\nOn the CPU stay the tensors with names like {kept.pattern}")
    render.echo(
        f"\nOptions of llama.cpp for the first row: -ngl {chosen.n_gpu_layers}"
        + (f" {_OPTIONS[target.ffn_pattern]} {chosen.n_cpu_ffn}" if _is_split(chosen) else "")
        + (f" -ngld {chosen.n_gpu_layers_draft}" if chosen.n_draft and placed else "")
        + (f" -ts {','.join(map(str, chosen.split))}" if len(machine.gpus) > 1 else "")
        + (f" --rpc {','.join(rpc)}" if rpc else "")
        + f" -c {chosen.caches.n_ctx}"
    )


def _is_split(plan: OffloadPlan) -> bool:
    return plan.n_gpu_layers > 0 < plan.n_cpu_ffn


def _print_kernels(path: Path, plan: OffloadPlan, shape: ModelShape) -> None:
    from ggufspec.llama.devices import offload_devices
    from ggufspec.llama.kernel_offer import Placed
    from ggufspec.measure.kernels import recall

    if plan.n_gpu_layers > shape.n_layers and not plan.n_cpu_ffn:
        return
    devices = [device.name for device in offload_devices()]
    kept = on_cpu(shape.ffn_pattern, plan.n_cpu_ffn) if devices else ()
    choice = recall(path, Placed(devices, plan.n_gpu_layers, kept))
    if choice is None:
        render.echo(
            "The first load measures whether its passes are faster with ggufspec's kernels or with "
            "llama.cpp's."
        )
    else:
        render.echo(f"On the CPU it uses {choice.reason}.")


def _bytes_rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.{0 if bandwidth >= 1e10 else 1}f} GB/s"
