"""LoRA adapters in llama.cpp: loads them beside a model, and applies them to its contexts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import llama_cpp

from ggufspec.errors import ModelError, OutOfMemoryError
from ggufspec.llama.log import listening
from ggufspec.models.adapters import Adapters

_NO_ROOM = "failed to allocate"  # llama.cpp's words


def load_adapters(model: int, adapters: Adapters) -> list[Any]:
    """Load adapters, which were checked against the model, and return their pointers.

    Call it before contexts are made, which reserve graph nodes for adapters. The adapters are freed
    with the model. Raises ModelError, OutOfMemoryError.
    """
    pointers = []
    for each in adapters:
        with listening() as log:
            pointer = llama_cpp.llama_adapter_lora_init(model, os.fsencode(each.path))
            if not pointer:
                complaints = log.complaints()
                if _NO_ROOM in complaints:
                    raise OutOfMemoryError(
                        f"there is not enough memory for the LoRA adapter {each.path}: use fewer "
                        f"GPU layers (n_gpu_layers, -ngl).\n{complaints}"
                    )
                raise ModelError(
                    f"llama.cpp does not load the LoRA adapter {each.path}; use one that was made "
                    f"for this model.\n{complaints}"
                )
            pointers.append(pointer)
    return pointers


def apply_adapters(context: int, pointers: Sequence[Any], adapters: Adapters) -> None:
    """Apply the model's adapters in all passes of a context."""
    n = len(adapters)
    array = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*pointers)
    scales = (ctypes.c_float * n)(*(each.scale for each in adapters))
    with listening():
        llama_cpp.llama_set_adapters_lora(context, array, n, scales)
