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
LAYER_SECONDS = 40e-6  # of a layer on a GPU, however small: kernel launches
TRANSFER_BANDWIDTH = 12e9  # bytes/s between CPU and GPU: half of PCIe 4.0 x16, a judgement
# From so many tokens on, llama.cpp copies the weights of layers on the CPU to a GPU and computes
# there (op_offload, GGML_OP_OFFLOAD_MIN_BATCH).
_N_COPIED = 32
N_DRAFT_MOST = 16
# Types that llama.cpp's CPU kernels compute for several tokens at once, as measured: see the guide
# of models/ (IQ4_NL: by its source).
_BATCHED_TYPES = ("Q4_0", "Q5_0", "IQ4_NL", "F16", "BF16")


class Bandwidths(NamedTuple):
    """Effective bytes/s of small batches, and what a further token of a batch adds to a pass.

    host: for weights that need no unpacking. gpu_layer: seconds that each layer on a GPU takes
    besides. transfer: between CPU and GPU; 0 without a GPU.
    """

    gpu: float = GPU_BANDWIDTH * GPU_EFFICIENCY
    host: float = HOST_BANDWIDTH
    gpu_slope: float = GPU_SLOPE
    host_slope: float = HOST_SLOPE
    gpu_layer: float = LAYER_SECONDS
    transfer: float = TRANSFER_BANDWIDTH


@cache
def known_bandwidth(description: str) -> float | None:
    """Nominal bytes/s of a GPU by its name; None if it is not in speeds.toml."""
    known: dict[str, int] = read_toml(Path(__file__).with_suffix(".toml"))["gpus"]
    found = [name for name in known if name in description]
    return known[max(found, key=len)] * 1e9 if found else None


def type_note(matrix_type: str, is_ours: bool) -> str:
    """A line on what the type of a target's matrices means for speculation on a CPU.

    is_ours: ggufspec has kernels for it.
    """
    if is_ours or matrix_type in _BATCHED_TYPES:
        own = ", with ggufspec's kernels," if is_ours else ""
        effect = f"4 tokens in a pass{own} cost little more than one, so speculation can pay"
    else:
        effect = "each token adds to a pass; a Q4_0 file gains more by speculation"
    return f"mostly {matrix_type}: on a CPU, {effect}"


class Shares(NamedTuple):
    """Seconds of a pass over one token: of its layers on the CPU, and of those on GPUs."""

    host: float
    gpu: float


class PassTimes:
    """Predicted seconds of passes of a model for every number of GPU layers."""

    def __init__(self, shape: ModelShape, bandwidths: Bandwidths) -> None:
        self._bandwidths = bandwidths
        self._host = bandwidths.host * (_PACKED if shape.n_bits < _PACKED_BITS else 1.0)
        n_active = sum(at.n_active_bytes for at in shape.layers)
        self._share = n_active / max(sum(at.n_bytes for at in shape.layers), 1) or 1.0
        units = (shape.n_output_bytes, *(at.n_active_bytes for at in reversed(shape.layers)))
        self._sums = list(accumulate(units, initial=0))
        self._n_computed = list(accumulate(map(bool, units), initial=0))
        # Bytes that cross to a GPU and back for each token: a hidden state, and the logits.
        self._n_moved = 4 * (shape.n_embd + shape.n_vocab)

    def shares(self, n_gpu_layers: int) -> Shares:
        """A pass over one token, without transfers."""
        at = self._bandwidths
        on_gpu = self._sums[n_gpu_layers]
        gpu = on_gpu / at.gpu + self._n_computed[n_gpu_layers] * at.gpu_layer
        return Shares((self._sums[-1] - on_gpu) / self._host, gpu)

    def seconds(self, n_gpu_layers: int, n_tokens: int = 1) -> float:
        """The predicted seconds of a pass over `n_tokens` tokens."""
        at = self._bandwidths
        host, gpu = self.shares(n_gpu_layers)
        moved = 0.0
        if n_gpu_layers and at.transfer:
            moved = n_tokens * self._n_moved / at.transfer
        if n_tokens >= _N_COPIED and self.copying_pays(n_tokens):
            n_copied = self._sums[-1] - self._sums[n_gpu_layers]
            gpu += n_copied / at.gpu
            moved += n_copied / at.transfer
            host = 0.0
        of_gpu, of_host = (self._times(n_tokens, slope) for slope in (at.gpu_slope, at.host_slope))
        return gpu * of_gpu + host * of_host + moved

    def copying_pays(self, n_tokens: int) -> bool:
        """Whether layers on the CPU are faster on a GPU in such a pass, weights copied."""
        at = self._bandwidths
        if not at.transfer:
            return False
        gpu = 1 / at.transfer + self._times(n_tokens, at.gpu_slope) / at.gpu
        return gpu < self._times(n_tokens, at.host_slope) / self._host

    def _times(self, n_tokens: int, slope: float) -> float:
        """The factor over a single token: more to compute, and more experts to read."""
        n_experts = (1 - (1 - self._share) ** n_tokens) / self._share
        return max(1 + slope * (n_tokens - 1), n_experts)


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
