"""Predicts the seconds of a pass, and so tokens per second, from bytes and bandwidths."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ggufspec.common.toml import read_toml
from ggufspec.models.shape import ModelShape

# The share of a GPU's nominal bandwidth that small batches of quantized weights get: 8 B Q3_K_L on
# a 4090 (1,008 GB/s) wrote 87 tokens/s; newer builds do better.
GPU_EFFICIENCY = 0.4
GPU_BANDWIDTH = 400e9  # bytes/s, nominal, of a GPU that is not in speeds.toml
HOST_BANDWIDTH = 40e9  # bytes/s that a CPU gets from its memory: two channels of DDR5
GPU_SLOPE = 0.09  # what each further token of a batch adds, as a share of a pass over one token
HOST_SLOPE = 0.4
_PACKED = 0.7  # share of its bandwidth that a CPU gets where weights must be unpacked first
_PACKED_BITS = 7  # weights of fewer bits are unpacked
_LAYER_SECONDS = 40e-6  # of a layer on a GPU, however small: kernel launches
N_DRAFT_MOST = 16
# Types that llama.cpp's CPU kernels compute for several tokens at once, as measured: see the guide
# of models/ (IQ4_NL: by its source).
BATCHED_TYPES = ("Q4_0", "Q5_0", "IQ4_NL", "F16", "BF16")


class Bandwidths(NamedTuple):
    """Effective bytes/s of small batches, and what a further token of a batch adds to a pass.

    host: for weights that need no unpacking.
    """

    gpu: float = GPU_BANDWIDTH * GPU_EFFICIENCY
    host: float = HOST_BANDWIDTH
    gpu_slope: float = GPU_SLOPE
    host_slope: float = HOST_SLOPE


@cache
def known_bandwidth(description: str) -> float | None:
    """Nominal bytes/s of a GPU by its name; None if it is not in speeds.toml."""
    known: dict[str, int] = read_toml(Path(__file__).with_suffix(".toml"))["gpus"]
    found = [name for name in known if name in description]
    return known[max(found, key=len)] * 1e9 if found else None


def type_note(matrix_type: str) -> str:
    """A line on what the type of a target's matrices means for speculation on a CPU."""
    if matrix_type in BATCHED_TYPES:
        effect = "4 tokens in a pass cost little more than one, so speculation can pay"
    else:
        effect = "each token adds to a pass; a Q4_0 file gains more by speculation"
    return f"mostly {matrix_type}: on a CPU, {effect}"


def host_bandwidth(n_bytes: int, n_bits: float, seconds: float) -> float:
    """Effective bytes/s, from a pass over one token that read `n_bytes` of weights."""
    return n_bytes / seconds / _unpacking(n_bits)


class PassTimes:
    """Predicted seconds of passes of a model for every number of GPU layers."""

    def __init__(self, shape: ModelShape, bandwidths: Bandwidths) -> None:
        self._bandwidths = bandwidths
        self._host = bandwidths.host * _unpacking(shape.n_bits)
        n_active = sum(at.n_active_bytes for at in shape.layers)
        self._share = n_active / max(sum(at.n_bytes for at in shape.layers), 1) or 1.0
        units = (shape.n_output_bytes, *(at.n_active_bytes for at in reversed(shape.layers)))
        self._sums = list(accumulate(units, initial=0))
        self._n_computed = list(accumulate(map(bool, units), initial=0))

    def seconds(self, n_gpu_layers: int, n_tokens: int = 1) -> float:
        """The predicted seconds of a pass over `n_tokens` tokens."""
        at = self._bandwidths
        on_gpu = self._sums[n_gpu_layers]
        gpu = on_gpu / at.gpu + self._n_computed[n_gpu_layers] * _LAYER_SECONDS
        host = (self._sums[-1] - on_gpu) / self._host
        return gpu * self._times(n_tokens, at.gpu_slope) + host * self._times(
            n_tokens, at.host_slope
        )

    def _times(self, n_tokens: int, slope: float) -> float:
        """The factor over a single token: more to compute, and more experts to read."""
        n_experts = (1 - (1 - self._share) ** n_tokens) / self._share
        return max(1 + slope * (n_tokens - 1), n_experts)


def _unpacking(n_bits: float) -> float:
    return _PACKED if n_bits < _PACKED_BITS else 1.0


class SpeedPrediction(NamedTuple):
    """The fastest draft length, or the given one, with its predicted speed."""

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
    """Tokens per second, with the acceptance rate of a token if those before it were accepted.

    n_draft: None for the fastest length; 0 is plain decoding.
    """
    step = draft.seconds(n_gpu_layers_draft) if draft else 0.0
    lengths = range(N_DRAFT_MOST + 1) if n_draft is None else [n_draft]
    found = []
    for n in lengths if draft else [0]:
        n_tokens = sum(acceptance**i for i in range(n + 1))
        seconds = target.seconds(n_gpu_layers, n + 1) + n * step
        found.append(SpeedPrediction(n, n_tokens / seconds))
    return max(found, key=lambda each: each.tokens_per_second)
