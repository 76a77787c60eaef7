"""Ends a computation of llama.cpp's scheduler between the nodes of its graph, on CPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import llama_cpp

from ggufspec.llama.log import log

# A layer of a projector has 20 to 30: Ctrl-C is heard a few times in each.
_N_NODES = 8


class EvalCallback:
    """`callback` is for the field cb_eval of llama.cpp's parameters. For one thread at a time."""

    def __init__(self) -> None:
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._receive)
        self._n_nodes = 0
        self._tick: Callable[[], object] | None = None
        self._raised: BaseException | None = None

    @contextmanager
    def during(self, tick: Callable[[], object] | None) -> Iterator[None]:
        """Call `tick` every few nodes that are computed within the block, which is in `listening`.

        What it raises ends the computation, as Ctrl-C does, and is raised at the end of the block:
        the results are then to be dropped.
        """
        self._tick, self._raised = tick, None
        try:
            yield
            if self._raised is not None:
                raise self._raised
        finally:
            self._tick = self._raised = None

    def _receive(self, tensor: object, asks: bool, data: object) -> bool:
        """Before a node: whether to be called after it. After it: whether to go on.

        llama.cpp goes on with the next part of the graph where this part is ended.
        """
        if asks:
            self._n_nodes += 1
            return self._raised is not None or self._n_nodes % _N_NODES == 0
        try:  # ctypes prints and drops exceptions
            if log.interrupted and threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            if self._tick is not None and self._raised is None:
                self._tick()
        except BaseException as error:
            self._raised = error
        return self._raised is None
