"""Computes the memory of a model on GPUs and on the host, by its number of GPU layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ggufspec.common import defaults
from ggufspec.models.gguf_file import TYPES
from ggufspec.models.head_facts import DFLASH_BATCH, EAGLE3_BATCH
from ggufspec.models.shape import ModelShape

# Bytes per number in a KV cache, by type name.
VALUE_BYTES = {
    name: TYPES[name.upper()].n_bytes / TYPES[name.upper()].n_values for name in defaults.KV_TYPES
}
# Extra size of weights that are packed for ggufspec's kernels on the host, as a share of their size
# in the file (native/matmul/types.h).
_PACKED = {"Q4_K": 0.028, "Q3_K": 0.036, "Q5_K": 0.023, "IQ4_XS": 0.015}
_CELLS = 256  # the size of a cache is a multiple of this
# Vectors of a graph for each token of a batch: with n_ff numbers, with n_embd numbers, and inputs
# on the host with n_embd numbers. Fitted to the buffers that llama.cpp reports for dense models of
# 0.1 to 70 B with flash attention, within 1 %.
_N_FF, _N_EMBD, _N_EMBD_INPUT = 3, 2, 2
# In a mixture of experts, vectors of n_embd numbers for each expert that a token uses, in addition
# to _N_EMBD: fitted to gpt-oss-20b, Qwen3-30B-A3B and GLM-4.5-Air, within 5 %.
_N_EMBD_EXPERT = 2
# In a recurrent layer, vectors of n_recurrent numbers: fitted to Qwen 3.5, 0.8 to 27 B, within 2 %.
_N_RECURRENT = 3
_N_EMBD_EAGLE3 = 6  # in an EAGLE-3 head, besides the logits of each token: fitted within 5 %
_N_EMBD_UNFUSED = 1  # further vectors on the host without flash attention
# From this number of tokens on, a GPU also computes the layers of the host. It gets a copy of their
# weights and of their KV cache, one layer after the other (offload_op in ggml-backend.cpp).
_OFFLOADED = 32
# The copies of two layers' KV caches overlap if ggml's allocator finds gaps: they take 1 to 1.5
# times a layer's cache. In addition, there are vectors of n_embd numbers.
_CACHE_COPIES, _N_EMBD_COPIES = 1.25, 4
# Several GPUs that hold all layers compute batches at the same time, each with its own inputs.
_COPIES = 3  # GGML_SCHED_MAX_COPIES - 1
# Most recurrent states kept for roll-back. A draft with more tokens than states costs a checkpoint.
# n-grams make such drafts, but most of their tokens are accepted. On one core, keeping 8 states of
# a 0.5 B hybrid made each single-token pass 2 % slower, 16 states made it 7 % slower.
_ROLLBACK_MOST = 8
# Limit of the memory for these states: this share of the weights, or this number of bytes if it is
# more. 8 states of Qwen 3.6 27B take 1.2 GB per slot.
_ROLLBACK_SHARE = 1 / 8
_ROLLBACK_BYTES = 512 * 2**20
_LEAVES = 16  # most leaves of a tree
# Of all slots: llama.cpp compares all pairs of sequences; 64 took 4 us longer than 16, 256 50 us.
_LEAVES_OF_ALL = 64


@dataclass(frozen=True)
class CacheParams:
    """The parameters of a context that determine the size of its KV cache and buffers."""

    n_ctx: int  # tokens per slot
    n_batch: int
    type_k: str = defaults.KV_TYPE
    type_v: str = defaults.KV_TYPE
    flash_attention: bool = True
    n_slots: int = 1  # concurrent texts
    n_draft_max: int = 0  # longest draft that a target verifies; 0: a draft's context
    n_rows: int = 0  # maximum rows of logits per slot in a pass; 0: n_draft_max + 1
    n_checkpoints: int = 0  # recurrent states per slot that are kept on the host

    @property
    def n_outputs(self) -> int:
        """Maximum rows of logits in a pass of all slots."""
        return self.n_slots * (self.n_rows or self.n_draft_max + 1)

    @property
    def n_cells(self) -> int:
        return -(-self.n_ctx // _CELLS) * _CELLS * self.n_slots


class MemoryUse(NamedTuple):
    gpu: int
    host: int


class Buffers(NamedTuple):
    """Bytes of the compute buffers of a context, in each of several placements."""

    alone: int  # on the host, in a machine without a GPU
    host: int  # on the host, in a machine with a GPU
    whole: int  # on each GPU, if GPUs hold all layers
    part: int  # on each GPU, if the host holds some layers
    none: int  # on each GPU, if the host holds all layers and the output
    copies: int  # in addition on each device, if several GPUs hold all layers


class ModelMemory:
    """The memory of a model for every number of GPU layers, computed once."""

    def __init__(self, shape: ModelShape, caches: CacheParams, n_cpu_ffn: int = 0) -> None:
        """`n_cpu_ffn`: number of first layers whose `n_ffn_bytes` stay on the host."""
        self.shape = shape
        self.n_units = shape.n_layers + 1  # the output counts as a layer
        self.buffers = compute_bytes(shape, caches)
        cached = cache_bytes(shape, caches)
        kept = [at.n_ffn_bytes if i < n_cpu_ffn else 0 for i, at in enumerate(shape.layers)]
        self._n_kept = sum(kept)
        output = shape.n_output_bytes - shape.n_shared_bytes
        layers = (at.n_bytes - n for at, n in zip(shape.layers[::-1], kept[::-1], strict=True))
        n_weights = (output, *layers)
        # Bytes of each layer with its cache, last layer first: llama.cpp offloads it first.
        self.units = tuple(n + of for n, of in zip(n_weights, (0, *cached[::-1]), strict=True))
        self._sums = [0, *accumulate(self.units)]
        self._weights = [0, *accumulate(n_weights)]
        # Rows of logits, and of hidden states for a head, which the host keeps until they are read.
        n_rows = max(caches.n_outputs, _n_sequences(shape, caches))
        self._rows = 4 * shape.n_row_values * min(caches.n_batch, caches.n_ctx)
        self._rows += 4 * shape.n_vocab * n_rows
        n_states = caches.n_slots * caches.n_checkpoints
        self._rows += n_states * sum(layer.n_state_bytes for layer in shape.layers)

    def counts(self, asked: int | None) -> list[int]:
        """The numbers of GPU layers to try: the given one (negative: all), or [] for None."""
        if asked is None:
            return []
        return [self.n_units if asked < 0 else min(asked, self.n_units)]

    def gpu_buffers(self, n_gpu_layers: int, n_gpus: int = 1) -> int:
        """Bytes of the buffers on each of `n_gpus` GPUs that compute a part of passes."""
        if n_gpu_layers < self.n_units or self._n_kept:
            return self.buffers.part if n_gpu_layers else self.buffers.none
        return self.buffers.whole + (self.buffers.copies if n_gpus > 1 else 0)

    def use(self, n_gpu_layers: int, has_gpu: bool = False) -> MemoryUse:
        """The memory with layers on a GPU. `has_gpu`: one computes prompts, even without layers."""
        on_gpu = self._sums[n_gpu_layers]
        n_weights = self._weights[-1] - self._weights[n_gpu_layers] + self._n_kept
        packed = round(_PACKED.get(self.shape.matrix_type, 0.0) * n_weights)
        host = self._sums[-1] - on_gpu + self._n_kept + packed + self._rows
        if n_gpu_layers or not self.shape.is_tied:  # else input and output are one matrix there
            host += self.shape.n_input_bytes
        if not n_gpu_layers and not has_gpu:
            return MemoryUse(0, host + self.buffers.alone)
        return MemoryUse(on_gpu + self.gpu_buffers(n_gpu_layers), host + self.buffers.host)

    def split(self, n_gpu_layers: int, rooms: Sequence[int], n_remote: int = 0) -> list[int] | None:
        """The number of layers on each GPU, `n_gpu_layers` in total; None: they do not fit.

        `rooms`: free bytes of each GPU. GPUs are filled in order; the last takes the output, and
        each GPU that is used needs room for buffers. `n_remote`: number of first GPUs that belong
        to RPC servers; these share layers that do not fit on local GPUs, in proportion to room.
        """
        if n_remote:
            return self._split_with_remote(n_gpu_layers, rooms, n_remote)
        counts = [0] * len(rooms)
        left = n_gpu_layers
        buffers = self.gpu_buffers(n_gpu_layers, len(rooms))
        is_part = n_gpu_layers < self.n_units or self._n_kept > 0
        if is_part and rooms and rooms[0] < buffers:
            return None  # the first GPU also computes the host's layers for prompts
        for i, room in enumerate(rooms):
            room -= buffers
            while left and room >= self.units[left - 1]:
                room -= self.units[left - 1]
                counts[i] += 1
                left -= 1
        return counts if not left else None

    def _split_with_remote(
        self, n_gpu_layers: int, rooms: Sequence[int], n_remote: int
    ) -> list[int] | None:
        """Split in proportion, since a server without a GPU reports all memory as free."""
        counts = [0] * len(rooms)
        buffers = self.gpu_buffers(n_gpu_layers)
        rooms = [max(room - buffers, 0) for room in rooms]
        n = 0  # number of placed layers, from the last one on
        for i in reversed(range(len(rooms))):
            left = self._sums[n_gpu_layers] - self._sums[n]
            is_local = i >= n_remote
            share = left if is_local else left * rooms[i] / max(sum(rooms[: i + 1]), 1)
            taken = 0
            while n < n_gpu_layers and taken < share and taken + self.units[n] <= rooms[i]:
                taken += self.units[n]
                counts[i] += 1
                n += 1
        return counts if n == n_gpu_layers else None

    def n_fitting(self, rooms: Sequence[int], n_remote: int = 0) -> int:
        """The largest number of layers that fits on GPUs with `rooms` free bytes."""
        if self.split(self.n_units, rooms, n_remote):
            return self.n_units  # buffers are smaller than with n_units - 1 layers
        counts = range(1, self.n_units)
        return bisect_left(counts, True, key=lambda n: self.split(n, rooms, n_remote) is None)


def n_rollback(shape: ModelShape, n_draft_max: int, n_slots: int) -> int:
    """Recurrent states that a context keeps per slot: so many rejected tokens can be dropped."""
    n_bytes = n_slots * sum(layer.n_state_bytes for layer in shape.layers)
    if not shape.can_roll_back or not n_bytes:
        return 0
    room = max(round(shape.n_bytes * _ROLLBACK_SHARE), _ROLLBACK_BYTES)
    return min(n_draft_max, _ROLLBACK_MOST, room // n_bytes)


def n_leaves(n_slots: int, n_draft_max: int) -> int:
    """Maximum number of leaves of each slot's trees."""
    return max(min(_LEAVES, _LEAVES_OF_ALL // n_slots, n_draft_max), 1)


def cache_bytes(shape: ModelShape, caches: CacheParams) -> tuple[int, ...]:
    """For each layer, the bytes of its KV cache and recurrent states."""
    n_bytes = (VALUE_BYTES[caches.type_k] + VALUE_BYTES[caches.type_v]) / 2
    n_states = caches.n_slots * (1 + n_rollback(shape, caches.n_draft_max, caches.n_slots))
    return tuple(
        round(caches.n_cells * layer.n_kv_values * n_bytes) + n_states * layer.n_state_bytes
        for layer in shape.layers
    )


def compute_bytes(shape: ModelShape, caches: CacheParams) -> Buffers:
    """The compute buffers of a context, sized for prompts, which need the largest ones."""
    n_state = max(layer.n_state_bytes for layer in shape.layers)
    # In models with recurrent states or attention windows, each slot reads only its own cache.
    n_batch, n_ctx = min(caches.n_batch, caches.n_ctx), caches.n_cells
    if n_state or shape.has_windows:
        n_ctx //= caches.n_slots
    if not n_state:  # llama.cpp rounds up to a multiple of the sequences
        n_sequences = _n_sequences(shape, caches)
        n_batch = -(-n_batch // n_sequences) * n_sequences
    if shape.n_logits:
        n_numbers = shape.n_logits + _N_EMBD_EAGLE3 * shape.n_embd
        n_most = EAGLE3_BATCH if shape.n_per_step == 1 else DFLASH_BATCH
        n_bytes = min(n_batch, n_most) * (4 * n_numbers + 2 * n_ctx)
        return Buffers(*(n_bytes,) * 5, copies=0)
    n_kv = max(layer.n_kv_values for layer in shape.layers)
    vector, keys = 4 * n_batch * shape.n_embd, 4 * n_batch * n_kv
    mask = n_batch * n_ctx * (2 if shape.has_windows else 1)  # windows need a second mask
    inputs = _N_EMBD_INPUT * vector
    n_used = shape.n_experts_used
    of_experts = 4 * n_batch * _N_FF * n_used * shape.n_ff_expert
    if n_used:
        of_experts = max(of_experts, (_N_EMBD_EXPERT * n_used + _N_EMBD) * vector)
    of_network = max(4 * n_batch * _N_FF * shape.n_ff, of_experts)
    if caches.flash_attention:
        mask *= 2
        of_layer = alone = of_network
        host = max(inputs, vector + keys) + mask
    else:
        mask *= 4
        scores = 4 * n_batch * shape.n_heads * n_ctx
        of_layer = max(of_network, scores + keys)
        alone = of_layer + _N_EMBD_UNFUSED * vector
        host = inputs + keys + mask
    logits = 4 * min(n_batch, caches.n_outputs) * (shape.n_vocab + shape.n_embd)
    n_numbers = _N_RECURRENT * shape.n_recurrent + shape.n_embd
    n_states = caches.n_slots * (1 + n_rollback(shape, caches.n_draft_max, caches.n_slots))
    state = 4 * n_batch * n_numbers + n_states * n_state
    layers = max(of_layer + _N_EMBD * vector + mask, state)
    whole = max(layers, logits)
    alone = max(alone + _N_EMBD * vector + inputs + mask, state, logits + vector)
    part, none = whole, 0
    if n_batch >= _OFFLOADED:
        n_cache_bytes = max(cache_bytes(shape, caches)) * _CACHE_COPIES
        attention = round(n_cache_bytes) + mask + _N_EMBD_COPIES * vector
        none = max(layers + shape.n_matrix_bytes, attention)
        part = max(none, logits)
        if caches.n_outputs >= _OFFLOADED:
            none = max(none, shape.n_output_bytes + logits)
    if caches.n_outputs < _OFFLOADED:
        host = max(host, logits + vector)  # the host may hold the output
    return Buffers(alone, host, whole, part, none, _COPIES * (inputs + mask))


def _n_sequences(shape: ModelShape, caches: CacheParams) -> int:
    """Number of llama.cpp sequences of a context: one per slot, or one per leaf of its trees."""
    has_trees = not shape.has_windows and not any(at.n_state_bytes for at in shape.layers)
    return caches.n_slots * (n_leaves(caches.n_slots, caches.n_draft_max) if has_trees else 1)
