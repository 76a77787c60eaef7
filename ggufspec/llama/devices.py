"""What this machine computes with. For now: how many threads a model should use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def n_threads_default() -> int:
    """Physical cores that this process may use: two threads on one only get in each other's way."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    if usable is not None:
        return max(len({_siblings(cpu) for cpu in usable}), 1)
    if sys.platform == "darwin":
        # Apple Silicon: the efficiency cores would hold the others up at every barrier.
        for key in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            asked = subprocess.run(
                ["sysctl", "-n", key], capture_output=True, text=True, check=False
            )
            if asked.returncode == 0 and asked.stdout.strip().isdigit():
                return int(asked.stdout)
    return max((os.cpu_count() or 2) // 2, 1)


def physical_memory() -> int | None:
    """Bytes of memory of this machine; None where the platform does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _siblings(cpu: int) -> str:
    """A name for the core of a logical processor; its own where Linux does not tell."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)
