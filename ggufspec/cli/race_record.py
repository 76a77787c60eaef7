"""Writes a race as an asciicast v2, or as an SVG that is animated by CSS alone."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from ggufspec.bench.race import Race
from ggufspec.cli.race_view import picture
from ggufspec.errors import OptionError

WIDTH, HEIGHT = 100, 28  # cells
_TITLE = "ggufspec compare"
_PER_SECOND = 20
_MOST_FRAMES = {".svg": 80, ".cast": 1200}
_MOST_BYTES = 500_000  # of an SVG; the number of frames is halved until it fits
_LEAD_IN, _PAUSE = 0.8, 4.0  # seconds before and after the race; an SVG plays in a loop
_PARTS = "{width}\0{height}\0translate({terminal_x},{terminal_y})\0{chrome}\0{styles}\0{matrix}"
_TEXT = re.compile(r'<text class="(\S+)" ([^<>]*) clip-path="[^"]*">(.*?)</text>')
_STYLE = (
    "text{font:20px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"
)


def check_recordable(path: Path) -> None:
    """Raise OptionError unless the suffix is .svg or .cast."""
    if path.suffix.lower() not in _MOST_FRAMES:
        raise OptionError(
            f"cannot record to {path.name!r}: name a file with the suffix .svg or .cast"
        )


def recording(race: Race, path: Path, speed: float = 1.0) -> bytes:
    """The content of the file `path`; with `speed` 2, it plays twice as fast."""
    suffix = path.suffix.lower()
    n_steps = 1 + int(min(race.seconds / speed * _PER_SECOND, _MOST_FRAMES[suffix]))
    while True:
        times = [race.seconds * i / n_steps for i in range(n_steps + 1)]
        data = (_svg if suffix == ".svg" else _cast)(race, times, speed).encode()
        if suffix == ".cast" or len(data) <= _MOST_BYTES or n_steps == 1:
            return data
        n_steps //= 2


def _console() -> Console:
    size = {"width": WIDTH, "height": HEIGHT}
    how = {"record": True, "color_system": "standard", "force_terminal": True, "no_color": False}
    return Console(file=StringIO(), highlight=False, legacy_windows=False, **size, **how)  # type: ignore[arg-type]


def _cast(race: Race, times: list[float], speed: float) -> str:
    """An asciicast: a header, then events [seconds, "o", output], which write the changed rows."""
    console = _console()
    events: list[tuple[float, str]] = []
    before: list[str] = [""] * HEIGHT
    start = "\x1b[?25l\x1b[2J"
    for at in times:
        console.print(picture(race, at, console, HEIGHT))
        rows = console.export_text(styles=True).splitlines()
        changed = (
            f"\x1b[{i};1H\x1b[2K{row}"
            for i, (row, old) in enumerate(zip(rows, before, strict=False), 1)
            if row != old
        )
        events.append((at / speed, start + "".join(changed)))
        before, start = rows, ""
    events.append((race.seconds / speed + _PAUSE, f"\x1b[{len(before) + 1};1H\x1b[?25h"))
    header = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": _TITLE}
    lines = [header, *([round(at, 3), "o", data] for at, data in events if data)]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _svg(race: Race, times: list[float], speed: float) -> str:
    """An SVG with each piece of text once per run of frames; without animation, the last frame."""
    console = _console()
    frames_of: dict[str, list[int]] = {}
    for i, at in enumerate(times):
        console.print(picture(race, at, console, HEIGHT))
        parts = console.export_svg(title=_TITLE, code_format=_PARTS, unique_id="r").split("\0")
        width, height, origin, chrome, styles, matrix = parts
        rules = dict(re.findall(r"\.(\S+) \{ (.*?) \}", styles))
        for name, attributes, text in _TEXT.findall(matrix):
            shown = text.replace("&#160;", "\u00a0")  # a shorter form
            element = f'{attributes} style="{rules[name]}">{shown}</text>'
            frames_of.setdefault(element, []).append(i)
    loop = _LEAD_IN + race.seconds / speed + _PAUSE
    starts = [0.0, *(100 * (_LEAD_IN + at / speed) / loop for at in times[1:]), 100.0]
    animations, texts = {}, []
    for element, frames in frames_of.items():
        for first in (i for i in frames if i - 1 not in frames):
            last = next(i for i in range(first, len(times)) if i + 1 not in frames)
            name = f"k{first}-{last}"
            end = "visible" if last == len(times) - 1 else "hidden"
            before = "0%{visibility:hidden}" if first else ""
            animations[name] = (
                f".{name}{{visibility:{end};animation:{name} {loop:.2f}s step-end infinite}}"
                f"@keyframes {name}{{{before}{starts[first]:.2f}%{{visibility:visible}}"
                f"{starts[last + 1]:.2f}%{{visibility:{end}}}}}"
            )
            texts.append(f'<text class="{name}" {element}')
    label = "" if race.speedup is None else f": {race.speedup:.2f} times as fast"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="Plain and speculative decoding side by side{label}">',
            *("<style>", _STYLE, *animations.values(), "</style>", chrome),
            *(f'<g transform="{origin}">', *texts, "</g>", "</svg>", ""),
        ]
    )
