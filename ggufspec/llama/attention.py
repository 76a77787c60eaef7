"""Measures once per pair whether attention on this CPU is faster without flash attention."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np

from ggufspec.common import defaults
from ggufspec.drafting import profile_store
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.devices import InitParams, Signature, ggml
from ggufspec.llama.model import Heads, Model
from ggufspec.llama.profile_key import pair_key

SECONDS = 0.3  # the most that measuring a pair may take
DEPTH = 512  # tokens in the cache
CLEARLY_FASTER = 0.9  # of the seconds with flash attention; repeated measurements differ by 5 %
# How often a text of 160 tokens after a prompt of 512 needs a batch of so many tokens, with three
# drafted tokens in every second round. The prompt's batches, of 64 tokens as those that flash
# attention computes in tiles, find half of DEPTH on average.
BATCHES = {1: 32, defaults.N_DRAFT_FIXED + 1: 32, 64: DEPTH // 64 // 2}

_N_ROUNDS = 9
_FEWEST_TIMES = 2  # of each kind, so that one disturbance does not decide
_N_HEADS = 8  # that are computed, or those of one KV head; all heads take equally long
_SCORE_BYTES = 2**29  # of attention scores, which only attention without flash stores
_POINTER, _INT, _FLOAT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64
_F32, _F16 = 0, 1  # enum ggml_type

Times = Mapping[tuple[bool, int], float]  # seconds by flash attention and tokens of a batch


class Attention(NamedTuple):
    """How a pair computes attention: "auto" (llama.cpp decides) or "off", without flash attention.

    `ratio`: of the seconds without flash attention to those with it; None: not measured.
    """

    setting: str = defaults.FLASH_ATTENTION
    ratio: float | None = None

    @property
    def reason(self) -> str | None:
        """The choice and its reason in a line; None if nothing was measured."""
        if self.ratio is None:
            return None
        return (
            f"flash attention {self.setting}: without it, attention over {DEPTH} tokens takes "
            f"{self.ratio:.2f} times as long on this CPU"
        )


def choose_attention(*models: Times) -> Attention:
    """The choice that a target and its draft share, by the times of all their layers."""
    flash, plain = (
        sum(n * times[way, size] for times in models for size, n in BATCHES.items())
        for way in (True, False)
    )
    ratio = plain / flash
    return Attention("off" if ratio < CLEARLY_FASTER else defaults.FLASH_ATTENTION, ratio)


def known_attention(target: Model, draft: Model | None, options: ContextOptions) -> Attention:
    """The stored choice for a pair on this machine; the first time, it is measured and stored.

    A choice that cannot be stored is not used: texts with a seed would differ from load to load.
    Nothing is measured for GPUs, for caches of other types than f16 (quantized ones need flash
    attention), or where the attention scores of a long context would take too much memory.
    """
    models = [target] if draft is None else [target, draft]
    if {options.type_k, options.type_v} != {"f16"}:
        return Attention()
    if any(model.n_gpu_layers or not _has_room(model, options) for model in models):
        return Attention()
    facts = {"about": "attention", "pair": pair_key(target, draft, options)}
    if _recall(facts) is None:
        measured = _measure(models)
        if _recall(facts) is None:  # another process may have stored its own meanwhile
            profile_store.remember(facts, measured._asdict())
    return _recall(facts) or Attention()


def time_attention(heads: Heads, until: float) -> Times | None:
    """CPU seconds of attention in a layer after DEPTH tokens, for each size of BATCHES.

    With one thread, whose CPU time hardly depends on what else the machine computes. `until`: when
    to end, by perf_counter. None: there was too little time, or llama.cpp does not offer its parts.
    """
    n_kv = min(heads.n_kv, max(_N_HEADS * heads.n_kv // heads.n, 1))
    with _graphs(heads._replace(n=heads.n // heads.n_kv * n_kv, n_kv=n_kv)) as graphs:
        found: dict[tuple[bool, int], list[float]] = {kind: [] for kind in graphs}
        for i in range(_N_ROUNDS):
            for kind, compute in graphs.items():
                if perf_counter() > until:
                    break
                started = thread_time()
                compute()
                if i:  # the first round touches the memory
                    found[kind].append(thread_time() - started)
    if min(map(len, found.values()), default=0) < _FEWEST_TIMES:
        return None
    seconds = {kind: heads.n_kv / n_kv * min(times) for kind, times in found.items()}
    return seconds if all(seconds.values()) else None  # Windows counts CPU time in steps of 16 ms


def _measure(models: Sequence[Model]) -> Attention:
    """The choice by measurement; llama.cpp's own where it cannot be measured in time."""
    until, found = perf_counter(), []
    for model in models:
        until += SECONDS / len(models)
        heads = model.heads
        if heads is None or heads.n_keys != heads.n_values or heads.n % heads.n_kv:
            return Attention()
        if (times := time_attention(heads, until)) is None:
            return Attention()
        found.append({kind: model.n_layers * seconds for kind, seconds in times.items()})
    return choose_attention(*found)


