"""Types of the progress callbacks that callers may pass."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (done, of), in units of the work
NamedProgress = Callable[[str, int, int], None]  # (what is being done, done, of)
