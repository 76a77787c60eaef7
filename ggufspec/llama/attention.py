"""Measures once per pair whether attention on this CPU is faster without flash attention."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np

from ggufspec.common import defaults
from ggufspec.drafting import profile_store
from ggufspec.llama.context import ContextOptions
from ggufspec.llama.devices import Signature, ggml
from ggufspec.llama.model import Heads, Model
from ggufspec.llama.profile_key import pair_key

SECONDS = 0.3  # the most that measuring a pair may take
DEPTH = 512  # tokens in the cache
CLEARLY_FASTER = 0.9  # of the seconds with flash attention; repeated measurements differ by 3 %
MANY = 64  # tokens of a batch, from which on flash attention computes in tiles
# How often a text of 160 tokens after a prompt of 512 needs a batch of so many tokens, with three
# drafted tokens in every second round. The prompt's batches find half of DEPTH on average.
TARGET_BATCHES = {1: 32, defaults.N_DRAFT_FIXED + 1: 32, MANY: DEPTH // MANY // 2}
DRAFT_BATCHES = {1: 32 * defaults.N_DRAFT_FIXED, MANY: DEPTH // MANY // 2}

_N_ROUNDS = 9
_MASK_PAD = 64
_FEWEST_TIMES = 2  # of each, so that one disturbance does not decide
_N_HEADS = 8  # that are computed, or those of one KV head; all heads take equally long
_SCORE_BYTES = 2**28  # of attention scores, which are stored only without flash attention
_POINTER, _INT, _FLOAT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64
_F32, _F16 = 0, 1  # enum ggml_type


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


class AttentionTimes(NamedTuple):
    """Seconds by tokens of a batch."""

    flash: Mapping[int, float]
    plain: Mapping[int, float]


Timer = Callable[[Heads, Sequence[int], float], AttentionTimes | None]


def choose_attention(target: AttentionTimes, draft: AttentionTimes | None = None) -> Attention:
    """The choice for attention that takes so long in all layers; target and draft share it."""
    pairs = [(target, TARGET_BATCHES), *([(draft, DRAFT_BATCHES)] if draft else [])]
    flash = sum(n * times.flash[size] for times, batches in pairs for size, n in batches.items())
    plain = sum(n * times.plain[size] for times, batches in pairs for size, n in batches.items())
    ratio = plain / flash
    return Attention("off" if ratio < CLEARLY_FASTER else defaults.FLASH_ATTENTION, ratio)


def known_attention(
    target: Model, draft: Model | None, options: ContextOptions, timer: Timer | None = None
) -> Attention:
    """The stored choice for a pair on this machine; the first time, it is measured and stored.

    A choice that cannot be stored is not used: texts with a seed would differ from load to load.
    Nothing is measured for GPUs, for quantized caches, which need flash attention, or where the
    attention scores of a long context would take too much memory.
    """
    models = [target] if draft is None else [target, draft]
    if any(model.n_gpu_layers for model in models) or {options.type_k, options.type_v} != {"f16"}:
        return Attention()
    if not all(_has_room(model, options) for model in models):
        return Attention()
    facts = {"about": "attention", "pair": pair_key(target, draft, options)}
    if (found := _recall(facts)) is None:
        measured = _measure(target, draft, timer or time_attention)
        if _recall(facts) is None:  # another process may have stored its own meanwhile
            profile_store.remember(facts, measured._asdict())
        found = _recall(facts)
    return found or Attention()


def time_attention(heads: Heads, sizes: Sequence[int], until: float) -> AttentionTimes | None:
    """CPU seconds of a layer's attention after DEPTH tokens, for batches of these sizes.

    With one thread, whose CPU time hardly depends on what else the machine computes. `until`: when
    to end, by perf_counter. None: there was too little time, or llama.cpp does not offer its parts.
    """
    group = heads.n // heads.n_kv
    n_kv = min(heads.n_kv, max(_N_HEADS // group, 1))
    with _graphs(heads._replace(n=group * n_kv, n_kv=n_kv), sizes) as graphs:
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
    share = heads.n_kv / n_kv
    seconds = {kind: max(share * min(times), 1e-9) for kind, times in found.items()}
    return AttentionTimes(
        {size: seconds[True, size] for size in sizes},
        {size: seconds[False, size] for size in sizes},
    )


def _measure(target: Model, draft: Model | None, timer: Timer) -> Attention:
    """The choice by measurement; llama.cpp's own where it cannot be measured in time."""
    now = perf_counter()
    of_target = _time_layers(target, TARGET_BATCHES, timer, now + SECONDS / 2)
    if draft is None or of_target is None:
        return choose_attention(of_target) if of_target else Attention()
    of_draft = _time_layers(draft, DRAFT_BATCHES, timer, now + SECONDS)
    return choose_attention(of_target, of_draft) if of_draft else Attention()


def _time_layers(
    model: Model, batches: Mapping[int, int], timer: Timer, until: float
) -> AttentionTimes | None:
    """Seconds of attention in all layers of a model."""
    heads = model.heads
    if heads is None or heads.n_keys != heads.n_values or heads.n % heads.n_kv:
        return None
    if (times := timer(heads, list(batches), until)) is None:
        return None
    of_all = ({n: model.n_layers * each for n, each in way.items()} for way in times)
    return AttentionTimes(*of_all)


def _has_room(model: Model, options: ContextOptions) -> bool:
    """Whether attention scores of a batch take little memory."""
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


class _Init(ctypes.Structure):
    """struct ggml_init_params in ggml.h."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


_FUNCTIONS: dict[str, Signature] = {
    "ggml_init": (_POINTER, [_Init]),
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
def _graphs(
    heads: Heads, sizes: Sequence[int]
) -> Iterator[dict[tuple[bool, int], Callable[[], object]]]:
    """Computations by (flash attention, size of the batch); none if llama.cpp lacks functions."""
    library = ggml(_FUNCTIONS)
    if library is None:
        yield {}
        return
    n, n_kv, width, _ = heads
    # Twice the bytes of all tensors. ggml would end the process if it could not allocate them.
    n_bytes = 2**24 + 16 * width * DEPTH * n_kv + 32 * n * sum(sizes) * (DEPTH + width)
    try:
        memory = np.empty(n_bytes, np.uint8)
    except MemoryError:
        yield {}
        return
    context = library.ggml_init(_Init(n_bytes, memory.ctypes.data, False))
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
        for size in sizes:
            queries = swap(tensor(_F32, width, n, size))
            # llama.cpp used to pad this mask.
            mask = tensor(_F16, DEPTH, -(-size // _MASK_PAD) * _MASK_PAD, 1)
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
