"""Tells how much of the processor other programs use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from ggufspec.llama.devices import n_logical_cores

VARIABLE = "GGUFSPEC_MEASURE"  # "always": also beside other programs, or "auto"

_STAT = Path("/proc/stat")
_IDLE = slice(4, 6)  # columns of a line: idle, and waiting for a disk; the first is the CPU's name

_DISTURBED = 0.3  # processors that threads may lack while passes are measured


class CpuUse(NamedTuple):
    """Seconds of processor time so far, on the `n_usable` processors that this process may use.

    `at`: of a clock. `own`: of this process. `idle`: None: unknown. `n_running`: threads of other
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
        return max(self.n_usable - used / max(self.at - before.at, 1e-9), 0.0)

    def is_disturbed(self, before: CpuUse, n_threads: int) -> bool:
        """Whether `n_threads` threads lacked a processor since `before`; False where unknown."""
        n_others = self.n_others(before)
        return n_others is not None and n_threads + n_others - self.n_usable > _DISTURBED


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
    # Where this process may not use all processors, other programs may run on the rest.
    is_limited = len(usable) < (os.cpu_count() or 0)
    if is_limited or not n_running:
        return found
    n_others = n_running[0] - 1  # one is this thread
    if n_others > 0:
        n_others = max(n_running[0] - _n_own_running(path.parent / "self/task"), 0)
    return found._replace(n_running=n_others)


def _n_own_running(tasks: Path) -> int:
    n = 0
    for file in tasks.glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            n += file.read_bytes().rpartition(b")")[2].split()[:1] == [b"R"]
    return max(n, 1)
