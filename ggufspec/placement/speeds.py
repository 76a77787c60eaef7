"""Seconds that a pass takes, predicted from bytes and bandwidths. Pure; measures nothing.

Writing one token at a time is bound by memory: a pass takes what reading its weights takes. A
batch of a few tokens reads them once and computes more, so each further token adds a share.
"""

from __future__ import annotations

from typing import NamedTuple

from ggufspec.models.shape import ModelShape

# Of the bandwidth on the box of a GPU, what small batches of quantized weights get: 8 B Q3_K_L on
# a 4090 (1,008 GB/s) wrote 87 tokens/s; newer builds do better.
GPU_EFFICIENCY = 0.4
GPU_BANDWIDTH = 400e9  # bytes/s of a GPU that nobody knows, as on its box
HOST_BANDWIDTH = 40e9  # bytes/s that a processor gets from its memory: two channels of DDR5
GPU_SLOPE = 0.09  # of a pass over one token: what each further token of a batch adds
HOST_SLOPE = 0.4
_PACKED = 0.7  # of its bandwidth, what a processor gets where weights have to be unpacked first
_PACKED_BITS = 7  # those of fewer bits
_LAYER_SECONDS = 40e-6  # a layer on a GPU, however small: starting its kernels
N_DRAFT_MOST = 16

# Bytes/s as their makers tell them, by what drivers call them; the longest that fits counts.
_KNOWN = {
    "RTX 5090": 1792e9,
    "RTX 5080": 960e9,
    "RTX 5070 Ti": 896e9,
    "RTX 5070": 672e9,
    "RTX 5060 Ti": 448e9,
    "RTX 4090": 1008e9,
    "RTX 4080 SUPER": 736e9,
    "RTX 4080": 717e9,
    "RTX 4070 Ti SUPER": 672e9,
    "RTX 4070 Ti": 504e9,
    "RTX 4070": 504e9,
    "RTX 4060 Ti": 288e9,
    "RTX 4060": 272e9,
    "RTX 3090 Ti": 1008e9,
    "RTX 3090": 936e9,
    "RTX 3080 Ti": 912e9,
    "RTX 3080": 760e9,
    "RTX 3070": 448e9,
    "RTX 3060": 360e9,
    "RTX A6000": 768e9,
    "L40S": 864e9,
    "A100": 1555e9,
    "H100": 3350e9,
    "H200": 4800e9,
    "RX 7900 XTX": 960e9,
    "RX 7900 XT": 800e9,
    "RX 6850M XT": 432e9,
    "RX 6800": 512e9,
    "Tesla T4": 320e9,
    "M1 Max": 400e9,
    "M1 Pro": 200e9,
    "M1 Ultra": 800e9,
    "M2 Max": 400e9,
    "M2 Pro": 200e9,
    "M2 Ultra": 800e9,
    "M3 Max": 400e9,
    "M3 Ultra": 819e9,
    "M4 Pro": 273e9,
    "M4 Max": 546e9,
}


class Bandwidths(NamedTuple):
    """Bytes/s that small batches really get, and what a further token of a batch adds to a pass.

    host: of weights that need no unpacking.
    """

    gpu: float = GPU_BANDWIDTH * GPU_EFFICIENCY
    host: float = HOST_BANDWIDTH
    gpu_slope: float = GPU_SLOPE
    host_slope: float = HOST_SLOPE


def known_bandwidth(description: str) -> float | None:
    """Bytes/s of a GPU by its name, as its maker tells them; None if it is not known here."""
    found = [name for name in _KNOWN if name in description]
    return _KNOWN[max(found, key=len)] if found else None


def host_bandwidth(n_bytes: int, n_bits: float, seconds: float) -> float:
    """What a pass over one token tells of it: `n_bytes` of weights were read in so many seconds."""
    return n_bytes / seconds / _unpacking(n_bits)


class Passes:
    """Seconds of passes of a model for every number of its layers on GPUs."""

    def __init__(self, shape: ModelShape, bandwidths: Bandwidths) -> None:
        self._bandwidths = bandwidths
        self._host = bandwidths.host * _unpacking(shape.n_bits)
        n_active = sum(at.n_active_bytes for at in shape.layers)
        self._share = n_active / max(sum(at.n_bytes for at in shape.layers), 1) or 1.0
        units = (shape.n_output_bytes, *(at.n_active_bytes for at in reversed(shape.layers)))
        self._sums = [0]
        for n_bytes in units:
            self._sums.append(self._sums[-1] + n_bytes)

    def seconds(self, n_gpu_layers: int, n_tokens: int = 1) -> float:
        """Of a pass over so many tokens."""
        at = self._bandwidths
        on_gpu = self._sums[n_gpu_layers]
        gpu = on_gpu / at.gpu + n_gpu_layers * _LAYER_SECONDS
        host = (self._sums[-1] - on_gpu) / self._host
        return gpu * self._times(n_tokens, at.gpu_slope) + host * self._times(
            n_tokens, at.host_slope
        )

    def _times(self, n_tokens: int, slope: float) -> float:
        """A batch beside one token: more to compute, and more experts of a mixture to read."""
        n_experts = (1 - (1 - self._share) ** n_tokens) / self._share
        return max(1 + slope * (n_tokens - 1), n_experts)


def _unpacking(n_bits: float) -> float:
    return _PACKED if n_bits < _PACKED_BITS else 1.0


class Round(NamedTuple):
    """The draft length that is predicted to bring the most, or that was asked for."""

    n_draft: int
    tokens_per_second: float


def best_round(
    target: Passes,
    draft: Passes | None,
    n_gpu_layers: int,
    n_gpu_layers_draft: int,
    acceptance: float,
    n_draft: int | None = None,
) -> Round:
    """Tokens/s, where each drafted token stands with that chance if those before it do.

    n_draft: None for the best; 0 is plain decoding.
    """
    step = draft.seconds(n_gpu_layers_draft) if draft else 0.0
    lengths = range(N_DRAFT_MOST + 1) if n_draft is None else [n_draft]
    rounds = []
    for n in lengths if draft else [0]:
        n_tokens = sum(acceptance**i for i in range(n + 1))
        seconds = target.seconds(n_gpu_layers, n + 1) + n * step
        rounds.append(Round(n, n_tokens / seconds))
    return max(rounds, key=lambda each: each.tokens_per_second)
