"""Tells how much of the processor other programs use."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from ggufspec.llama.devices import n_logical_cores

_STAT = Path("/proc/stat")
_IDLE = slice(4, 6)  # columns of a line: idle, and waiting for a disk; the first is the CPU's name


class CpuUse(NamedTuple):
    """Seconds of processor time so far: of this process, and idle (None: unknown)."""

    at: float  # seconds of a clock
    own: float
    idle: float | None  # of all logical processors that this process may use

    def n_missing(self, before: CpuUse, n_threads: int) -> float:
        """Processors that `n_threads` computing threads lacked since `before`.

        Other programs used these, or a container's limit forbade them. Where idle time is unknown
        (not on Linux), this assumes that all threads have computed, or waited by spinning.
        The system counts in steps of 10 ms: readings should be 0.1 s apart or more.
        """
        seconds = max(self.at - before.at, 1e-9)
        n_own = (self.own - before.own) / seconds
        if self.idle is None or before.idle is None:
            return max(n_threads - n_own, 0.0)
        n_idle = (self.idle - before.idle) / seconds
        n_of_others = n_logical_cores() - n_own - n_idle
        return min(max(n_threads + n_of_others - n_logical_cores(), 0.0), float(n_threads))

    def n_idle(self, before: CpuUse) -> float | None:
        """Processors that were idle on average since `before`; None: unknown."""
        if self.idle is None or before.idle is None:
            return None
        return (self.idle - before.idle) / max(self.at - before.at, 1e-9)


def cpu_use(path: Path = _STAT) -> CpuUse:
    """The processor time so far. Takes 0.04 ms with two processors, more with many."""
    return CpuUse(perf_counter(), process_time(), _idle_seconds(path))


def _idle_seconds(path: Path) -> float | None:
    try:
        usable = os.sched_getaffinity(0)
        lines = path.read_text().splitlines()
        ticks = [
            sum(map(int, line.split()[_IDLE]))
            for line in lines
            if line[:3] == "cpu" and line[3:4].isdigit() and int(line.split()[0][3:]) in usable
        ]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if any(ticks) else None
    except (AttributeError, OSError, ValueError):
        return None  # not Linux, or a sandbox that shows no times
