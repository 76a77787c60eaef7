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
    n_running: int | None = None  # threads of all programs that run or wait for a processor

    def n_others(self, before: CpuUse) -> float | None:
        """Processors that other programs have used since `before`; None: unknown.

        The system counts in steps of 10 ms: readings should be 0.1 s apart or more.
        """
        if self.idle is None or before.idle is None:
            return None
        used = self.own - before.own + self.idle - before.idle
        return max(n_logical_cores() - used / self._seconds(before), 0.0)

    def n_missing(self, before: CpuUse, n_threads: int) -> float:
        """Processors that `n_threads` computing threads lacked since `before`.

        Where idle time is unknown (not on Linux), this assumes that all threads have computed, or
        waited by spinning.
        """
        n_others = self.n_others(before)
        if n_others is None:
            n_missing = n_threads - (self.own - before.own) / self._seconds(before)
        else:
            n_missing = n_threads + n_others - n_logical_cores()
        return min(max(n_missing, 0.0), float(n_threads))

    def _seconds(self, before: CpuUse) -> float:
        return max(self.at - before.at, 1e-9)


def cpu_use(path: Path = _STAT) -> CpuUse:
    """The processor time so far. Takes 0.04 ms with two processors, more with many."""
    own = perf_counter(), process_time()
    try:
        usable = os.sched_getaffinity(0)
        rows = [line.split() for line in path.read_text().splitlines()]
        ticks = [
            sum(map(int, row[_IDLE]))
            for row in rows
            if row[0][3:].isdigit() and row[0][:3] == "cpu" and int(row[0][3:]) in usable
        ]
        if not any(ticks):
            return CpuUse(*own, None)  # a sandbox that shows no times
        n_running = None
        if len(usable) == os.cpu_count():
            n_running = next((int(row[1]) for row in rows if row[0] == "procs_running"), None)
        return CpuUse(*own, sum(ticks) / os.sysconf("SC_CLK_TCK"), n_running)
    except (AttributeError, OSError, ValueError, IndexError):
        return CpuUse(*own, None)  # not Linux
