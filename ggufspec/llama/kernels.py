"""Uses the extension's kernels for products of quantized weights where they are faster."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from os import environ
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import llama_cpp

from ggufspec import _native
from ggufspec.drafting import profile_store
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.errors import GgufspecError
from ggufspec.llama import devices, trial
from ggufspec.llama.log import logger
from ggufspec.models.header import read_header

# "on": wherever they work, without measuring; "off"; or a name of instructions, measured as usual.
VARIABLE = "GGUFSPEC_KERNELS"
BUFFER_TYPE = "GGUFSPEC"  # its name in ggml
_TRIAL = "ggufspec.llama.kernels_trial"
SIZES = (1, 2, 4, 8)  # tokens of the passes that decide
GGML_VERSIONS = ("0.25.3",)  # whose structures are those of native/matmul/ggml_abi.h

_NO_SLOWER = 1.02  # of llama.cpp's time for one token, which repeated measurements differ by
_N_PASSES, _SECONDS = 7, 1.0  # of each size at most; of all sizes for a second repetition
_GET_TYPES = "ggml_backend_cpu_get_extra_buffer_types"  # a function of C++
_SYMBOLS = {_GET_TYPES: "_Z39ggml_backend_cpu_get_extra_buffer_typesv"}
_FUNCTIONS = (
    *(_GET_TYPES, "ggml_barrier", "ggml_threadpool_chunk_set", "ggml_threadpool_chunk_add"),
    *("ggml_backend_cpu_buffer_type", "ggml_backend_buft_alloc_buffer"),
    "ggml_backend_buft_is_host",
)

Load = Callable[[], "int | None"]
Times = Mapping[int, float]  # milliseconds by tokens of a pass


class Status(NamedTuple):
    """The instructions whose kernels this process may use, and for which types of weights.

    reason: why there are none; None if there are.
    """

    instructions: str | None
    types: Mapping[str, int]  # ggml's names and numbers
    reason: str | None = None


class Choice(NamedTuple):
    """For which types of a model's weights the kernels are used, and the times that decided."""

    types: tuple[str, ...] = ()
    llama_cpp: Times | None = None
    ggufspec: Times | None = None

    @property
    def reason(self) -> str | None:
        """The choice in a line; None where nothing was measured."""
        if not self.llama_cpp or not self.ggufspec:
            return None
        ours, theirs = (
            "/".join(f"{times[size]:.3g}" for size in SIZES)
            for times in (self.ggufspec, self.llama_cpp)
        )
        passes = f"passes over {'/'.join(map(str, SIZES))} tokens take"
        if not self.types:
            return f"llama.cpp's kernels: {passes} {theirs} ms, with ggufspec's {ours}"
        names = ", ".join(self.types)
        return f"own kernels for {names}: {passes} {ours} ms, with llama.cpp's {theirs}"


@cache
def register() -> str | None:
    """Put the buffer type before llama.cpp's; why that is impossible, None if it was done.

    ggml lists its buffer types when it is first asked for them, so call this before.
    """
    if environ.get(VARIABLE) == "off":
        return f"{VARIABLE}=off"
    if (name := _instructions()) is None:
        return "there are none for this processor"
    library = devices.ggml({"ggml_version": (devices.TEXT, [])})
    version = library.ggml_version().decode("ascii", "replace") if library else "unknown"
    if version not in GGML_VERSIONS:
        return f"they know ggml {', '.join(GGML_VERSIONS)}, and this is {version}"
    addresses = _addresses()
    if missing := [each for each in _FUNCTIONS if each not in addresses]:
        return f"this llama.cpp does not export {missing[0]}"
    _native.register_kernels(name, addresses)
    if trial.find_buffer_type(BUFFER_TYPE) is None:
        return "another part of this process has loaded a model before"
    return None


@cache
def status() -> Status:
    """Which kernels this process may use: those that a trial has found right."""
    if (reason := register()) is not None:
        return Status(None, {}, reason)
    name = str(_instructions())
    types = _native.kernel_types(name)
    if environ.get(VARIABLE) == "on":
        return Status(name, types)
    found = trial.outcome("kernels", _TRIAL, instructions=name, extension=trial.extension())
    if found is None or not found.works:
        return Status(None, {}, "a trial in a child process has failed")
    return Status(name, {each: types[each] for each in found.words if each in types})


def load(path: Path, load_file: Load, *, on_cpu: bool, writes: bool) -> tuple[int | None, Choice]:
    """Load a model with the kernels that are fastest for it: (its pointer or None, the choice).

    The first time on this machine, it is loaded with llama.cpp's kernels and with ours, and passes
    over SIZES tokens decide; that is stored. on_cpu: all its layers are there, and no GPU is.
    writes: it is a model of its own, so that its passes can be measured.
    """
    usable = status().types if on_cpu and environ.get(VARIABLE) != "off" else {}
    if not usable:
        return load_file(), Choice()
    key = {
        **{"about": "kernels of a model", "cpu": devices.cpu_name(), "build": trial.build()},
        **{"extension": trial.extension(), "model": fingerprint(path), "types": [*usable]},
        **{"instructions": status().instructions, "n_threads": devices.n_threads_default()},
    }
    measures = environ.get(VARIABLE) != "on" and writes
    if measures and (known := profile_store.recall(key)) is not None:
        chosen = {name: usable[name] for name in known.get("types", []) if name in usable}
        times = (_times(known.get(of)) for of in ("llama_cpp", "ggufspec"))
        return _load(load_file, chosen), Choice((*chosen,), *times)
    types = {}
    with suppress(GgufspecError):  # llama.cpp says what is wrong with the file
        kinds = {tensor.type for tensor in read_header(path).tensors}
        types = {name: number for name, number in usable.items() if name.upper() in kinds}
    if not types:
        return load_file(), Choice()
    if not measures:
        return _load(load_file, types), Choice((*types,))
    pointer, choice = _measure(path, load_file, types)
    if pointer is not None and choice.reason is not None:
        profile_store.remember(key, {**choice._asdict(), "types": [*choice.types]})
    return pointer, choice


