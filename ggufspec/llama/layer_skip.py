"""Evaluates a model as if some of its layers were left out, without another file."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Set

import llama_cpp

from ggufspec.errors import ModelError
from ggufspec.llama.devices import POINTER, SIZE, TEXT, ggml

_OUTPUT = re.compile(rb"l_out-(\d+)")  # llama.cpp's name for the output of a layer


class LayerSkip:
    """Replaces the output of skipped layers by their input while a context computes.

    The skipped layers are computed all the same. The first and the last layer cannot be skipped.
    """

    def __init__(self) -> None:
        """Raises ModelError where the loaded llama.cpp lacks the functions for it."""
        library = ggml(
            {
                "ggml_get_name": (TEXT, [POINTER]),
                "ggml_nbytes": (SIZE, [POINTER]),
                "ggml_backend_tensor_get": (None, [POINTER, POINTER, SIZE, SIZE]),
                "ggml_backend_tensor_set": (None, [POINTER, POINTER, SIZE, SIZE]),
            }
        )
        if library is None:
            raise ModelError(
                "this build of llama.cpp cannot skip layers, so they cannot be chosen; name the "
                "layers to keep (--layers 0-10,14-23)"
            )
        self._ggml = library
        self._layers: frozenset[int] = frozenset()
        self._input: ctypes.Array[ctypes.c_char] | None = None  # of the next skipped layer
        self._missing: set[int] = set()  # skipped layers whose output was not seen yet
        self._error: BaseException | None = None
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def skip(self, layers: Set[int]) -> None:
        self._layers = frozenset(layers)
        self._missing = set(layers)
        self._input = None

    def check(self) -> None:
        """Raise what interrupted the last decode, ModelError if a layer was not skipped."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._missing:
            raise ModelError(
                "the layers of this architecture cannot be skipped, so they cannot be chosen; name "
                "the layers to keep (--layers 0-10,14-23)"
            )

    def _on_tensor(self, tensor: int, is_question: bool, data: int | None) -> bool:
        try:  # an exception cannot cross llama.cpp
            matched = _OUTPUT.fullmatch(self._ggml.ggml_get_name(tensor))
            layer = int(matched[1]) if matched else -2
            is_skipped = layer in self._layers
            if is_question:
                return is_skipped or layer + 1 in self._layers
            n_bytes = self._ggml.ggml_nbytes(tensor)
            if not is_skipped:
                self._input = ctypes.create_string_buffer(n_bytes)
                self._ggml.ggml_backend_tensor_get(tensor, self._input, 0, n_bytes)
            elif self._input is not None and len(self._input) == n_bytes:
                self._ggml.ggml_backend_tensor_set(tensor, self._input, 0, n_bytes)
                self._missing.discard(layer)
            return True
        except BaseException as error:
            self._error = error
            return False
