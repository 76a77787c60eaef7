"""Replays a race on a terminal, and prints its end."""

from __future__ import annotations

import sys
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final

from ggufspec.cli.render import can_write, tolerate_letters

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ggufspec.bench.race import Race
    from ggufspec.bench.race_frame import SpanRow, Style

_FRAME_SECONDS = 1 / 20
_ENDLESS = 1_000_000  # rows: the final output may scroll

_STYLES: Final[dict[Style, str]] = {
    "text": "",
    "drafted": "green",
    "border": "dim",
    "title": "bold",
    "number": "bold",
    "bar": "cyan",
    "fast bar": "green",
    "faint": "dim",
}


class RaceView:
    """Shows one race on a terminal. `color`: whether to send escape codes for styles."""

    def __init__(self, race: Race, *, color: bool, console: Console | None = None) -> None:
        from rich.console import Console

        from ggufspec.bench.race_frame import ASCII, BOXES

        tolerate_letters()
        self._glyphs = BOXES if can_write("╭─━…") else ASCII
        self._race = race
        self._color = color
        self._console = console or Console(file=sys.stdout, highlight=False)

    def replay(self, speed: float) -> None:
        """Play it at `speed` times the original speed on the alternate screen.

        The normal screen is always restored. Raises KeyboardInterrupt.
        """
        from rich.live import Live

        with Live(
            self._picture(0.0),
            console=self._console,
            screen=True,
            auto_refresh=False,
            vertical_overflow="crop",
        ) as live:
            start = monotonic()
            seconds = 0.0
            while seconds < self._race.seconds:
                sleep(_FRAME_SECONDS)
                seconds = (monotonic() - start) * speed
                live.update(self._picture(seconds), refresh=True)

    def end(self) -> None:
        """Print the end: both whole texts."""
        self._console.print(self._picture(self._race.seconds, height=_ENDLESS))

    def _picture(self, seconds: float, height: int | None = None) -> RenderableType:
        """The picture for the current size of the terminal."""
        from rich.console import Group

        from ggufspec.bench.race_frame import frame, lay_out

        size = self._console.size
        layout = lay_out(self._race, size.width, height or size.height, self._glyphs)
        return Group(*(self._line(row) for row in frame(layout, seconds)))

    def _line(self, row: SpanRow) -> RenderableType:
        from rich.text import Text

        styled = ((text, _STYLES[style] if self._color else "") for text, style in row)
        return Text.assemble(*styled, no_wrap=True, overflow="crop")
