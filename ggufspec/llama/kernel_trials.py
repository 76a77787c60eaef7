"""Tries kernels in a child process: ours against ggml's products, AMX on a small model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import numpy as np

from ggufspec import _native
from ggufspec.llama import devices, kernels
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.devices import InitParams, Signature
from ggufspec.llama.model import Model

_ROWS, _COLUMNS, _EXPERTS, _MOST = 40, 512, 3, 17
_TOLERANCE = 0.06  # of the size of a product; both sides round activations to 8 bits, by about 0.01
_F32, _I32 = 0, 26  # enum ggml_type
Array = np.ndarray[Any, Any]
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
GRAPH_FUNCTIONS: dict[str, Signature] = {  # of ggml, to make tensors and compute with them
    "ggml_init": (_POINTER, [InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_nbytes": (ctypes.c_size_t, [_POINTER]),
    "ggml_quantize_chunk": (
        ctypes.c_size_t,
        [_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    ),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_backend_init_by_name": (_POINTER, [ctypes.c_char_p, ctypes.c_char_p]),
    "ggml_backend_graph_compute": (_INT, [_POINTER, _POINTER]),
    "ggml_backend_free": (None, [_POINTER]),
}
_GGML: dict[str, Signature] = {
    **GRAPH_FUNCTIONS,
    "ggml_tensor_overhead": (ctypes.c_size_t, []),
    "ggml_new_tensor_3d": (_POINTER, [_POINTER, _INT, *[_LONG] * 3]),
    "ggml_mul_mat": (_POINTER, [_POINTER] * 3),
    "ggml_mul_mat_id": (_POINTER, [_POINTER] * 4),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, [_POINTER, _POINTER]),
    "ggml_backend_tensor_set": (None, [_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
}


def try_kernels(spoiled: str = "") -> None:
    """Print the types of weights whose products equal ggml's. Runs in a child process.

    spoiled: a type whose weights are damaged on purpose, to test that the trial finds it.
    """
    kernels.without_core_dumps()
    name, library = kernels.instructions(), devices.ggml(_GGML)
    if name is None or library is None or kernels.unusable() is not None:
        kernels.tell(kernels.WRONG)
        return
    types = _native.kernel_types(name).items()
    right = [name for name, number in types if _is_right(library, number, spoil=name == spoiled)]
    kernels.tell(kernels.WORKS, *right)


def _is_right(library: Any, number: int, *, spoil: bool) -> bool:
    """Whether products with 1 to _MOST rows, without and with experts, equal ggml's."""
    draw = np.random.default_rng(number)
    rows = draw.standard_normal((_MOST, _COLUMNS), np.float32)
    for n_experts in (1, _EXPERTS):
        values = draw.standard_normal((n_experts, _ROWS, _COLUMNS), np.float32)
        with _pair(library, number, values, spoil) as (product, plain, packed):
            for n in range(1, _MOST + 1):
                ids = None
                if n_experts > 1:
                    ids = draw.integers(0, n_experts, (n, 2)).astype(np.int32)
                found, expected = (product(each, rows[:n], ids) for each in (packed, plain))
                if not np.abs(found - expected).max() < _TOLERANCE * np.sqrt(_COLUMNS):
                    return False
    return True


def cpu_backend(library: Any, n_threads: int) -> Any:
    """A CPU backend of ggml. By name: a build that loads it at run time links no library of it."""
    backend = library.ggml_backend_init_by_name(b"CPU", None)
    name = "ggml_backend_set_n_threads"
    set_n_threads = devices.backend_function("CPU", name, None, _POINTER, _INT)
    assert set_n_threads is not None
    set_n_threads(backend, n_threads)
    return backend


def computed(library: Any, memory: Any, backend: Any, result: Any, n_values: int) -> Array:
    """The values of a tensor that is the result of operations."""
    graph = library.ggml_new_graph(memory)
    library.ggml_build_forward_expand(graph, result)
    library.ggml_backend_graph_compute(backend, graph)
    return np.array((ctypes.c_float * n_values).from_address(library.ggml_get_data(result)))


