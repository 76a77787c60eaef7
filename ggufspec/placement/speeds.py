"""Predicts seconds per pass and tokens per second from bytes and bandwidths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ggufspec.common.facts import listed
from ggufspec.common.reading import read_toml
from ggufspec.models.shape import ModelShape

# Share of a GPU's nominal bandwidth that small batches of quantized weights reach, and least
# seconds per layer (kernel launches). Fitted to: 8 B Q3_K_L with 87 tokens/s on a 4090 (1,008 GB/s)
# and 212 on an H200 (4,800 GB/s), gpt-oss-20b with 324 on the H200.
GPU_EFFICIENCY = 0.47
LAYER_SECONDS = 75e-6
GPU_BANDWIDTH = 400e9  # bytes/s, nominal, of a GPU that is not in speeds.toml
HOST_BANDWIDTH = 40e9  # bytes/s that a CPU gets from its memory: two channels of DDR5
GPU_SLOPE = 0.09  # cost of each further token of a batch, in passes over one token
HOST_SLOPE = 0.4
_PACKED = 0.7  # share of its bandwidth that a CPU reaches if weights must be unpacked first
_PACKED_BITS = 7  # weights of fewer bits are unpacked
TRANSFER_BANDWIDTH = 12e9  # bytes/s between CPU and GPU: half of PCIe 4.0 x16 [judgement]
# From this number of tokens on, llama.cpp copies the weights of layers on the CPU to a GPU and
# computes them there (op_offload, GGML_OP_OFFLOAD_MIN_BATCH).
_N_COPIED = 32
_N_ANEW = 8  # MMVQ_MAX_BATCH_SIZE
_UNION_POWER = 0.785
_NOTED = (2, 4, 8)  # numbers of tokens in `experts_note`
SPLIT_SECONDS = 60e-6  # per layer that GPU and CPU compute together: two transfers
_CACHE_VALUE_BYTES = 2
N_DRAFT_MOST = 16
# Types for which llama.cpp's CPU kernels compute several tokens at once: measured, see the guide of
# models/ (IQ4_NL: according to its source).
_BATCHED_TYPES = ("Q4_0", "Q5_0", "IQ4_NL", "F16", "BF16")


class Bandwidths(NamedTuple):
    """Effective bytes/s of small batches, and slopes: cost of each further token of a batch."""

    gpu: float = GPU_BANDWIDTH * GPU_EFFICIENCY
    host: float = HOST_BANDWIDTH  # for weights that need no unpacking
    gpu_slope: float = GPU_SLOPE
    host_slope: float = HOST_SLOPE
    gpu_layer: float = LAYER_SECONDS  # additional seconds for each layer on a GPU
    transfer: float = TRANSFER_BANDWIDTH  # between CPU and GPU; 0 without a GPU


@cache
def known_bandwidth(description: str) -> float | None:
    """Nominal bytes/s of a GPU, looked up by its name; None if it is not in speeds.toml."""
    known: dict[str, int] = read_toml(Path(__file__).with_suffix(".toml"))["gpus"]
    found = [name for name in known if name in description]
    return known[max(found, key=len)] * 1e9 if found else None


@dataclass(frozen=True)
class Gpu:
    """A GPU or another device that computes layers."""

    name: str
    n_free: int
    bandwidth: float | None = None  # nominal bytes/s; None: looked up by `name`
    is_remote: bool = False  # it belongs to an RPC server, and takes layers of the target only
    slowness: float = 1.0  # measured seconds, divided by predicted ones; 1: not measured
    slope: float = GPU_SLOPE  # cost of each further token of a batch, in passes over one token
    is_shared: bool = False  # it uses the machine's memory

    @property
    def nominal(self) -> float:
        """Nominal bytes/s, guessed if unknown."""
        return self.bandwidth or known_bandwidth(self.name) or GPU_BANDWIDTH

    @property
    def is_measured(self) -> bool:
        return self.slowness != 1

    @property
    def effective(self) -> float:
        """Bytes/s reached in small batches."""
        return self.nominal * GPU_EFFICIENCY / self.slowness


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...]
    n_host_free: int | None
    host_bandwidth: float | None = None  # effective bytes/s of passes on the CPU, if known
    host_slope: float = HOST_SLOPE  # see Gpu.slope

    @property
    def n_remote(self) -> int:
        """Number of GPUs that belong to RPC servers; they come first in `gpus`."""
        return sum(gpu.is_remote for gpu in self.gpus)

    @property
    def bandwidths(self) -> Bandwidths:
        """The speeds for predictions; several GPUs count as one GPU with their mean speed."""
        host = self.host_bandwidth or HOST_BANDWIDTH
        if not self.gpus:
            return Bandwidths(host=host, host_slope=self.host_slope, transfer=0.0)
        return Bandwidths(
            fmean(gpu.effective for gpu in self.gpus),
            host,
            fmean(gpu.slope for gpu in self.gpus),
            self.host_slope,
            LAYER_SECONDS * fmean(gpu.slowness for gpu in self.gpus),
        )


def with_less_memory(machine: Machine, n_bytes: int) -> Machine:
    """The machine without the memory of something that is on its first GPU, or else on the host."""
    gpus, n_host = list(machine.gpus), machine.n_host_free
    local = next((i for i, gpu in enumerate(gpus) if not gpu.is_remote), None)
    if local is not None:
        gpus[local] = replace(gpus[local], n_free=gpus[local].n_free - n_bytes)
    elif n_host is not None:
        n_host -= n_bytes
    return replace(machine, gpus=tuple(gpus), n_host_free=n_host)


def type_note(matrix_type: str, is_ours: bool) -> str:
    """A line that says what the type of a target's matrices means for speculation on a CPU.

    `is_ours`: ggufspec has kernels for the type.
    """
    if is_ours or matrix_type in _BATCHED_TYPES:
        own = ", with ggufspec's kernels," if is_ours else ""
        effect = f"4 tokens in a pass{own} cost little more than one, so speculation can pay"
    else:
        effect = "each token adds to a pass; a Q4_0 file gains more by speculation"
    return f"mostly {matrix_type}: on a CPU, {effect}"


def experts_note(n_experts: int, n_used: int) -> str:
    """A line that says what a mixture of experts means for speculation."""
    factors = (n_union(n, n_experts, n_used) / n_used for n in _NOTED)
    return (
        f"{n_used} of {n_experts} for each token: passes over {listed(_NOTED)} tokens read "
        f"{listed(f'{factor:.1f}' for factor in factors)} times the experts of one, so that more "
        "drafted tokens must be accepted than with a dense model"
    )


class Shares(NamedTuple):
    """Seconds of a pass over one token, spent in layers on the CPU and in layers on GPUs."""

    host: float
    gpu: float


class _Weights(NamedTuple):
    dense: float
    experts: float  # only the experts that the token uses

    def times(self, factors: _Weights) -> float:
        return self.dense * factors.dense + self.experts * factors.experts


_ONCE = _Weights(1.0, 1.0)


class PassTimes:
    """Predicted seconds of passes of a model for every number of GPU layers."""

    def __init__(
        self, shape: ModelShape, bandwidths: Bandwidths, n_cpu_ffn: int = 0, n_depth: int = 0
    ) -> None:
        """`n_cpu_ffn`: see ModelMemory. `n_depth`: tokens in the cache, which each pass reads."""
        self._bandwidths = bandwidths
        self._n_step_tokens, self._n_per_step = shape.n_step_tokens, shape.n_per_step
        is_packed = 8 * shape.n_bytes < _PACKED_BITS * shape.n_params
        self._host = bandwidths.host * (_PACKED if is_packed else 1.0)
        self._n_experts, self._n_used = shape.n_experts, shape.n_experts_used
        share = self._n_used / self._n_experts if self._n_experts else 1.0
        units, n_split = [_Weights(shape.n_output_bytes, 0.0)], [0]  # on GPUs, the output first
        self._all = units[0]
        for i, layer in reversed([*enumerate(shape.layers)]):
            experts = min(layer.n_expert_bytes * share, layer.n_active_bytes)
            cached = _CACHE_VALUE_BYTES * layer.n_kv_values * n_depth
            unit = _Weights(layer.n_active_bytes - experts + cached, experts)
            self._all = _Weights(self._all.dense + unit.dense, self._all.experts + unit.experts)
            if is_split := i < n_cpu_ffn and layer.n_ffn_bytes > 0:
                kept = min(layer.n_ffn_bytes, layer.n_expert_bytes)
                dense = unit.dense - (layer.n_ffn_bytes - kept)
                unit = _Weights(dense, unit.experts - kept * share)
            units.append(unit)
            n_split.append(is_split)
        sums = (accumulate(of, initial=0.0) for of in zip(*units, strict=True))
        self._on_gpu = [_Weights(*of) for of in zip(*sums, strict=True)]
        self._n_computed = list(accumulate(map(any, units), initial=0))
        self._n_split = list(accumulate(n_split, initial=0))
        self._n_embd, self._n_vocab = shape.n_embd, shape.n_vocab

    def drafting(self, n_gpu_layers: int, n_tokens: int) -> float:
        """Seconds of the draft passes for `n_tokens` drafted tokens."""
        n_steps = math.ceil(n_tokens / self._n_per_step)
        return n_steps * self.seconds(n_gpu_layers, self._n_step_tokens) if n_steps else 0.0

    def shares(self, n_gpu_layers: int) -> Shares:
        """Seconds of a pass over one token, without transfers."""
        return self._shares(n_gpu_layers, _ONCE, _ONCE)

    def _shares(self, n_gpu_layers: int, of_host: _Weights, of_gpu: _Weights) -> Shares:
        at = self._bandwidths
        gpu = self._on_gpu[n_gpu_layers].times(of_gpu) / at.gpu
        gpu += self._n_computed[n_gpu_layers] * at.gpu_layer * of_gpu.dense
        return Shares(self._on_host(n_gpu_layers).times(of_host) / self._host, gpu)

    def _on_host(self, n_gpu_layers: int) -> _Weights:
        on_gpu = self._on_gpu[n_gpu_layers]
        return _Weights(self._all.dense - on_gpu.dense, self._all.experts - on_gpu.experts)

    def seconds(self, n_gpu_layers: int, n_tokens: int = 1) -> float:
        at, n_split = self._bandwidths, self._n_split[n_gpu_layers]
        of_host, of_gpu = self._of_host(n_tokens), self._of_gpu(n_tokens)
        host, gpu = self._shares(n_gpu_layers, of_host, of_gpu)
        moved = 0.0
        if n_gpu_layers and at.transfer:
            # A hidden state and the logits, and two hidden states for each split layer.
            n_values = self._n_embd * (1 + 2 * n_split) + self._n_vocab
            moved = 4 * n_tokens * n_values / at.transfer + n_split * SPLIT_SECONDS
        if n_tokens >= _N_COPIED and self.copying_pays(n_tokens):
            n_copied = self._on_host(n_gpu_layers).times(self._read(n_tokens))
            gpu += n_copied / at.gpu
            moved += n_copied / at.transfer
            host = 0.0
        return gpu + host + moved

    def copying_pays(self, n_tokens: int) -> bool:
        """Whether copying the CPU's layers to a GPU makes a pass over `n_tokens` faster."""
        at = self._bandwidths
        if not at.transfer:
            return False
        gpu = self._all.times(self._read(n_tokens)) / at.transfer
        gpu += self._all.times(self._of_gpu(n_tokens)) / at.gpu
        return gpu < self._all.times(self._of_host(n_tokens)) / self._host

    def _of_host(self, n_tokens: int) -> _Weights:
        return self._factors(n_tokens, self._bandwidths.host_slope, self._read(n_tokens))

    def _of_gpu(self, n_tokens: int) -> _Weights:
        # CUDA's kernel for a few tokens (mul_mat_vec_q_moe) reads experts again for each token. The
        # kernel for more tokens takes at least as long: gpt-oss-20b on an H200, ms for 1, 2, 4, 8,
        # 9, 16, 32 tokens: 3.1, 3.6, 5.5, 9.2, 12.4, 14.8, 18.8.
        n_anew = min(n_tokens, _N_ANEW)
        further = self._read(n_tokens).experts - self._read(n_anew).experts
        read = _Weights(1.0, n_anew + further)
        return self._factors(n_tokens, self._bandwidths.gpu_slope, read)

    def _factors(self, n_tokens: int, slope: float, read: _Weights) -> _Weights:
        """Factors on the seconds of one token: more weights are read, and each is used longer."""
        further = n_tokens - read.experts  # further tokens of experts that are read already
        return _Weights(1 + slope * (n_tokens - 1), read.experts + slope * further)

    def _read(self, n_tokens: int) -> _Weights:
        if not self._n_experts:
            return _ONCE
        return _Weights(1.0, n_union(n_tokens, self._n_experts, self._n_used) / self._n_used)


