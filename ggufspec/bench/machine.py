"""Facts that the operating system reports: the machine, and peak memory."""

from __future__ import annotations

import platform
import sys
from typing import Any

from ggufspec.llama import devices


def describe() -> dict[str, Any]:
    """The processor, GPUs and operating system: what the measured seconds depend on."""
    return {"platform": platform.platform(), **devices.machine()}


def peak_rss() -> int | None:
    """Peak resident memory of this process so far, in bytes; None on systems without getrusage."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
