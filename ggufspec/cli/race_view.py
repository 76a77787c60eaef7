"""Replays a race on a terminal, and prints its end."""

from __future__ import annotations

import sys
from time import monotonic, sleep

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ggufspec.bench.race import Race
from ggufspec.bench.race_frame import ASCII, BOXES, SpanRow, frame, lay_out
from ggufspec.bench.recording import ansi
from ggufspec.cli.render import can_write, tolerate_letters

_FRAME_SECONDS = 1 / 20
_ENDLESS = 1_000_000  # rows: the final output may scroll


class RaceView:
    """Shows one race on a terminal. `color`: whether to send escape codes for styles."""

    def __init__(self, race: Race, *, color: bool) -> None:
        tolerate_letters()
        self._glyphs = BOXES if can_write("╭─━…") else ASCII
        self._race = race
        self._color = color
        self._console = Console(file=sys.stdout, highlight=False)

    def replay(self, speed: float) -> None:
        """Play it at `speed` times the original speed on the alternate screen.

        The normal screen is always restored. Raises KeyboardInterrupt.
        """
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

    def _picture(self, seconds: float, height: int | None = None) -> Group:
        size = self._console.size
        layout = lay_out(self._race, size.width, height or size.height, self._glyphs)
        return Group(*(self._line(row) for row in frame(layout, seconds)))

    def _line(self, row: SpanRow) -> Text:
        text = ansi(row) if self._color else "".join(text for text, _ in row)
        return Text.from_ansi(text, no_wrap=True, overflow="crop")
