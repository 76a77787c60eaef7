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
    """Seconds of processor time so far, on the `n_usable` processors that this process may use.

    `at`: of a clock. `own`: of this process. `idle`: None: unknown. `n_running`: threads of all
    programs that run or wait for a processor now; None: unknown.
    """

    at: float
    own: float
    idle: float | None
    n_running: int | None
    n_usable: int

    def n_others(self, before: CpuUse) -> float | None:
        """Processors that other programs have used since `before`; None: unknown.

        The system counts in steps of 10 ms: readings should be 0.1 s apart or more.
        """
        if self.idle is None or before.idle is None:
            return None
        used = self.own - before.own + self.idle - before.idle
        return max(self.n_usable - used / self._seconds(before), 0.0)

    def n_missing(self, before: CpuUse, n_threads: int) -> float:
        """Processors that `n_threads` computing threads lacked since `before`.

        Where idle time is unknown (not on Linux), this assumes that all threads have computed, or
        waited by spinning.
        """
        n_others = self.n_others(before)
        if n_others is None:
            n_missing = n_threads - (self.own - before.own) / self._seconds(before)
        else:
            n_missing = n_threads + n_others - self.n_usable
        return min(max(n_missing, 0.0), float(n_threads))

    def _seconds(self, before: CpuUse) -> float:
        return max(self.at - before.at, 1e-9)


def cpu_use(path: Path = _STAT) -> CpuUse:
    """The processor time so far. Takes 0.04 ms with two processors, more with many."""
    found = CpuUse(perf_counter(), process_time(), None, None, n_logical_cores())
    try:
        usable = os.sched_getaffinity(0)
        rows = [line.split() for line in path.read_text().splitlines()]
        ticks = [
            sum(map(int, row[_IDLE]))
            for row in rows
            if row[0][:3] == "cpu" and row[0][3:].isdigit() and int(row[0][3:]) in usable
        ]
        n_running = [int(row[1]) for row in rows if row[0] == "procs_running"]
    except (AttributeError, OSError, ValueError, IndexError):
        return found  # not Linux
    if not any(ticks):
        return found  # a sandbox that shows no times
    found = found._replace(idle=sum(ticks) / os.sysconf("SC_CLK_TCK"))
    # Where this process may not use all processors, others may run on those.
    is_limited = len(usable) < (os.cpu_count() or 0)
    return found if is_limited or not n_running else found._replace(n_running=n_running[0])
