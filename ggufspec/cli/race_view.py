"""Replays a race on a terminal, and prints its end."""

from __future__ import annotations

import sys
from time import monotonic, sleep

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ggufspec.bench.race import Race
from ggufspec.bench.race_frame import ASCII, BOXES, frame, lay_out
from ggufspec.bench.recording import ansi
from ggufspec.cli.render import can_write

_FRAME_SECONDS = 1 / 20
_ENDLESS = 1_000_000  # rows: the final output may scroll


def show(race: Race, speed: float, *, color: bool) -> bool:
    """Play a race on the alternate screen, then print both whole texts; 0: print them only.

    `color`: whether to send escape codes for styles. Returns whether the user interrupted it.
    """
    glyphs = BOXES if can_write("╭─━…") else ASCII
    console = Console(file=sys.stdout, highlight=False)

    def picture(seconds: float, height: int) -> Group:
        rows = frame(lay_out(race, console.width, height, glyphs), seconds)
        lines = (ansi(row) if color else "".join(text for text, _ in row) for row in rows)
        return Group(*(Text.from_ansi(line, no_wrap=True, overflow="crop") for line in lines))

    interrupted = False
    try:
        if speed:
            with Live(
                picture(0.0, console.height),
                console=console,
                screen=True,
                auto_refresh=False,
                vertical_overflow="crop",
            ) as live:
                start, seconds = monotonic(), 0.0
                while seconds < race.seconds:
                    sleep(_FRAME_SECONDS)
                    seconds = (monotonic() - start) * speed
                    live.update(picture(seconds, console.height), refresh=True)
    except KeyboardInterrupt:
        interrupted = True
    console.print(picture(race.seconds, _ENDLESS))
    return interrupted
