"""Progress bars on stderr that appear only when something takes over a second, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ggufspec.engine.engine import Engine

_PATIENCE_SECONDS = 1.0


class LateBars:
    """Named bars, each shown once its work has lasted a second."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def update(
        self, name: str, done: float, total: float, *, unit: str = "count", label: str = ""
    ) -> None:
        """Tell how far the work of that name is. `unit`: "bytes", "share", or anything countable.

        `label`: what is shown of it just now, if not its name.
        """
        if not sys.stderr.isatty():
            return
        started = self._started.setdefault(name, monotonic())
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
        """The same for bytes, as `ggufspec.models` tells of them."""
        self.update(name, done, total, unit="bytes")

    def close(self) -> None:
        """Take the bars away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._bars.clear()
        self._started.clear()


@contextmanager
def late_bars() -> Iterator[LateBars]:
    """Bars that are gone after the block, however it ends."""
    bars = LateBars()
    try:
        yield bars
    finally:
        bars.close()


def load_with_bars(target: Path, draft: Path | None, load_settings: dict[str, Any]) -> Engine:
    """ggufspec.load, with a bar for each model that takes its time, and what it decided."""
    from ggufspec.engine.load import load

    with late_bars() as bars:
        engine = load(
            target,
            draft,
            progress=lambda whose, share: bars.update(
                f"Loading the {whose}", share, 1, unit="share"
            ),
            **load_settings,
        )
    if engine.placement:
        click.echo(f"ggufspec: {engine.placement}", err=True)
    return engine


def make_progress(unit: str) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = {
        "bytes": (DownloadColumn(), TransferSpeedColumn()),
        "share": (TaskProgressColumn(),),
    }.get(unit, (MofNCompleteColumn(),))
    return Progress(
        TextColumn("{task.description}", markup=False),  # names may have brackets
        BarColumn(),
        *amount,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
