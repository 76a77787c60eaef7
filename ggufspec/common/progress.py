"""Types of the progress callbacks that callers may pass, and the share of work in phases."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (n_done, n_total), in units of the work
NamedProgress = Callable[[str, int, int], None]  # (name of the step, n_done, n_total)
# What is done, and its share up to 1: "kernels" (tried), "target", "draft"
# (loaded, and its kernels measured), "contexts" (made, and attention measured), "draft texts".
LoadProgress = Callable[[str, float], None]
Share = Callable[[float], None]  # the share of the work that is done, up to 1


class Phases:
    """Reports the share of work that consists of phases, from the share of the current one."""

    def __init__(self, report: Share | None) -> None:
        """`report`: gets shares that never fall."""
        self.n = 1  # phases; set it to more as soon as it is known
        self._report = report
        self._n_done = 0
        self._most = 0.0

    def __call__(self, share: float) -> None:
        self._most = max(self._most, min((self._n_done + share) / self.n, 1.0))
        if self._report is not None:
            self._report(self._most)

    def end(self) -> None:
        """The current phase is done; the next one begins."""
        self._n_done += 1
        self(0.0)