def _has_room(model: Model, options: ContextOptions) -> bool:
    n_scores = min(options.n_batch, options.n_ctx) * options.n_ctx * options.n_sequences
    n_heads = model.heads.n if model.heads else 0
    return 4 * n_scores * n_heads <= max(_SCORE_BYTES, model.n_bytes // 4)


def _recall(facts: Mapping[str, object]) -> Attention | None:
    document = profile_store.recall(facts) or {}
    setting, ratio = document.get("setting"), document.get("ratio")
    if setting not in (defaults.FLASH_ATTENTION, "off"):
        return None
    return Attention(setting, ratio if isinstance(ratio, float) else None)


# llama.cpp's attention, as build_attn_mha makes it in src/llama-graph.cpp


_FUNCTIONS: dict[str, Signature] = {
    "ggml_init": (_POINTER, [InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_new_tensor_4d": (_POINTER, [_POINTER, _INT, *[_LONG] * 4]),
    "ggml_set_zero": (_POINTER, [_POINTER]),
    "ggml_permute": (_POINTER, [_POINTER, _POINTER, *[_INT] * 4]),
    "ggml_cont": (_POINTER, [_POINTER, _POINTER]),
    "ggml_mul_mat": (_POINTER, [_POINTER] * 3),
    "ggml_soft_max_ext": (_POINTER, [*[_POINTER] * 3, _FLOAT, _FLOAT]),
    "ggml_flash_attn_ext": (_POINTER, [*[_POINTER] * 5, *[_FLOAT] * 3]),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_backend_cpu_init": (_POINTER, []),
    "ggml_backend_cpu_set_n_threads": (None, [_POINTER, _INT]),
    "ggml_backend_graph_compute": (_INT, [_POINTER, _POINTER]),
    "ggml_backend_free": (None, [_POINTER]),
}


@contextmanager
def _graphs(heads: Heads) -> Iterator[dict[tuple[bool, int], Callable[[], object]]]:
    """Computations by (flash attention, size of the batch); none if llama.cpp lacks functions."""
    n, n_kv, width, _ = heads
    # Twice the bytes of all tensors. ggml would end the process if it could not allocate them.
    n_bytes = 2**24 + 16 * width * DEPTH * n_kv + 32 * n * sum(BATCHES) * (DEPTH + width)
    library, memory = ggml(_FUNCTIONS), None
    with suppress(MemoryError):
        memory = np.empty(n_bytes, np.uint8)
    if library is None or memory is None:
        yield {}
        return
    context = library.ggml_init(InitParams(n_bytes, memory.ctypes.data, False))
    backend = library.ggml_backend_cpu_init()
    library.ggml_backend_cpu_set_n_threads(backend, 1)

    def tensor(type_: int, *shape: int) -> Any:
        return library.ggml_set_zero(library.ggml_new_tensor_4d(context, type_, *shape, 1))

    def swap(of: Any) -> Any:
        return library.ggml_permute(context, of, 0, 2, 1, 3)

    def computation(result: Any) -> Callable[[], object]:
        graph = library.ggml_new_graph(context)
        library.ggml_build_forward_expand(graph, result)
        return partial(library.ggml_backend_graph_compute, backend, graph)

    try:
        keys, values = (swap(tensor(_F16, width, n_kv, DEPTH)) for _ in "kv")
        turned = tensor(_F16, DEPTH, width, n_kv)
        found = {}
        for size in BATCHES:
            queries = swap(tensor(_F32, width, n, size))
            mask = tensor(_F16, DEPTH, 64, 1)  # llama.cpp used to demand a multiple of 64
            fused = library.ggml_flash_attn_ext(context, queries, keys, values, mask, 1, 0, 0)
            mask = tensor(_F32, DEPTH, size, 1)
            scores = library.ggml_mul_mat(context, keys, queries)
            weights = library.ggml_soft_max_ext(context, scores, mask, 1, 0)
            sums = library.ggml_mul_mat(context, turned, weights)
            found[True, size] = computation(fused)
            found[False, size] = computation(library.ggml_cont(context, swap(sums)))
        yield found
    finally:
        library.ggml_backend_free(backend)
        library.ggml_free(context)
