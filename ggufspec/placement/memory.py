"""What a model takes of memory, and where, by how many of its layers are on GPUs. Pure.

As llama.cpp places them (src/llama-model.cpp): with n_gpu_layers it takes that many from the end,
the output counting as one more layer; the caches of a layer lie beside its weights; the token
embedding stays with the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ggufspec.models.shape import Layer, ModelShape

# Bytes of a number in a cache: blocks of 32 with their scale.
VALUE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
}
_CELLS = 256  # a cache is a multiple of so many tokens
# Numbers a token of a batch that a graph holds at once: reckoned from the buffers that llama.cpp
# reports for dense models of 7 to 70 B with flash attention, within 1 %.
_N_FF, _N_EMBD = 3, 4
_N_EMBD_UNFUSED = 5  # without flash attention, besides keys, values and products of all with all


@dataclass(frozen=True)
class Caches:
    """What contexts are made for: `n_batch` tokens are computed at once."""

    n_ctx: int  # of each slot
    n_batch: int
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True
    n_slots: int = 1  # texts at the same time

    @property
    def n_cells(self) -> int:
        """Tokens that there is room for."""
        return -(-self.n_ctx // _CELLS) * _CELLS * self.n_slots


class Taken(NamedTuple):
    """Bytes of a model: on the GPUs, and with the processor."""

    gpu: int
    host: int


class Sizes:
    """Bytes of a model for every number of layers on GPUs, reckoned once."""

    def __init__(self, shape: ModelShape, caches: Caches) -> None:
        self.shape = shape
        self.n_units = shape.n_layers + 1  # the output is one more
        self.compute = compute_bytes(shape, caches)
        # Bytes of unit n from the end, with its caches: llama.cpp offloads the last ones first.
        self.units = (
            shape.n_output_bytes,
            *(at.n_bytes + _cached(at, caches) for at in reversed(shape.layers)),
        )
        self._sums = [0, *accumulate(self.units)]

    def taken(self, n_gpu_layers: int) -> Taken:
        """Where everything lies with so many layers on one GPU."""
        on_gpu = self._sums[n_gpu_layers]
        buffers = self.compute if n_gpu_layers else 0
        host = self.shape.n_input_bytes + self._sums[-1] - on_gpu + self.compute
        return Taken(on_gpu + buffers, host)

    def split(self, n_gpu_layers: int, rooms: Sequence[int], n_remote: int = 0) -> list[int] | None:
        """How many of so many layers each GPU takes, filled in order; None: they do not fit.

        The first GPU takes the first layers that are offloaded, the last one the output. Each that
        takes any needs room for buffers too. n_remote: so many GPUs at the front are of other
        machines, and share, by their room, what those here leave.
        """
        if n_remote:
            return self._split_with_remote(n_gpu_layers, rooms, n_remote)
        counts = [0] * len(rooms)
        left = n_gpu_layers
        for i, room in enumerate(rooms):
            room -= self.compute
            while left and room >= self.units[left - 1]:
                room -= self.units[left - 1]
                counts[i] += 1
                left -= 1
        return counts if not left else None

    def _split_with_remote(
        self, n_gpu_layers: int, rooms: Sequence[int], n_remote: int
    ) -> list[int] | None:
        """By shares: what is free elsewhere is often the whole memory of a machine."""
        counts = [0] * len(rooms)
        rooms = [max(room - self.compute, 0) for room in rooms]
        n = 0  # units that have a place, from the end
        for i in reversed(range(len(rooms))):
            left = self._sums[n_gpu_layers] - self._sums[n]
            is_here = i >= n_remote
            share = left if is_here else left * rooms[i] / max(sum(rooms[: i + 1]), 1)
            taken = 0
            while n < n_gpu_layers and taken < share and taken + self.units[n] <= rooms[i]:
                taken += self.units[n]
                counts[i] += 1
                n += 1
        return counts if n == n_gpu_layers else None

    def n_fitting(self, rooms: Sequence[int], n_remote: int = 0) -> int:
        """The most layers that GPUs with so many free bytes can take together."""
        low, high = 0, self.n_units
        while low < high:
            middle = (low + high + 1) // 2
            if self.split(middle, rooms, n_remote) is None:
                high = middle - 1
            else:
                low = middle
        return low


def compute_bytes(shape: ModelShape, caches: Caches) -> int:
    """Of the buffers of one graph, on each device that computes a part of it."""
    n_batch, n_ctx = min(caches.n_batch, caches.n_ctx), caches.n_cells
    if caches.flash_attention:
        n_numbers = _N_FF * shape.n_ff + _N_EMBD * shape.n_embd
        return n_batch * (4 * n_numbers + 2 * n_ctx)
    n_kv = max(layer.n_kv_values for layer in shape.layers)
    n_numbers = shape.n_heads * n_ctx + _N_EMBD_UNFUSED * shape.n_embd + n_kv
    return n_batch * (4 * max(n_numbers, _N_FF * shape.n_ff + _N_EMBD * shape.n_embd) + 4 * n_ctx)


def cache_bytes(shape: ModelShape, caches: Caches) -> int:
    """Of the K and V caches of all layers, with the states of recurrent ones."""
    return sum(_cached(layer, caches) for layer in shape.layers)


def _cached(layer: Layer, caches: Caches) -> int:
    n_bytes = (VALUE_BYTES[caches.type_k] + VALUE_BYTES[caches.type_v]) / 2
    n_values = caches.n_cells * layer.n_kv_values
    return round(n_values * n_bytes) + caches.n_slots * layer.n_state_bytes
