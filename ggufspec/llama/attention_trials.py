"""Tries our attention in a child process: operations of ggml's CPU backend, in double precision."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ggufspec import _native
from ggufspec.llama import devices, kernels
from ggufspec.llama.devices import InitParams, Signature
from ggufspec.llama.kernel_trials import GRAPH_FUNCTIONS, computed, cpu_backend

TYPES = {"f16": 1, "bf16": 30, "q8_0": 8}  # of caches: enum ggml_type
_F32, _F16 = 0, 1
_TOLERANCE = 1e-4  # of the largest value; f16 alone rounds by more
_MEMORY = 2**26
Array = np.ndarray[Any, Any]
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_GGML: dict[str, Signature] = {
    **GRAPH_FUNCTIONS,
    "ggml_new_tensor_4d": (_POINTER, [_POINTER, _INT, *[_LONG] * 4]),
    "ggml_permute": (_POINTER, [_POINTER, _POINTER, *[_INT] * 4]),
    "ggml_flash_attn_ext": (_POINTER, [*[_POINTER] * 5, *[_FLOAT] * 3]),
    "ggml_flash_attn_ext_add_sinks": (None, [_POINTER, _POINTER]),
}


@dataclass(frozen=True)
class Case:
    """Rows of queries (stream, token, head, value), and cells (stream, cell, KV head, value).

    mask: (stream, token, cell), what is added to a score; -inf hides a cell. sinks: one per head.
    """

    queries: Array
    keys: Array
    values: Array
    mask: Array | None = None
    sinks: Array | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    bias: float = 0.0
    cap: float = 0.0

    @property
    def scale(self) -> float:
        """The factor of scores, as models have it."""
        return float(self.queries.shape[-1] ** -0.5)


def attend(case: Case, *, n_threads: int = 1, is_ours: bool = True, spoils: bool = False) -> Array:
    """What ggml's CPU backend computes: (stream, token, head, value).

    is_ours: with our kernels. spoils: with the first key damaged, to test that a trial finds it.
    """
    library = devices.ggml(_GGML)
    assert library is not None
    size = _MEMORY + 8 * sum(each.size for each in (case.queries, case.keys, case.values))
    memory = library.ggml_init(InitParams(size, None, False))
    backend = cpu_backend(library, n_threads)
    was = _native.use_attention(is_ours)
    try:
        keys = np.concatenate((-case.keys[:1], case.keys[1:])) if spoils else case.keys
        given = (
            (case.queries, _F32),
            (keys, TYPES[case.type_k]),
            (case.values, TYPES[case.type_v]),
        )
        tensors = [
            library.ggml_permute(memory, _tensor(library, memory, values, number), 0, 2, 1, 3)
            for values, number in given
        ]
        mask = None
        if case.mask is not None:
            mask = _tensor(library, memory, case.mask[:, None], _F16)
        result = library.ggml_flash_attn_ext(
            *(memory, *tensors, mask, case.scale, case.bias, case.cap)
        )
        if case.sinks is not None:
            sinks = _tensor(library, memory, case.sinks[None, None, None], _F32)
            library.ggml_flash_attn_ext_add_sinks(result, sinks)
        shape = (*case.queries.shape[:3], case.values.shape[-1])
        return computed(library, memory, backend, result, int(np.prod(shape))).reshape(shape)
    finally:
        _native.use_attention(was)
        library.ggml_backend_free(backend)
        library.ggml_free(memory)


def _tensor(library: Any, memory: Any, values: Array, number: int) -> Any:
    tensor = library.ggml_new_tensor_4d(memory, number, *values.shape[::-1])
    data = np.ascontiguousarray(values, np.float32)
    if number == _F32:
        ctypes.memmove(library.ggml_get_data(tensor), data.ctypes.data, data.nbytes)
    elif number == _F16:
        halves = data.astype(np.float16)
        ctypes.memmove(library.ggml_get_data(tensor), halves.ctypes.data, halves.nbytes)
    else:
        rows = data.size // data.shape[-1], data.shape[-1]
        at = library.ggml_get_data(tensor)
        library.ggml_quantize_chunk(number, data.ctypes.data, at, 0, *rows, None)
    return tensor


def expected(case: Case) -> Array:
    """What `attend` would return in double precision."""
    group = case.queries.shape[2] // case.keys.shape[2]
    keys, values = (
        np.repeat(_held(cells, of), group, axis=2)
        for cells, of in ((case.keys, case.type_k), (case.values, case.type_v))
    )
    scores = np.einsum("sthd,schd->shtc", case.queries.astype(float), keys) * case.scale
    if case.cap:
        scores = case.cap * np.tanh(scores / case.cap)
    n_heads = case.queries.shape[2]
    if case.mask is not None:
        mask = case.mask.astype(np.float16).astype(float)[:, None]
        scores = scores + np.where(np.isinf(mask), mask, mask * _slopes(n_heads, case.bias))
    sinks = np.full(n_heads, -np.inf) if case.sinks is None else case.sinks.astype(float)
    most = np.maximum(scores.max(-1), sinks[:, None])[..., None]
    weights = np.exp(scores - np.where(np.isinf(most), 0, most))
    total = weights.sum(-1) + np.exp(sinks[:, None] - np.where(np.isinf(most), 0, most)[..., 0])
    found = np.einsum("shtc,schd->sthd", weights, values)
    return np.asarray(found / np.where(total == 0, 1, total).swapaxes(1, 2)[..., None])


def _slopes(n_heads: int, bias: float) -> Array:
    if not bias:
        return np.ones((n_heads, 1, 1))
    n_first = 2 ** (n_heads.bit_length() - 1)
    first = 2.0 ** (-bias / n_first * np.arange(1, n_first + 1))
    others = 2.0 ** (-bias / 2 / n_first * (2 * np.arange(n_heads - n_first) + 1))
    return np.concatenate((first, others))[:, None, None]


def _held(cells: Array, of: str) -> Array:
    if of == "f16":
        return cells.astype(np.float16).astype(float)
    if of == "bf16":
        bits = cells.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return rounded.astype(np.uint32).view(np.float32).astype(float)
    blocks = cells.astype(np.float32).reshape(*cells.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    inverse = np.where(scale == 0, np.float32(0), 1 / np.where(scale == 0, 1, scale))
    codes = blocks * inverse.astype(np.float32)
    codes = np.trunc(codes + np.copysign(np.float32(0.5), codes))
    held: Array = (codes * scale.astype(np.float16).astype(float)).reshape(cells.shape)
    return held


def cases() -> Iterator[Case]:
    """Odd sizes, and all that models have: types of caches, windows, texts, ALiBi, caps, sinks."""
    draw = np.random.default_rng(5)

    def case(n_streams: int, n_tokens: int, heads: tuple[int, int], n_cells: int, d: int) -> Case:
        n_heads, n_kv_heads = heads
        shape = n_streams, n_cells, n_kv_heads, d
        keys, values = (draw.standard_normal(shape, np.float32) for _ in range(2))
        queries = draw.standard_normal((n_streams, n_tokens, n_heads, d), np.float32)
        last = np.arange(n_tokens)[:, None] + n_cells - n_tokens
        mask = np.where(np.arange(n_cells) > last, -np.inf, 0)
        return Case(queries, keys, values, np.broadcast_to(mask, (n_streams, *mask.shape)))

    for n_tokens in (1, 2, 3, 5, 8, 17):
        yield case(1, n_tokens, (6, 2), 256, 64)
    yield case(1, 120, (7, 7), 333, 96)
    plain = case(1, 4, (12, 2), 291, 128)
    yield from (replace(plain, type_k=k, type_v=v) for k in TYPES for v in TYPES)
    yield replace(plain, mask=None)
    yield replace(plain, bias=8.0, mask=case(1, 4, (1, 1), 291, 64).mask)
    distance = np.arange(291)[None, None] - np.arange(287, 291)[None, :, None]
    yield replace(plain, bias=8.0, mask=np.where(distance > 0, -np.inf, distance))
    yield replace(plain, mask=np.where((distance > 0) | (distance < -100), -np.inf, 0))
    yield replace(plain, cap=5.0, sinks=draw.standard_normal(12))
    yield replace(plain, values=plain.values[..., :48])
    hidden = np.where(draw.random((1, 4, 291)) < 0.9, -np.inf, 0)
    hidden[:, 2] = -np.inf
    yield replace(plain, mask=hidden)
    yield case(3, 2, (8, 1), 160, 256)


def try_attention(spoils: str = "") -> None:
    """Print whether our attention equals double precision. Runs in a child process.

    spoils: not empty: a key is damaged on purpose, to test that the trial finds it.
    """
    kernels.without_core_dumps()
    if kernels.unusable() is not None:
        kernels.tell(kernels.WRONG)
        return
    for n, case in enumerate(cases()):
        wanted = expected(case)
        found = attend(case, n_threads=1 + n % 2, spoils=bool(spoils))
        if not np.abs(found - wanted).max() < _TOLERANCE * np.abs(wanted).max():
            kernels.tell(kernels.WRONG)
            return
    kernels.tell(kernels.WORKS)
