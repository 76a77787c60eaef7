"""The functions of llama.cpp that the extension calls, and those that llama-cpp-python lacks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec import _native
from ggufspec.errors import DecodeError, ModelError
from ggufspec.llama.devices import address_of
from ggufspec.llama.log import log

Hidden = NDArray[np.float32]  # (n, width), hidden states of n tokens

_CONTEXT = ctypes.c_void_p
_FLOATS = ctypes.POINTER(ctypes.c_float)
_PLAIN, _GCC, _MSVC = "{name}", "_Z{length}{name}P13llama_context{gcc}", "?{name}@@YA{msvc}@Z"
# Of src/llama-ext.h as in llama-cpp-python 0.3.36, which promises nothing for later versions: the
# result, arguments after the context, and both as in names made by GCC or Clang, and by MSVC.
_SIGNATURES: dict[str, tuple[Any, list[Any], str, str]] = {
    "llama_set_embeddings_nextn": (
        *(None, [ctypes.c_bool, ctypes.c_bool]),
        *("bb", "XPEAUllama_context@@_N1"),
    ),
    "llama_get_embeddings_nextn": (ctypes.c_void_p, [], "", "PEAMPEAUllama_context@@"),
    "llama_set_nextn_layer_offset": (None, [ctypes.c_int32], "i", "XPEAUllama_context@@H"),
    "llama_set_embeddings_layer_inp": (
        *(None, [ctypes.c_uint32, ctypes.c_bool]),
        *("jb", "XPEAUllama_context@@I_N"),
    ),
    "llama_get_embeddings_layer_inp": (
        *(ctypes.c_void_p, [ctypes.c_uint32]),
        *("j", "PEAMPEAUllama_context@@I"),
    ),
}


def library() -> Any:
    """The library of llama.cpp that llama-cpp-python has loaded."""
    return llama_cpp.llama_cpp._lib


def _function(name: str) -> Any:
    """Raises ModelError if the loaded library does not have it."""
    return _found(library(), name)


@cache
def _found(loaded: Any, name: str) -> Any:
    result, arguments, gcc, msvc = _SIGNATURES[name]
    for form in (_PLAIN, _GCC, _MSVC):
        symbol = form.format(name=name, length=len(name), gcc=gcc, msvc=msvc)
        found = getattr(loaded, symbol, None)
        if found is not None:
            found.argtypes, found.restype = [_CONTEXT, *arguments], result
            return found
    raise ModelError(
        f"this llama-cpp-python ({llama_cpp.__version__}) has no function {name}, which draft "
        "heads need: install 0.3.36 or another version that ggufspec supports, or use "
        "another draft"
    )


def keep_hidden(context: int, *, of_rows_only: bool) -> None:
    """Make a context keep its last hidden states: of all tokens, or of those with logits.

    Raises ModelError.
    """
    _function("llama_get_embeddings_nextn")
    _function("llama_set_embeddings_nextn")(context, True, of_rows_only)


def hidden(context: int, n_rows: int, width: int) -> Hidden:
    """The last hidden states (n_rows, width) of the last batch; valid until the next decode."""
    return _rows(_function("llama_get_embeddings_nextn")(context), n_rows, width)


def keep_layer_inputs(context: int, layers: Sequence[int]) -> None:
    """Make a context keep the inputs of these layers, of all tokens. Raises ModelError.

    llama.cpp ends the process for a layer that the architecture does not provide.
    """
    _function("llama_get_embeddings_layer_inp")
    for layer in layers:
        _function("llama_set_embeddings_layer_inp")(context, layer, True)


def layer_input(context: int, layer: int, n_rows: int, width: int) -> Hidden:
    """The input (n_rows, width) of a layer in the last batch; valid until the next decode."""
    return _rows(_function("llama_get_embeddings_layer_inp")(context, layer), n_rows, width)


def use_head(context: int, i: int) -> None:
    """Select MTP layer `i`, of a head with several, for the next decodes."""
    _function("llama_set_nextn_layer_offset")(context, i)


def encode(context: int, features: Hidden, width: int) -> Hidden:
    """Encode `features` (n, 3 * width of the target) with an EAGLE-3 context: (n, width).

    n is at most n_batch. Valid until the next decode. Raises DecodeError.
    """
    n = len(features)
    features = np.ascontiguousarray(features, np.float32)
    # Without positions: llama.cpp then takes those after the cells of sequence 0, and uses none.
    batch = llama_cpp.llama_batch(
        n_tokens=n, embd=features.ctypes.data_as(_FLOATS), logits=(ctypes.c_int8 * n)(*[1] * n)
    )
    log.inside += 1
    try:
        code = llama_cpp.llama_encode(context, batch)
    finally:
        log.inside -= 1
    if code:
        raise DecodeError(f"llama.cpp could not encode {n} rows of hidden states (code {code})")
    return hidden(context, n, width)


def _rows(address: int | None, n_rows: int, width: int) -> Hidden:
    if not address:
        raise DecodeError("llama.cpp kept no hidden states of the last batch")
    return _native.rows_at(address, n_rows, width)


_FUNCTIONS = (
    "llama_decode",
    "llama_synchronize",
    "llama_get_logits_ith",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_max",
    "llama_set_abort_callback",
)
_BATCH_FIELDS = ["n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"]


def addresses() -> dict[str, int]:
    """Addresses by name. Raises ModelError if llama_batch has other fields than expected."""
    fields = [name for name, _ in llama_cpp.llama_batch._fields_]
    if fields != _BATCH_FIELDS:
        raise ModelError(
            f"this llama-cpp-python has another llama_batch ({', '.join(fields)}) than ggufspec "
            f"was built for ({', '.join(_BATCH_FIELDS)}); install a version that ggufspec supports"
        )
    return {name: address_of(getattr(llama_cpp.llama_cpp._lib, name)) for name in _FUNCTIONS}