def _measure(path: Path, load_file: Load, types: Mapping[str, int]) -> tuple[int | None, Choice]:
    """The pointer and the choice by passes of the whole model.

    All types together where one token is then no slower; else each type on its own, and those for
    which it is no slower.
    """
    logger.warning(
        "ggufspec: %s is loaded with llama.cpp's kernels and with ggufspec's, to measure which are "
        "faster; this happens once",
        path.name,
    )
    pointer, theirs = _timed(load_file, {})
    if pointer is None or theirs is None:
        return pointer, Choice()
    llama_cpp.llama_model_free(pointer)
    pointer, together = _timed(load_file, types)
    if pointer is None or together is None or _is_faster(together, theirs):
        return pointer, Choice((*types,), theirs, together)
    chosen: dict[str, int] = {}
    for name, number in types.items() if len(types) > 1 else ():
        llama_cpp.llama_model_free(pointer)
        pointer, times = _timed(load_file, {name: number})
        if pointer is None or times is None:
            return pointer, Choice((name,))
        if _is_faster(times, theirs):
            chosen[name] = number
    llama_cpp.llama_model_free(pointer)
    pointer, times = _timed(load_file, chosen)
    return pointer, Choice((*chosen,), theirs, times if chosen else together)


def _timed(load_file: Load, types: Mapping[str, int]) -> tuple[int | None, Times | None]:
    """Load with the kernels for these types, and time passes; frees the model if that raises."""
    pointer = _load(load_file, types)
    try:
        return pointer, None if pointer is None else _time(pointer)
    except BaseException:
        llama_cpp.llama_model_free(pointer)
        raise


def _is_faster(times: Times, than: Times) -> bool:
    return times[1] <= _NO_SLOWER * than[1] and sum(
        times[size] / than[size] for size in SIZES
    ) < len(SIZES)


def _times(found: object) -> Times | None:
    if not isinstance(found, dict) or {*found} != {*map(str, SIZES)}:
        return None
    return {int(size): float(milliseconds) for size, milliseconds in found.items()}


def _load(load_file: Load, types: Mapping[str, int]) -> int | None:
    """Load with the kernels for these types, which no other model takes."""
    _native.offer_kernels([*types.values()])
    try:
        return load_file()
    finally:
        _native.offer_kernels([])


def _time(pointer: int) -> Times | None:
    """Milliseconds of the model's passes at an empty cache; None if it makes none."""
    if llama_cpp.llama_model_has_encoder(pointer) or not llama_cpp.llama_model_has_decoder(pointer):
        return None
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch = 64, max(SIZES)
    params.n_threads = params.n_threads_batch = devices.n_threads_default()
    context = llama_cpp.llama_init_from_model(pointer, params)
    if not context:
        return None
    n_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(pointer))
    batch = llama_cpp.llama_batch_init(max(SIZES), 0, 1)
    for i in range(max(SIZES)):
        batch.token[i], batch.pos[i], batch.logits[i] = (7 + 101 * i) % max(n_tokens, 1), i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    began = perf_counter()
    try:
        for i in range(_N_PASSES):
            for size in SIZES:
                batch.n_tokens = size
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
                started = perf_counter()
                if llama_cpp.llama_decode(context, batch):
                    return None
                llama_cpp.llama_synchronize(context)
                found[size].append(1000 * (perf_counter() - started))
            if i > 1 and perf_counter() - began > _SECONDS:
                break
        return {size: min(times) for size, times in found.items()}
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)


def _instructions() -> str | None:
    """The fastest of this processor, or those that the environment names."""
    found = _native.kernel_instructions()
    most = environ.get("GGUFSPEC_INSTRUCTIONS")  # see native/dispatch.cpp
    if most == "baseline":
        found = []
    elif most == "x86-64-v3":
        found = [name for name in found if name == "avx2"]
    named = environ.get(VARIABLE)
    return named if named in found else next(iter(found), None)


def _addresses() -> dict[str, int]:
    """Of what the extension calls: in the library of the CPU backend, and in those it uses."""
    candidates = [*devices.libraries(), *_backend_libraries()]
    return {
        name: devices.address_of(getattr(library, symbol))
        for name in _FUNCTIONS
        for symbol in [_SYMBOLS.get(name, name)]
        for library in candidates
        if hasattr(library, symbol)
    }


class _DlInfo(ctypes.Structure):
    _fields_ = [
        *(("dli_fname", ctypes.c_char_p), ("dli_fbase", ctypes.c_void_p)),
        *(("dli_sname", ctypes.c_char_p), ("dli_saddr", ctypes.c_void_p)),
    ]


def _backend_libraries() -> Iterator[ctypes.CDLL]:
    """The library of the CPU backend where it is loaded at run time, so that none links it."""
    function = devices.backend_function("CPU", "ggml_backend_dev_get_extra_bufts", None)
    info = _DlInfo()
    with suppress(OSError, AttributeError):  # no dladdr on Windows
        if function and ctypes.CDLL(None).dladdr(function, ctypes.byref(info)):
            yield ctypes.CDLL(info.dli_fname.decode())
