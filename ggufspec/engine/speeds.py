"""Predicts what passes of a pair cost on its devices, from measurements of earlier runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ggufspec.drafting.cost_model import Start
from ggufspec.llama import kernels
from ggufspec.llama.devices import offload_devices
from ggufspec.measure import table
from ggufspec.models.shape import ModelShape
from ggufspec.placement.speeds import (
    GPU_SLOPE,
    HOST_BANDWIDTH,
    HOST_SLOPE,
    Gpu,
    Machine,
    PassTimes,
    Shares,
    type_note,
)

_FEW = 8  # tokens of a pass that verifies a short draft
# A GPU's speed measured with a smaller model is used if that has at least this share of the bytes:
# passes of small models spend most of their time on starting kernels, not on reading weights.
_SIMILAR = 1 / 4
_CPU = "CPU"


def weights_note(matrix_type: str) -> str:
    """One line: what the type of a target's matrices means for speculation on this CPU."""
    return type_note(matrix_type, is_ours=kernels.slope(matrix_type) is not None)


class PairCosts(NamedTuple):
    """Predicted costs of a pair on its devices.

    start: None if no GPU computes, or if speeds are unknown, as for RPC servers.
    assumed: per model, seconds of a pass over one token on CPU and on GPUs, before any run.
    Measured seconds are divided by these to find how much slower this machine is than assumed.
    """

    start: Start | None
    assumed: Sequence[Shares]


class PlacedShape(NamedTuple):
    """A model, its layers on GPUs, and how many of those keep `n_ffn_bytes` on the CPU."""

    shape: ModelShape
    n_gpu_layers: int
    n_cpu_ffn: int = 0

    def times(self, at: Machine) -> PassTimes:
        return PassTimes(self.shape, at.bandwidths, self.n_cpu_ffn)

    @property
    def n(self) -> int:
        """Layers on GPUs: the requested number, at most those of the model."""
        return min(self.n_gpu_layers, self.shape.n_layers + 1)


def predicted_costs(
    target: PlacedShape,
    draft: PlacedShape | None,
    known: Machine,
    n_most: int,
) -> PairCosts:
    models = target, draft or target
    unknown = Machine(tuple(Gpu(gpu.name, 0, gpu.bandwidth) for gpu in known.gpus), None)
    assumed = [each.times(unknown).shares(each.n) for each in (target, draft) if each]
    if known.n_remote or not any(each.n for each in models):
        return PairCosts(None, assumed)
    times, step = (each.times(known) for each in models)
    seconds = [times.seconds(models[0].n, n_tokens) for n_tokens in range(1, n_most + 1)]
    one, two = (step.seconds(models[1].n, n_tokens) for n_tokens in (1, 2))
    return PairCosts(Start(seconds, step.drafting(models[1].n, 1), two - one), assumed)


class _Measured(NamedTuple):
    n_bytes: int
    slowness: float
    slope: float


def machine_for(gpus: tuple[Gpu, ...], n_host_free: int | None, shape: ModelShape) -> Machine:
    """This machine, with the speeds of its processor for a target of that shape."""
    slope = kernels.slope(shape.matrix_type)
    return Machine(gpus, n_host_free, host_slope=HOST_SLOPE if slope is None else slope)


def with_measured_speeds(known: Machine, n_bytes: int) -> Machine:
    """The machine with speeds from earlier runs, for models of about `n_bytes`.

    The largest model of each place counts, because small ones fit into the processor's caches.
    """
    found: dict[str, _Measured] = {}
    for place, each in _all_measured():
        if place not in found or found[place].n_bytes < each.n_bytes:
            found[place] = each
    gpus = list(known.gpus)
    for i, device in zip(range(known.n_remote, len(gpus)), offload_devices(), strict=False):
        of_gpu = found.get(device.name)
        if of_gpu and of_gpu.n_bytes >= _SIMILAR * n_bytes and gpus[i].bandwidth is None:
            gpus[i] = replace(gpus[i], slowness=of_gpu.slowness, slope=of_gpu.slope)
    known = replace(known, gpus=tuple(gpus))
    if known.host_bandwidth or (host := found.get(_CPU)) is None:
        return known
    return replace(known, host_bandwidth=HOST_BANDWIDTH / host.slowness, host_slope=host.slope)


def _all_measured() -> Iterator[tuple[str, _Measured]]:
    here = kernels.build_key()
    for facts, rows, assumed in table.records():
        host, gpu = assumed.get("host", 0.0), assumed.get("gpu", 0.0)
        ones = [row for row in rows if row.n_tokens == 1]
        if bool(host) == bool(gpu) or not ones or not here.items() <= facts.items():
            continue
        fastest = min(ones, key=lambda row: rows[row])
        one = rows[fastest]
        few = table.curve(rows, [fastest.types], fastest.attention, fastest.depth)
        slopes = [(few[n] / one - 1) / (n - 1) for n in few if 1 < n <= _FEW]
        usual = GPU_SLOPE if gpu else HOST_SLOPE
        slope = max(statistics.median(slopes), 0.0) if slopes else usual
        for place in facts["devices"] if gpu else [_CPU]:
            yield place, _Measured(facts["n_bytes"], one / (host + gpu), slope)
