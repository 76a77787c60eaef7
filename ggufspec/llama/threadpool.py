"""Threads that stay between passes: those of OpenMP, or our own in builds without it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

import llama_cpp

from ggufspec.errors import DecodeError
from ggufspec.llama.devices import POINTER, backend_function, ggml

# How long an idle thread spins before it sleeps, in units of 131,072 pauses of the processor. By
# processor time after a pass, with two threads on an EPYC with AVX2: 0.05 ms for 0, 4.6 ms for 1,
# 19 ms for 5, 185 ms for 50, ggml's own. 1 covers the time between two parts of a graph, and of a
# round; a longer one would take a core from other engines and programs after each pass.
_POLL = 1
_GGML_POLL = 50

_PAUSE, _SOFTLY = (ctypes.c_int, [ctypes.c_int]), 1  # the signature of omp_pause_resource_all

_processes: set[int] = set()  # this one, if OpenMP has computed in it, or its parent


class _Params(ctypes.Structure):
    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


class ThreadPools:
    """Pools of threads by their size, for contexts that never compute at the same time.

    Without one (and without OpenMP, which keeps threads), ggml starts and ends threads for each
    part of a graph: two for each layer between layers on a GPU. A pool computes one graph at a
    time. Threads that a graph does not use would wake and spin, so each number has a pool.
    """

    def __init__(self) -> None:
        self._pools: dict[int, int] = {}  # pointers by numbers of threads
        self._contexts: set[int] = set()
        self._pid = os.getpid()

    def attach(self, context: int, n_threads: int, n_threads_batch: int) -> None:
        """Give pools to a context (its pointer), which must not be computing."""
        if not are_needed():
            return
        self._contexts.add(context)
        library = ggml({"llama_attach_threadpool": (None, [POINTER] * 3)})
        assert library is not None
        pools = self._pool(n_threads), self._pool(n_threads_batch)
        library.llama_attach_threadpool(context, *pools)

    def release(self, context: int) -> None:
        """Free the pools after the last context, which touches its pool when it gets another."""
        self._contexts.discard(context)
        if not self._contexts and self._pid == os.getpid():  # a fork has not copied the threads
            while self._pools:
                _, pool = self._pools.popitem()
                free = backend_function("CPU", "ggml_threadpool_free", None, POINTER)
                assert free is not None
                free(pool)

    def excludes(self, other: ThreadPools) -> bool:
        """Whether contexts with these pools and with `other` cannot compute at the same time."""
        return self is other and bool(self._pools)

    def check(self) -> None:
        """Raise DecodeError where a fork has not copied the threads: passes would never end."""
        if self._pools:
            is_forked = self._pid != os.getpid()
        else:
            _processes.add(os.getpid())
            is_forked = len(_processes) > 1
        if is_forked:
            raise DecodeError(
                "this process was forked after its parent had started threads of llama.cpp, "
                "which do not exist here: llama.cpp would wait forever. Start processes by "
                "multiprocessing's spawn method, or use one thread here (n_threads, -t)"
            )

    def _pool(self, n_threads: int) -> int | None:
        """The pool for `n_threads`; None for one thread, which is the caller's."""
        if n_threads > 1 and n_threads not in self._pools:
            new = backend_function("CPU", "ggml_threadpool_new", POINTER, ctypes.POINTER(_Params))
            assert new is not None
            params = _default_params(n_threads)
            params.poll = _POLL
            self._pools[n_threads] = new(ctypes.byref(params))
        return self._pools.get(n_threads)


def end_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread; its next pass starts new ones.

    GNU's OpenMP counts the threads that all threads of the process keep. If these are more than the
    processors, it lets them sleep between the parts of a graph, which slows every pass: Qwen 1.5B
    on two cores writes 36 instead of 44 tokens/s once a second thread has computed. So a thread
    whose next pass is not soon calls this. It takes 0.1 ms, and so does starting them again.
    """
    if (end := _openmp_end()) is not None:
        end(_SOFTLY)


@cache
def _openmp_end() -> Callable[[int], int] | None:
    """omp_pause_resource_all of GNU's OpenMP; that of other libraries ends all threads."""
    library = ggml(dict.fromkeys(("omp_pause_resource_all", "GOMP_parallel"), _PAUSE))
    if library is None or hasattr(library, "__kmpc_fork_call"):  # of LLVM's and Intel's
        return None
    end: Callable[[int], int] = library.omp_pause_resource_all
    return end


@cache
def are_needed() -> bool:
    """Whether this build of llama.cpp has no OpenMP but has thread pools of the known form."""
    needed = "CPU", "ggml_threadpool_new", POINTER  # also loads the backends
    if backend_function(*needed) is None or b"OPENMP = 1" in llama_cpp.llama_print_system_info():
        return False
    if ggml({"llama_attach_threadpool": (None, [POINTER] * 3)}) is None:
        return False
    if ggml({"ggml_threadpool_params_init": (None, [POINTER, ctypes.c_int])}) is None:
        return False
    params = _default_params(3)
    return (params.n_threads, params.prio, params.poll) == (3, 0, _GGML_POLL)


def _default_params(n_threads: int) -> _Params:
    library = ggml({"ggml_threadpool_params_init": (None, [POINTER, ctypes.c_int])})
    assert library is not None
    room = ctypes.create_string_buffer(4 * ctypes.sizeof(_Params))  # another version has other ones
    library.ggml_threadpool_params_init(room, n_threads)
    return _Params.from_buffer(room)
