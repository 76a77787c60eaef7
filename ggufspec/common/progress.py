"""Types of the progress callbacks that callers may pass."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (n_done, n_total), in units of the work
NamedProgress = Callable[[str, int, int], None]  # (name of the step, n_done, n_total)
