"""Progress bars on stderr for work of over a second; without a terminal, occasional lines."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ggufspec.cli import render

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ggufspec.engine.engine import Engine
    from ggufspec.models.heads import DraftFile

_PATIENCE_SECONDS = 1.0
_LINE_SECONDS = 10.0  # between two lines, without a terminal
_WORK = {"costs": "Measuring the pair", "vocabulary": "Reading the vocabulary"}


class LateBars:
    """Named bars, each shown once its work has lasted a second."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[float, float]] = {}  # start time, and progress at that time
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        self._printed = 0.0  # time of the last line

    def update(
        self,
        name: str,
        done: float,
        total: float,
        *,
        unit: str = "count",
        label: str = "",
        in_lines: bool = False,
    ) -> None:
        """Show the progress of the work `name`. `unit`: "bytes", "share", or anything countable.

        `label`: shown instead of the name. `in_lines`: without a terminal, print a line from time
        to time.
        """
        started, n_first = self._started.setdefault(name, (monotonic(), done))
        if not sys.stderr.isatty():
            if in_lines and monotonic() - max(self._printed, started) > _LINE_SECONDS:
                self._printed = monotonic()
                left = (self._printed - started) / max(done - n_first, 1) * (total - done)
                line = f"{done / total:4.0%}, about {left:.0f} s left: {label or name}"
                render.echo(line, err=True)
            return
        if name not in self._bars:
            if monotonic() - started < _PATIENCE_SECONDS or done >= total:
                return
            if self._progress is None:
                self._progress = make_progress(unit)
                self._progress.start()
            self._bars[name] = self._progress.add_task(name, total=total)
        if self._progress is not None:
            self._progress.update(self._bars[name], completed=done, description=label or name)

    def download(self, name: str, done: int, total: int) -> None:
        """Show the progress of a download; a callback for `ggufspec.models`."""
        self.update(name, done, total, unit="bytes")

    def prompt(self, whose: str, done: int, total: int) -> None:
        """Show the progress of work before a text; a callback for `Engine.stream`."""
        what = _WORK.get(whose, f"Processing the prompt ({whose})")
        self.update(what, done, total)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._bars.clear()
        self._started.clear()


def late_bars() -> closing[LateBars]:
    """A context whose bars are removed at the end of the block, also after an error."""
    return closing(LateBars())


def load_with_bars(target: Path, draft: DraftFile | None, load_settings: dict[str, Any]) -> Engine:
    """ggufspec.load with a bar for each slow model; prints its notes on stderr."""
    from ggufspec.engine.load import load

    with late_bars() as bars:
        engine = load(
            target,
            draft,
            progress=lambda whose, share: bars.update(
                f"Loading the {whose}", share, 1, unit="share"
            ),
            **{"n_remembered": 0, "cache_ram": 0, **load_settings},
        )
    for line in engine.notes:
        render.note(line)
    return engine


def make_progress(unit: str) -> Progress:
    from rich import progress
    from rich.console import Console

    amount = {
        "bytes": (progress.DownloadColumn(), progress.TransferSpeedColumn()),
        "share": (progress.TaskProgressColumn(),),
    }.get(unit, (progress.MofNCompleteColumn(),))
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),  # names may have brackets
        progress.BarColumn(),
        *amount,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
