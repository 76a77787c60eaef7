"""Makes the weights of a stand-in, so that its text follows the next-token table: see the guide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ggufspec.models.gguf_file import Data, Tensor, layer_of
from ggufspec.models.header import Header
from ggufspec.models.quantization import ARCHITECTURES
from ggufspec.standin.blocks import Signs, encode, floats, random_pool, repeated
from ggufspec.standin.next_token_table import codes, successors

_LARGEST_LOGIT = 40.0  # the others are around 0, with a standard deviation of 40 / sqrt(width)
_CARRIED = 16.0  # size of the successor's code relative to the token's own code, in tied models
_GATE = 8.0  # large enough that an activation function leaves it almost unchanged
_POOL_BYTES = 4 << 20
_CHUNK_VALUES = 2 << 20  # number of values made at once
_STEP = 1_000_003  # blocks; a prime, so that tensors begin at different places of a pool


class Weights:
    def __init__(self, source: Header, agreement: float) -> None:
        self._of = source
        self._n_embd, self._n_vocab = source.tensor("token_embd.weight").shape
        self._half = self._n_embd // 2  # the width of each of the two codes
        self._is_gated = ARCHITECTURES[source.architecture].is_gated
        self._successors = successors(self._n_vocab, agreement)
        self._pools: dict[tuple[str, bool], NDArray[np.uint8]] = {}
        self._n_random = 0
        self._last = f"blk.{source.n_layers - 1}."

    def data(self) -> Iterator[Iterable[Data]]:
        """The data of each tensor in order, in chunks of a few megabytes."""
        return map(self._tensor, self._of.tensors)

    def _tensor(self, tensor: Tensor) -> Iterable[Data]:
        name = tensor.name
        if name == "token_embd.weight":
            return self._rows(tensor, self._embedding)
        if name == "output.weight":
            return self._rows(tensor, lambda rows: codes(rows, self._n_embd))
        is_last_network = name.startswith(f"{self._last}ffn_") and "_norm" not in name
        if self._of.is_tied and is_last_network:
            return self._carried(tensor)
        if name == "output_norm.weight":
            return [self._output_norm()]
        if name == f"{self._last}post_ffw_norm.weight" and self._of.is_tied:
            # If the network's output is normed (Gemma), the stream is larger by sqrt(width). Half
            # of the output is 0, so the norm makes the other half sqrt(2).
            return _constant(tensor, _CARRIED * math.sqrt(self._n_embd / 2))
        if len(tensor.shape) == 1 and name.endswith(".weight"):
            return _constant(tensor, 1.0)
        if name.endswith(".bias") or name == "position_embd.weight":
            return _constant(tensor, 0.0)
        if name.endswith("ffn_gate_inp.weight"):
            n_experts, layer = tensor.n_rows, layer_of(name) or 0
            return [floats(tensor.type, router(n_experts, self._n_embd, layer)).tobytes()]
        return self._random(tensor, is_zero="attn_output" in name or "ffn_down" in name)

    def _embedding(self, rows: NDArray[np.int64]) -> Signs:
        after = self._successors[rows]
        if not self._of.is_tied:
            return codes(after, self._n_embd)
        own = codes(rows, self._n_embd - self._half)
        return np.concatenate([codes(after, self._half), own], axis=1)

    def _output_norm(self) -> bytes:
        weights = np.full(self._n_embd, _LARGEST_LOGIT / self._n_embd)
        if self._of.is_tied:
            # The residual stream is +-1 in the first half and about +-16 in the second, and is
            # divided by its root mean square.
            mean_square = math.sqrt((1 + _CARRIED**2 + 1) / 2)
            weights[: self._half] = 0
            weights[self._half :] = _LARGEST_LOGIT / self._half * mean_square / _CARRIED
        return weights.astype("<f4").tobytes()

    def _carried(self, tensor: Tensor) -> Iterable[Data]:
        """A tensor of the last feed-forward network of a tied model, which moves columns by `half`.

        With a gate, `up` gives x, the gate 8, and `down` scales 8 * x by 2. Without a gate, the
        activation turns `up`'s 8 * x into 8 or 0, `down` scales it by 4, and its bias subtracts 16.
        """
        half = self._half
        if tensor.name.endswith(".bias"):
            bias = np.zeros(tensor.shape[0], "<f4")
            if "ffn_down" in tensor.name:
                bias[half : 2 * half] = -_CARRIED
            return [bias.tobytes()]

        def picked(rows: NDArray[np.int64]) -> Signs:
            signs = np.zeros((len(rows), tensor.shape[0]), np.int8)
            at = np.arange(len(rows))
            if "ffn_gate" in tensor.name:
                signs[:, 0] = 1
            elif "ffn_up" in tensor.name:
                signs[at, rows % half] = 1
            else:
                moved = (rows >= half) & (rows < 2 * half)
                signs[at[moved], rows[moved] - half] = 1
            return signs

        if "ffn_down" in tensor.name:
            scale = (1 if self._is_gated else 2) * _CARRIED / _GATE
        else:
            scale = 1.0 if self._is_gated and "ffn_up" in tensor.name else _GATE
        return self._rows(tensor, picked, scale)

    def _rows(
        self, tensor: Tensor, signs: Callable[[NDArray[np.int64]], Signs], scale: float = 1.0
    ) -> Iterator[memoryview]:
        n_step = max(1, _CHUNK_VALUES // tensor.shape[0])
        for start in range(0, tensor.n_rows, n_step):
            rows = np.arange(start, min(start + n_step, tensor.n_rows))
            yield encode(tensor.type, signs(rows), scale).data.cast("B")

    def _random(self, tensor: Tensor, *, is_zero: bool) -> Iterator[memoryview]:
        key = (tensor.type, is_zero)
        if key not in self._pools:
            seed = len(self._pools)
            self._pools[key] = random_pool(tensor.type, _POOL_BYTES, seed, is_zero=is_zero)
        self._n_random += 1
        n_before = self._n_random * _STEP
        return repeated(tensor.type, self._pools[key], n_before, tensor.n_bytes)


def _constant(tensor: Tensor, value: float) -> Iterator[bytes]:
    kind = {"F32": "<f4", "F16": "<f2"}[tensor.type]
    row = np.full(tensor.shape[0], value, kind).tobytes()
    return (row for _ in range(tensor.n_rows))


# Popularities are lognormal. Of the distributions and strengths tried, this one is nearest to real
# mixtures, as modelled by `placement.speeds.n_union`: within 7 % for 1 to 16 tokens, with 16 to 512
# experts of which 2 to 10 are used.
_STRENGTH = 1.05  # in standard deviations of the random numbers that a token adds
_SPREAD = 0.5


def router(n_experts: int, n_embd: int, layer: int) -> NDArray[np.float32]:
    """The router's matrix of a layer, (n_experts, n_embd), for inputs that are codes of tokens.

    The first column of every code is 1, so the matrix's first column holds the experts'
    popularities. The other columns are random, so that each token adds different normal numbers.
    """
    random = np.random.default_rng(layer)
    quantiles = [NormalDist().inv_cdf((i + 0.5) / n_experts) for i in range(n_experts)]
    rows = random.standard_normal((n_experts, n_embd), np.float32)
    rows /= np.float32(math.sqrt(n_embd))
    rows[:, 0] = random.permutation(_STRENGTH * np.exp(_SPREAD * np.array(quantiles)))
    return rows
