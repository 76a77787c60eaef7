"""Tells whether other programs disturb a measurement: it is then repeated, and never stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from time import perf_counter, sleep
from typing import TypeVar

from ggufspec.llama.cpu_use import VARIABLE, cpu_use

_N_ATTEMPTS = 2
_LOOK_SECONDS = 0.1  # at other programs, before anything is measured
_SURE_SECONDS = 0.25  # of measuring, after which other programs' use of the processor is certain
_FACTOR = 1.5  # times the pass over more tokens, above which one over fewer was disturbed

Result = TypeVar("Result")


class Disturbed(Exception):
    """Other programs use the processor: passes take up to 20 times as long, each another factor."""


class Watch:
    """Raises Disturbed where threads of a measurement lack a processor, from its making on.

    The one rule: other programs leave fewer processors than threads, now or on average since the
    beginning, or a pass took clearly longer than one over more tokens. Where the system does not
    tell what programs use, only the last part holds; with GGUFSPEC_MEASURE=always none of the first
    two.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads, self._knows = n_threads, os.environ.get(VARIABLE) != "always"
        self._began = cpu_use()
        if self._began.n_running and self._knows:
            sleep(_LOOK_SECONDS)
            self.end()

    def check(self) -> None:
        """Within a measurement, between passes."""
        if perf_counter() - self._began.at > _SURE_SECONDS:
            self.end()

    def end(self, seconds: Mapping[tuple[int, int], float] | None = None) -> None:
        """At the end of a measurement; `seconds`: of passes of one kind, by (tokens, depth)."""
        if self._knows and cpu_use().is_disturbed(self._began, self._n_threads):
            raise Disturbed
        by_size = sorted((seconds or {}).items(), key=lambda each: (each[0][1], each[0][0]))
        for few, many in pairwise(by_size):
            if few[0][1] == many[0][1] and few[1] > _FACTOR * many[1]:
                raise Disturbed


def undisturbed(measure: Callable[[Watch], Result], n_threads: int) -> Result | None:
    """What `measure` returns; None if other programs disturb each attempt. Store only the former.

    measure: it calls `Watch.check` between passes, and `Watch.end`.
    """
    for _ in range(_N_ATTEMPTS):
        try:
            return measure(Watch(n_threads))
        except Disturbed:
            continue
    return None