def n_union(n_tokens: int, n_experts: int, n_used: int) -> float:
    """Number of different experts of a layer that `n_tokens` successive tokens use, `n_used` each.

    Modelled as n_tokens ** _UNION_POWER independent choices. Measured: of 256 experts, 8 per token,
    8 tokens used 39 and 15 used 59 (independent choices: 57 and 97; lucebox#501).
    """
    n_independent: float = n_tokens**_UNION_POWER
    return float(n_experts * (1 - (1 - n_used / n_experts) ** n_independent))


class SpeedPrediction(NamedTuple):
    """A draft length, the fastest or the given one, with its predicted speed."""

    n_draft: int
    tokens_per_second: float


def predict_speed(
    target: PassTimes,
    draft: PassTimes | None,
    n_gpu_layers: int,
    n_gpu_layers_draft: int,
    acceptance: float,
    n_draft: int | None = None,
) -> SpeedPrediction:
    """The predicted speed with `n_draft` tokens per draft (None: the fastest length; 0: plain).

    `acceptance`: acceptance rate of a token if the tokens before it were accepted.
    """
    lengths = range(N_DRAFT_MOST + 1) if n_draft is None else [n_draft]
    found = []
    for n in lengths if draft else [0]:
        n_tokens = sum(acceptance**i for i in range(n + 1))
        seconds = target.seconds(n_gpu_layers, n + 1)
        seconds += draft.drafting(n_gpu_layers_draft, n) if draft else 0.0
        found.append(SpeedPrediction(n, n_tokens / seconds))
    return max(found, key=lambda each: each.tokens_per_second)