@contextmanager
def _pair(
    library: Any, number: int, values: Array, spoil: bool
) -> Iterator[tuple[Callable[..., Array], Any, Any]]:
    """`_product` on a backend, and the same weights in ggml's layout and in ours."""
    memory = library.ggml_init(InitParams(2**25, None, False))
    empty = library.ggml_init(InitParams(4 * library.ggml_tensor_overhead(), None, True))
    backend = cpu_backend(library, 2)
    n_experts, n_rows, n_columns = values.shape
    plain, packed = (
        library.ggml_new_tensor_3d(context, number, n_columns, n_rows, n_experts)
        for context in (memory, empty)
    )
    data = library.ggml_get_data(plain)
    library.ggml_quantize_chunk(
        number, values.ctypes.data, data, 0, n_experts * n_rows, n_columns, None
    )
    copy = ctypes.create_string_buffer(ctypes.string_at(data, library.ggml_nbytes(plain)))
    if spoil:
        for i in range(0, len(copy), 7):
            copy[i] = bytes([ord(copy[i]) ^ 0x24])
    listed = kernels.find_buffer_type(kernels.BUFFER_TYPE)
    assert listed is not None
    types, i = listed
    buffer = library.ggml_backend_alloc_ctx_tensors_from_buft(empty, types[i])
    library.ggml_backend_tensor_set(packed, copy, 0, library.ggml_nbytes(plain))
    try:
        yield partial(_product, library, memory, backend), plain, packed
    finally:
        library.ggml_backend_buffer_free(buffer)
        library.ggml_backend_free(backend)
        library.ggml_free(empty)
        library.ggml_free(memory)


def _product(
    library: Any, memory: Any, backend: Any, weights: Any, rows: Array, ids: Array | None
) -> Array:
    """The rows times the weights, or times those of the experts in `ids` (n_rows, n_used)."""
    n, n_columns = rows.shape
    shape = (n, 1) if ids is None else (1, n)
    given = library.ggml_new_tensor_3d(memory, _F32, n_columns, *shape)
    ctypes.memmove(library.ggml_get_data(given), rows.ctypes.data, rows.nbytes)
    if ids is None:
        result = library.ggml_mul_mat(memory, weights, given)
    else:
        chosen = library.ggml_new_tensor_3d(memory, _I32, ids.shape[1], n, 1)
        ctypes.memmove(library.ggml_get_data(chosen), ids.ctypes.data, ids.nbytes)
        result = library.ggml_mul_mat_id(memory, weights, given, chosen)
    n_used = 1 if ids is None else ids.shape[1]
    return computed(library, memory, backend, result, n * _ROWS * n_used)


_MODEL = Path(__file__).parent.parent / "standin" / "classics-draft.gguf"
_ROUNDING = 0.2  # of the spread of the logits; wrong logits are off by as much as the spread


def try_amx() -> None:
    """Print WORKS, or WRONG if logits differ from passes over one token, which use no AMX tiles."""
    environ[kernels.AMX_VARIABLE] = "on"
    environ[kernels.VARIABLE] = "off"  # else ggufspec's kernels would compute
    kernels.without_core_dumps()
    tokens = [*range(10, 26)]
    model = Model(_MODEL, n_gpu_layers=0)
    context = Context(model, ContextOptions(n_ctx=64, n_rows=len(tokens), n_threads=2))
    context.decode(tokens, len(tokens), 0)
    batched = np.array(context.rows(0, len(tokens)))
    context.truncate(0, 0)
    for token, row in zip(tokens, batched, strict=True):
        context.decode([token], 1, 0)
        single = np.array(context.rows(0, 1)[0])
        if not np.abs(row - single).max() < _ROUNDING * np.ptp(single):
            kernels.tell(kernels.WRONG)
            return
    kernels.tell(kernels.WORKS)
