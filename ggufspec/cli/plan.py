"""`ggufspec plan`: where the layers of a pair would go, and how fast it would be."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.names import AUTO_DRAFT, proposed_draft
from ggufspec.cli.options import (
    a_share,
    context_option,
    draft_n_option_of,
    rpc_option,
    type_k_option,
    type_v_option,
)
from ggufspec.cli.sections import SectionedCommand
from ggufspec.common import defaults

if TYPE_CHECKING:
    from ggufspec.models.shape import ModelShape
    from ggufspec.placement.plan import Machine, OffloadPlan

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]i?B?|B)?\s*", re.IGNORECASE)
_FACTORS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_LIKELY_FREE = 0.94  # of a GPU's memory, what a desktop and the driver leave
_MOST_BYTES = 2**53
_LEAST_BANDWIDTH = 10**6


def _size(value: str) -> int:
    """Bytes of "24GiB", "24G" (the same), "25.7GB". Raises BadParameter."""
    matched = _SIZE.fullmatch(value)
    unit = (matched[2] or "").lower() if matched else ""
    if matched:
        is_decimal = unit.endswith("b") and "i" not in unit
        factors = _FACTORS if is_decimal else {**_FACTORS, **_BINARY}
        found = float(matched[1]) * factors[unit[:1]]
        if 0 <= found <= _MOST_BYTES:
            return round(found)
    raise click.BadParameter(f"{value!r} is no size; write it like 24GiB")


def _bandwidth(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    found = None if value is None else _size(value)
    if found is not None and found < _LEAST_BANDWIDTH:
        raise click.BadParameter(f"{value!r} is no bandwidth; write it like 60GB")
    return found


def _optional_size(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    return None if value is None else _size(value)


def _sizes(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    return None if value is None else [_size(part) for part in value.split(",") if part.strip()]


@click.command(name="plan", cls=SectionedCommand)
@click.option("-m", "--target", required=True, help="The target: a name, or a file.")
@click.option("-md", "--draft", help="The draft, likewise; auto: a fitting one. [default: none]")
@click.option(
    "--vram",
    metavar="SIZE,...",
    callback=_sizes,
    help="Memory of each GPU of a machine to think of, such as 24GiB or 24GiB,12GiB; 0: it has "
    "none. [default: what is free here]",
)
@click.option(
    "--ram",
    metavar="SIZE",
    callback=_optional_size,
    help="Memory of its processor. [default: what is free here; with --vram, as much as it takes]",
)
@click.option(
    "--gpu-bandwidth",
    metavar="SIZE",
    callback=_bandwidth,
    help="Bytes a second of its GPUs, as their makers tell, such as 1008GB. [default: by name]",
)
@click.option(
    "--ram-bandwidth",
    metavar="SIZE",
    callback=_bandwidth,
    help="Bytes a second that its processor really gets, such as 45GB. [default: as measured "
    "here with other models, or 40GB]",
)
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    callback=a_share,
    default=defaults.ACCEPTANCE,
    show_default=True,
    help="Chance that a drafted token stands, if those before it do.",
)
@draft_n_option_of(
    defaults.N_DRAFT, "Tokens that are written ahead in a round; auto: the best of up to 16."
)
@context_option
@type_k_option
@type_v_option
@rpc_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def command(
    target: str,
    draft: str | None,
    vram: list[int] | None,
    ram: int | None,
    gpu_bandwidth: int | None,
    ram_bandwidth: int | None,
    acceptance: float,
    n_draft: int | str,
    n_ctx: int | None,
    type_k: str,
    type_v: str,
    rpc: tuple[str, ...],
    as_json: bool,
) -> None:
    """Predict how fast a pair writes, by where its layers are, before anything is loaded.

    A draft on the GPU drafts faster, and takes room from layers of the target. The plan at the top
    is what `-ngl auto -ngld auto` would do, or says to leave the draft out. Predictions are made
    from bytes and bandwidths; they compare ways with each other better than they tell speeds.

    \b
      ggufspec plan --target 70B-Q3_K_S --draft 8B-Q3_K_L --vram 24GiB --ram 64GiB
      ggufspec plan --target large.gguf --draft small.gguf --vram 24GiB,12GiB --acceptance 0.7
    """
    from ggufspec.models.shape import shape_of_name
    from ggufspec.placement.plan import PlacementOptions, alternatives

    if rpc and vram is not None:
        raise click.UsageError("--vram thinks of another machine, and --rpc asks servers of this")
    if draft == AUTO_DRAFT:
        draft = proposed_draft(target)
    shape, shape_draft = shape_of_name(target), shape_of_name(draft) if draft else None
    machine = _machine(vram, ram, gpu_bandwidth, ram_bandwidth, rpc)
    wishes = PlacementOptions(
        n_ctx=n_ctx,
        type_k=type_k,
        type_v=type_v,
        n_draft=None if isinstance(n_draft, str) else n_draft,
        acceptance=acceptance,
    )
    plans = alternatives(shape, shape_draft, machine, wishes)
    if as_json:
        render.echo_json(_document(plans, shape, shape_draft, machine, acceptance))
    else:
        _print(plans, shape, shape_draft, machine, acceptance, rpc)


def _machine(
    vram: list[int] | None,
    ram: int | None,
    gpu_bandwidth: int | None,
    ram_bandwidth: int | None,
    rpc: tuple[str, ...],
) -> Machine:
    from ggufspec.engine.fit import measured_host
    from ggufspec.llama.devices import free_memory, gpus
    from ggufspec.llama.rpc import RpcConnections
    from ggufspec.placement import rpc_address as servers
    from ggufspec.placement.plan import Gpu, Machine

    if vram is None:
        with closing(RpcConnections(servers.addresses("--rpc", rpc))) as remote:
            found = (*remote.gpus(), *gpus())
    else:
        found = tuple(Gpu("a GPU", round(size * _LIKELY_FREE)) for size in vram if size)
    if gpu_bandwidth:
        found = tuple(replace(gpu, bandwidth=float(gpu_bandwidth)) for gpu in found)
    if ram is None and vram is None:
        ram = free_memory()
    if ram_bandwidth:
        return Machine(found, ram, float(ram_bandwidth))
    is_here = vram is None
    return Machine(found, ram, *((is_here and measured_host()) or ()))


def _print(
    plans: list[tuple[str, OffloadPlan]],
    target: ModelShape,
    draft: ModelShape | None,
    machine: Machine,
    acceptance: float,
    rpc: tuple[str, ...],
) -> None:
    from ggufspec.common.files import format_bytes

    for whose, shape in (("target", target), ("draft", draft)):
        if shape:
            about = "" if shape.is_exact else "about "
            click.echo(
                f"{whose}: {shape.name}, {shape.n_layers} layers, {about}"
                f"{format_bytes(shape.n_bytes)}"
            )
    bandwidths = machine.bandwidths
    for gpu in machine.gpus:
        known = (
            "on its box" if gpu.bandwidth or not gpu.is_remote else "as a guess (--gpu-bandwidth)"
        )
        click.echo(
            f"{gpu.name}: {format_bytes(gpu.n_free)} free, {gpu.nominal / 1e9:.0f} GB/s {known}"
        )
    ram = "" if machine.n_host_free is None else f"{format_bytes(machine.n_host_free)} free, "
    measured = "" if machine.host_bandwidth else " (a guess: --ram-bandwidth)"
    click.echo(f"processor: {ram}{bandwidths.host / 1e9:.0f} GB/s{measured}")
    if draft:
        click.echo(f"acceptance: {acceptance:.0%} of drafted tokens, where those before stand")
    click.echo("layers on GPUs of target and draft, memory there and on the host, draft length n:")
    rows = [["way", "target", "draft", "GPU", "host", "n", "tokens/s"]]
    seen: list[OffloadPlan] = []
    for name, plan in plans:
        if plan in seen:
            continue
        seen.append(plan)
        rows.append(
            [
                name if plan.fits else f"{name}: too large",
                f"{plan.n_gpu_layers}/{target.n_layers + 1}",
                f"{plan.n_gpu_layers_draft}/{draft.n_layers + 1}" if draft else "",
                format_bytes(sum(plan.gpu_bytes)) if machine.gpus else "",
                format_bytes(plan.host_bytes),
                str(plan.n_draft) if plan.n_draft else "",
                f"{plan.tokens_per_second:.2f}",
            ]
        )
    render.echo_rows(rows)
    chosen = plans[0][1]
    if not chosen.fits:
        click.echo("\nNothing of this fits: take a smaller quantization, or a smaller model.")
        return
    click.echo(
        f"\nllama.cpp's options for it: -ngl {chosen.n_gpu_layers}"
        + (f" -ngld {chosen.n_gpu_layers_draft}" if chosen.n_draft else "")
        + (f" -ts {','.join(map(str, chosen.split))}" if len(machine.gpus) > 1 else "")
        + (f" --rpc {','.join(rpc)}" if rpc else "")
        + f" -c {chosen.caches.n_ctx}"
    )


def _document(
    plans: list[tuple[str, OffloadPlan]],
    target: ModelShape,
    draft: ModelShape | None,
    machine: Machine,
    acceptance: float,
) -> dict[str, Any]:
    from dataclasses import asdict

    shapes = {
        whose: shape and {"name": shape.name, "n_layers": shape.n_layers, "n_bytes": shape.n_bytes}
        for whose, shape in (("target", target), ("draft", draft))
    }
    return {
        **shapes,
        "machine": asdict(machine),
        "bandwidths": machine.bandwidths._asdict(),
        "acceptance": acceptance,
        "plans": [{"way": name, **asdict(plan)} for name, plan in plans],
        "versions": render.versions(),
    }
