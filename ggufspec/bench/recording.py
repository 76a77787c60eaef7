"""Writes a race as a recording: an animated SVG, or an asciicast v2 for asciinema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ggufspec.bench.race import Race, frame_times
from ggufspec.bench.race_frame import SpanRow, Style, frame, lay_out
from ggufspec.bench.race_svg import svg
from ggufspec.errors import OptionError

CAST_WIDTH, CAST_HEIGHT = 100, 28  # cells
_CAST_SECONDS = 1 / 15  # between two frames
_CAST_PAUSE = 3.0  # seconds at the end

# The 16 colours of the terminal, which are readable on any background.
SGR: dict[Style, str] = {
    "text": "",
    "drafted": "32",
    "border": "2",
    "title": "1",
    "number": "1",
    "bar": "36",
    "fast bar": "32",
    "faint": "2",
}


def check_recordable(path: Path) -> None:
    """Raise OptionError unless the suffix is that of a recording."""
    if path.suffix.lower() not in _MAKERS:
        raise OptionError(
            f"cannot record to {path.name!r}: name a file with the suffix {' or '.join(_MAKERS)}"
        )


def recording(race: Race, path: Path, speed: float = 1.0) -> bytes:
    """The content of a file of that name; with `speed` 2, it plays twice as fast."""
    check_recordable(path)
    return _MAKERS[path.suffix.lower()](race, speed).encode("utf-8")


def cast(race: Race, speed: float = 1.0) -> str:
    """An asciicast v2: a header, then events [seconds, "o", terminal output]."""
    header = {
        "version": 2,
        "width": CAST_WIDTH,
        "height": CAST_HEIGHT,
        "title": "ggufspec compare",
        "env": {"TERM": "xterm-256color"},
    }
    lines = [json.dumps(header)]
    lines += [json.dumps([round(at, 3), "o", data]) for at, data in _events(race, speed)]
    return "\n".join(lines) + "\n"


def ansi(row: SpanRow) -> str:
    """A row with escape codes; each span resets its style."""
    return "".join(
        f"\x1b[{SGR[style]}m{text}\x1b[0m" if SGR[style] and text else text for text, style in row
    )


def _events(race: Race, speed: float) -> Iterator[tuple[float, str]]:
    layout = lay_out(race, CAST_WIDTH, CAST_HEIGHT)
    before: list[str] = []
    start = "\x1b[?25l\x1b[2J"
    for at in frame_times(race, _CAST_SECONDS * speed):
        rows = [ansi(row) for row in frame(layout, at)]
        before += [""] * (len(rows) - len(before))
        data = start + "".join(
            f"\x1b[{i + 1};1H\x1b[2K{row}"
            for i, (row, old) in enumerate(zip(rows, before, strict=True))
            if row != old
        )
        if data:
            yield at / speed, data
        before, start = rows, ""
    yield race.seconds / speed + _CAST_PAUSE, f"\x1b[{len(before) + 1};1H\x1b[?25h"


_MAKERS = {".svg": svg, ".cast": cast}
