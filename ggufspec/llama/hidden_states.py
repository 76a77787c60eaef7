"""llama.cpp's functions for batches and hidden states, and the states that a head has not read."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec import _native
from ggufspec.decoding.tree import path_along
from ggufspec.decoding.types import n_same
from ggufspec.errors import DecodeError, ModelError
from ggufspec.llama.devices import address_of
from ggufspec.llama.log import log

Hidden = NDArray[np.float32]  # (n, width), hidden states of n tokens

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


def addresses() -> dict[str, int]:
    """Addresses of the functions that the extension calls. Raises ModelError for other batches."""
    fields = [name for name, _ in llama_cpp.llama_batch._fields_]
    if fields != _BATCH_FIELDS:
        raise ModelError(
            f"this llama-cpp-python has another llama_batch ({', '.join(fields)}) than ggufspec "
            f"was built for ({', '.join(_BATCH_FIELDS)}); install a version that ggufspec supports"
        )
    return {name: address_of(getattr(llama_cpp.llama_cpp._lib, name)) for name in _FUNCTIONS}


def library() -> Any:
    """The library of llama.cpp that llama-cpp-python has loaded."""
    return llama_cpp.llama_cpp._lib


def _function(name: str) -> Any:
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
    """Keep the last hidden states of all tokens, or of tokens with logits. Raises ModelError."""
    _function("llama_get_embeddings_nextn")
    _function("llama_set_embeddings_nextn")(context, True, of_rows_only)


def hidden(context: int, n_rows: int, width: int) -> Hidden:
    """The last hidden states (n_rows, width) of the last batch; valid until the next decode."""
    return _rows(_function("llama_get_embeddings_nextn")(context), n_rows, width)


def keep_layer_inputs(context: int, layers: Sequence[int]) -> None:
    """Keep the inputs of these layers, of all tokens. Raises ModelError.

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
    if code := log.during(llama_cpp.llama_encode, context, batch):
        raise DecodeError(f"llama.cpp could not encode {n} rows of hidden states (code {code})")
    return hidden(context, n, width)


def _rows(address: int | None, n_rows: int, width: int) -> Hidden:
    if not address:
        raise DecodeError("llama.cpp kept no hidden states of the last batch")
    return _native.rows_at(address, n_rows, width)


class PassStopped(BaseException):
    """A pass was ended by `Context.stop`, since its text is no longer wanted."""


class BatchPart(NamedTuple):
    """One sequence in a batch: new tokens, and logits for the last `n_rows` of them.

    `parents`: the last tokens form a tree; parents[i] is the parent of node i: see types.Draft.
    """

    sequence: int
    tokens: Sequence[int]
    n_rows: int
    parents: Sequence[int] = ()


Parts = Sequence[BatchPart]


class Follower(Protocol):
    """Reads the hidden states of a context: see llama/head.py."""

    def follow(self, tokens: Sequence[int], sequence: int) -> int:
        """The context is about to read `tokens`; returns how many it may skip at most."""
        ...

    def after_decode(self, parts: Parts, positions: Sequence[int]) -> None:
        """Called after a decode of `parts` at `positions`. Raises DecodeError and Ctrl-C."""
        ...


class _Tree(NamedTuple):
    """The tree at the end of the target's last batch, of which one path is accepted."""

    position: int
    tokens: Sequence[int]
    parents: Sequence[int]
    states: Hidden


class GivenStates:
    """States of the tokens from `first` to `end` of one text, and of a tree after them.

    Changes are ordered so that Ctrl-C between two steps loses states, but never mixes tokens up.
    """

    def __init__(self, n_usual: int) -> None:
        """`n_usual`: tokens that are usually kept; memory for many more is given back."""
        self.first = 0
        self._n_usual = n_usual
        self._tokens = array("i")  # from `first` on
        self._states = np.empty((0, 0), np.float32)  # of these tokens, with room for more
        self._tree: _Tree | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def end(self) -> int:
        """Length of the prefix of the text for which the target has given states."""
        return self.first + len(self._tokens)

    def take(self, position: int, part: BatchPart, states: Hidden) -> None:
        """The target has decoded `part` at `position`; `states` is copied."""
        self._tree, tokens = None, part.tokens
        n_chain = len(tokens) - len(part.parents)
        tree = None
        if part.parents:
            behind = position + n_chain
            tree = _Tree(behind, tokens[n_chain:], part.parents, states[n_chain:].copy())
        n = position - self.first
        if not 0 <= n <= len(self._tokens):
            n = 0
            del self._tokens[:]
            self.first = position
        del self._tokens[n:]
        self._keep(n, states[:n_chain])
        self._tokens.extend(tokens[:n_chain])
        self._tree = tree

    def choose_path(self, tokens: array[int]) -> None:
        """Keep the path of a tree that follows `tokens`."""
        tree, self._tree = self._tree, None
        if tree is None:
            return
        path = path_along(tree.parents, tree.tokens, tokens[tree.position :])
        n = tree.position - self.first
        del self._tokens[n:]
        self._keep(n, tree.states[path])
        self._tokens.extend(tree.tokens[node] for node in path)

    def n_known(self, tokens: array[int]) -> int:
        """Length of the prefix of `tokens` for which the target has given states."""
        return self.first + n_same(tokens[self.first :], self._tokens)

    def cut(self, tokens: array[int]) -> None:
        """Drop the states of tokens that differ from `tokens`."""
        del self._tokens[n_same(tokens[self.first :], self._tokens) :]
        self.first = min(self.first, len(tokens))

    def tokens(self, start: int, end: int) -> array[int]:
        return self._tokens[start - self.first : end - self.first]

    def between(self, start: int, end: int) -> Hidden:
        """The states at positions `start` to `end`: (end - start, width). Valid until a change."""
        return self._states[start - self.first : end - self.first]

    def drop_before(self, position: int) -> None:
        if (n := position - self.first) > 0:
            kept = self._tokens[n:]
            del self._tokens[:]
            self._states[: len(kept)] = self._states[n : n + len(kept)].copy()
            n_most = 2 * self._n_usual
            if len(self._states) > 2 * n_most:
                self._states = self._states[: max(n_most, len(kept))].copy()
            self.first = position
            self._tokens.extend(kept)

    def forget(self) -> None:
        self._tree = None
        del self._tokens[:]
        self.first = 0

    def _keep(self, n: int, states: Hidden) -> None:
        n_all = n + len(states)
        if n_all > len(self._states):
            larger = np.empty((2 * n_all, states.shape[1]), np.float32)
            if n:
                larger[:n] = self._states[:n]
            self._states = larger
        self._states[n:n_all] = states
