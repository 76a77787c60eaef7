"""Compares ggml's structures in the loaded library with those that native/ggml_abi.h declares.

Tensors and buffers are made by ggml's own functions, and read at the extension's offsets. What no
function of ggml returns (parameters of threads, virtual functions) is left to the trial of kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from ggufspec import _native
from ggufspec.llama import devices
from ggufspec.llama.devices import POINTER, SIZE, TEXT, InitParams, Signature

_INT, _LONG, _FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_float
_OBJECT_BYTES = 32  # struct ggml_object, which is in front of each tensor
_MEMORY = 2**16
_I32 = 26  # enum ggml_type
_INPUT, _COMPUTE = 1, 2  # GGML_TENSOR_FLAG_INPUT, GGML_BACKEND_BUFFER_USAGE_COMPUTE
_SHAPE, _HEADS, _SHIFT = (64, 6, 2, 1), (64, 3, 4, 1), 128
_FUNCTIONS: dict[str, Signature] = {
    "ggml_init": (POINTER, [InitParams]),
    "ggml_free": (None, [POINTER]),
    "ggml_tensor_overhead": (SIZE, []),
    "ggml_type_name": (TEXT, [_INT]),
    "ggml_row_size": (SIZE, [_INT, _LONG]),
    "ggml_get_data": (POINTER, [POINTER]),
    "ggml_set_name": (POINTER, [POINTER, TEXT]),
    "ggml_set_input": (None, [POINTER]),
    "ggml_new_tensor_4d": (POINTER, [POINTER, _INT, *[_LONG] * 4]),
    "ggml_view_1d": (POINTER, [POINTER, POINTER, _LONG, SIZE]),
    "ggml_mul_mat": (POINTER, [POINTER] * 3),
    "ggml_mul_mat_id": (POINTER, [POINTER] * 4),
    "ggml_flash_attn_ext": (POINTER, [*[POINTER] * 5, *[_FLOAT] * 3]),
    "ggml_backend_cpu_buffer_type": (POINTER, []),
    "ggml_backend_buft_alloc_buffer": (POINTER, [POINTER, SIZE]),
    "ggml_backend_buft_get_device": (POINTER, [POINTER]),
    "ggml_backend_tensor_alloc": (_INT, [POINTER] * 3),
    "ggml_backend_buffer_get_base": (POINTER, [POINTER]),
    "ggml_backend_buffer_set_usage": (None, [POINTER, _INT]),
    "ggml_backend_buffer_free": (None, [POINTER]),
}


def difference() -> str | None:
    """The first part of a structure or number of ggml's that is another one here; None: none is."""
    library = devices.exported(_FUNCTIONS)
    if library is None:
        return "functions that make tensors"
    at = _native.ggml_layout()
    if library.ggml_tensor_overhead() != at["tensor"] + _OBJECT_BYTES:
        return "the size of a tensor"  # else reading one might leave its memory
    memory = library.ggml_init(InitParams(_MEMORY, None, False))
    empty = library.ggml_init(InitParams(_MEMORY, None, True))
    buffer = library.ggml_backend_buft_alloc_buffer(library.ggml_backend_cpu_buffer_type(), _MEMORY)
    try:
        parts = (_numbers(library, at), _tensors(library, memory), _buffers(library, empty, buffer))
        return next((name for of in parts for name, is_same in of if not is_same), None)
    finally:
        library.ggml_backend_buffer_free(buffer)
        library.ggml_free(empty)
        library.ggml_free(memory)


Parts = Iterator[tuple[str, bool]]  # what is compared, and whether it is the same


def _numbers(library: Any, at: dict[str, int]) -> Parts:
    types = {name: at[name] for name in ("f32", "f16", "q8_0", "bf16")}
    for instructions in _native.kernel_instructions():
        types |= _native.kernel_types(instructions)
    for name, number in types.items():
        yield f"the number of type {name}", library.ggml_type_name(number) == name.encode()


