"""What the processor has used, where the machine tells: the counters that Linux calls powercap.

Knows files of counters; nothing of what was done meanwhile. (Energy of GPUs is not read.)
https://docs.kernel.org/power/powercap/powercap.html
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/class/powercap")
_MICRO = 1e-6


class Meter:
    """Adds up the packages' counters, which begin anew at their ends."""

    def __init__(self, root: Path = _ROOT) -> None:
        # intel-rapl:0 is a package (of AMD's processors too); intel-rapl:0:0 a part of it.
        self._zones = [
            zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1
        ]
        self._before = [_read(zone / "energy_uj") for zone in self._zones]
        self._ranges = [_read(zone / "max_energy_range_uj") for zone in self._zones]
        self._used = 0

    def joules(self) -> float | None:
        """Used since this meter was made; None where nobody tells, or only to others."""
        now = [_read(zone / "energy_uj") for zone in self._zones]
        if not now or None in now or None in self._before:
            return None
        for new, old, span in zip(now, self._before, self._ranges, strict=True):
            assert new is not None
            assert old is not None
            if new < old and span is None:
                return None  # it began anew, and nobody knows after how much
            self._used += new - old if new >= old else new - old + (span or 0)
        self._before = now
        return self._used * _MICRO


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
