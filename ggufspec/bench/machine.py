"""Reads facts from the operating system: the machine, peak memory, the processor's energy."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from ggufspec.llama import devices

_ROOT = Path("/sys/class/powercap")
_MICRO = 1e-6


def describe() -> dict[str, Any]:
    """The processor, GPUs and operating system, on which measured seconds depend."""
    return {"platform": platform.platform(), **devices.machine()}


def peak_rss() -> int | None:
    """Peak resident memory of this process so far, in bytes; None on systems without getrusage."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class EnergyMeter:
    """Sums the energy counters of all processor packages (Linux powercap; no GPUs).

    https://docs.kernel.org/power/powercap/powercap.html
    """

    def __init__(self, root: Path = _ROOT) -> None:
        # intel-rapl:0 is a package (on AMD processors too); intel-rapl:0:0 is a part of it.
        self._zones = [
            zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1
        ]
        self._before = [_read(zone / "energy_uj") for zone in self._zones]
        self._ranges = [_read(zone / "max_energy_range_uj") for zone in self._zones]
        self._used = 0

    def joules(self) -> float | None:
        """Energy used since this meter was created; None if the counters cannot be read."""
        now = [_read(zone / "energy_uj") for zone in self._zones]
        if not now or None in now or None in self._before:
            return None
        for new, old, span in zip(now, self._before, self._ranges, strict=True):
            assert new is not None
            assert old is not None
            if new < old and span is None:
                return None  # the counter wrapped around, and its range is unknown
            self._used += new - old if new >= old else new - old + (span or 0)
        self._before = now
        return self._used * _MICRO


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
