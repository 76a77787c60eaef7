"""One share of work that has phases."""

from __future__ import annotations

from ggufspec.common.progress import Phases


def test_the_share_never_falls_also_where_phases_are_added() -> None:
    heard: list[float] = []
    phases = Phases(heard.append)
    phases(0.0)
    phases.n = 4
    phases(1.0)
    phases.end()
    phases(0.5)
    phases.end()
    phases.n = 8
    phases(0.5)
    phases.end()
    phases.end()
    phases.end()
    Phases(None)(1.0)  # nobody has to listen
    assert heard == [0, 0.25, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.625]