def _tensors(library: Any, memory: Any) -> Parts:
    at = _native.ggml_layout()
    number = at["q8_0"]
    weights = library.ggml_new_tensor_4d(memory, number, *_SHAPE)
    library.ggml_set_name(weights, b"layout")
    library.ggml_set_input(weights)
    row = library.ggml_row_size(number, _SHAPE[0])
    strides = row // (_SHAPE[0] // 32), row, row * _SHAPE[1], row * _SHAPE[1] * _SHAPE[2]
    yield _same(weights, "tensor.type", _INT, number)
    yield _same(weights, "tensor.ne", _LONG, *_SHAPE)
    yield _same(weights, "tensor.nb", SIZE, *strides)
    yield _same(weights, "tensor.flags", _INT, _INPUT)
    yield _same(weights, "tensor.data", POINTER, library.ggml_get_data(weights))
    yield _same(weights, "tensor.name", ctypes.c_char * 7, b"layout")
    view = library.ggml_view_1d(memory, weights, _SHAPE[0], _SHIFT)
    yield _same(view, "tensor.view_src", POINTER, weights)
    yield _same(view, "tensor.view_offs", SIZE, _SHIFT)
    rows = library.ggml_new_tensor_4d(memory, at["f32"], *_SHAPE)
    product = library.ggml_mul_mat(memory, weights, rows)
    yield _same(product, "tensor.op", _INT, at["MUL_MAT"])
    yield _same(product, "tensor.src", POINTER, weights, rows, None)
    experts = library.ggml_new_tensor_4d(memory, number, *_SHAPE[:3], 1)
    tokens = library.ggml_new_tensor_4d(memory, at["f32"], _SHAPE[0], 2, _SHAPE[1], 1)
    ids = library.ggml_new_tensor_4d(memory, _I32, 2, _SHAPE[1], 1, 1)
    product = library.ggml_mul_mat_id(memory, experts, tokens, ids)
    yield _same(product, "tensor.op", _INT, at["MUL_MAT_ID"])
    yield _same(product, "tensor.src", POINTER, experts, tokens, ids)
    queries, keys, values = (
        library.ggml_new_tensor_4d(memory, at[of], *_HEADS) for of in ("f32", "f16", "f16")
    )
    attention = library.ggml_flash_attn_ext(memory, queries, keys, values, None, 0.5, 0.0, 2.0)
    yield _same(attention, "tensor.op", _INT, at["FLASH_ATTN_EXT"])
    yield _same(attention, "tensor.src", POINTER, queries, keys, values, None)
    yield _same(attention, "tensor.op_params", _FLOAT, 0.5, 0.0, 2.0)


def _buffers(library: Any, empty: Any, buffer: Any) -> Parts:
    of_cpu = library.ggml_backend_cpu_buffer_type()
    tensor = library.ggml_new_tensor_4d(empty, _native.ggml_layout()["f32"], *_SHAPE)
    library.ggml_backend_tensor_alloc(buffer, tensor, library.ggml_backend_buffer_get_base(buffer))
    library.ggml_backend_buffer_set_usage(buffer, _COMPUTE)
    yield _same(tensor, "tensor.buffer", POINTER, buffer)
    yield _same(buffer, "buffer.type", POINTER, of_cpu)
    yield _same(buffer, "buffer.size", SIZE, _MEMORY)
    yield _same(buffer, "buffer.usage", _INT, _COMPUTE)
    yield _same(of_cpu, "buffer_type.device", POINTER, library.ggml_backend_buft_get_device(of_cpu))


def _same(address: int, name: str, of: Any, *expected: object) -> tuple[str, bool]:
    """Compare the values at the extension's offset of a field with those of ggml's functions."""
    found = (of * len(expected)).from_address(address + _native.ggml_layout()[name])
    values = [getattr(each, "value", each) for each in found]
    return name, values == [*expected]
