"""Replays a race on a terminal; records it as an asciicast v2, or an SVG animated by CSS alone."""

from __future__ import annotations

import json
import re
import sys
from io import StringIO
from pathlib import Path
from time import monotonic, sleep

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ggufspec.bench.race import N_GRAMS, PLAIN, SPECULATIVE, Lane, Race, state_at
from ggufspec.common.facts import counted, visible
from ggufspec.errors import OptionError

NARROW = 80  # cells; in narrower terminals the lanes are stacked
_ABOUT = {PLAIN: "the target alone", SPECULATIVE: "with a draft", N_GRAMS: "no draft model"}
_DRAFTED = "green"
_FRAME_SECONDS = 1 / 20
_ENDLESS = 1_000_000  # rows: the final output may scroll
_BESIDE_TEXT = 4  # cells of a panel: two borders, two blanks
_LANE_ROWS = 4  # of a lane, besides its text: two borders, the numbers, the bar
_OTHER_ROWS = 2  # the prompt above, the legend below
WIDTH, HEIGHT = 100, 28  # cells of a recording
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


def show(race: Race, speed: float, *, color: bool) -> bool:
    """Play a race on the alternate screen, then print both texts; `speed` 0: only print.

    `color`: whether to send escape codes for styles. Returns whether the user interrupted the race.
    """
    console = Console(
        file=sys.stdout, highlight=False, color_system="auto" if color else None, no_color=not color
    )
    interrupted = False
    try:
        if speed:
            first = picture(race, 0.0, console, console.height)
            with Live(first, console=console, screen=True, auto_refresh=False) as live:
                start, seconds = monotonic(), 0.0
                while seconds < race.seconds:
                    sleep(_FRAME_SECONDS)
                    seconds = (monotonic() - start) * speed
                    live.update(picture(race, seconds, console, console.height), refresh=True)
    except KeyboardInterrupt:
        interrupted = True
    console.print(picture(race, race.seconds, console, _ENDLESS))
    return interrupted


def picture(race: Race, seconds: float, console: Console, height: int) -> Group:
    """Both lanes at a time of the race, side by side if the console is wide enough."""
    is_narrow = console.width < NARROW
    width = console.width if is_narrow else (console.width - 1) // 2
    lines = [_lines(lane, console, width - _BESIDE_TEXT) for lane in race.lanes]
    n_rows = (height - _OTHER_ROWS) // (2 if is_narrow else 1) - _LANE_ROWS
    n_rows = max(min(n_rows, max(map(len, lines))), 1)
    bar = "#." if console.options.ascii_only else "━─"
    lanes: list[RenderableType] = [
        _lane(lane, of_lane, n_rows, width, seconds, bar)
        for lane, of_lane in zip(race.lanes, lines, strict=True)
    ]
    if not is_narrow:
        row = Table.grid(padding=(0, 1))
        row.add_row(*lanes)
        lanes = [row]
    prompt = " ".join(visible(race.prompt).split())
    head = Text(f" Prompt: {prompt}", "dim", no_wrap=True, overflow="ellipsis")
    return Group(head, *lanes, _foot(race, min(seconds, race.seconds)))


def _lane(
    lane: Lane, lines: list[tuple[int, Text]], n_rows: int, width: int, seconds: float, bar: str
) -> Panel:
    now = state_at(lane, seconds)
    n_letters = sum(len(piece) for piece in _pieces(lane)[: now.n_pieces])
    shown = [line[: n_letters - start] for start, line in lines if start < n_letters][-n_rows:]
    speed = "" if now.tokens_per_second is None else f"{now.tokens_per_second:.1f} tokens/s"
    amount = f"{now.n_tokens} of {len(lane.tokens)}"
    if now.finished:
        amount = f"{counted(now.n_tokens, 'token')} in {lane.seconds:.2f} s"
    numbers = _two_ends(Text(speed, "bold"), Text(amount, "dim"))
    n_done = round(now.share * (width - _BESIDE_TEXT))
    done = (bar[0] * n_done, "cyan" if lane.name == PLAIN else _DRAFTED)
    share = Text.assemble(done, (bar[1] * (width - _BESIDE_TEXT - n_done), "dim"))
    rows = [*shown, *[Text()] * (n_rows - len(shown))]
    about = f", {_ABOUT[lane.name]}" if lane.name in _ABOUT else ""
    title = Text.assemble((visible(lane.name), "bold"), about)
    body = Group(numbers, share, *rows)
    return Panel(body, title=title, title_align="left", border_style="dim", width=width)


def _lines(lane: Lane, console: Console, width: int) -> list[tuple[int, Text]]:
    whole = Text()
    for piece, text in zip(lane.pieces, _pieces(lane), strict=True):
        whole.append(text, _DRAFTED if piece.drafted else None)
    found, start = [], 0
    for line in whole.wrap(console, max(width, 2)):
        start = whole.plain.find(line.plain, start)
        found.append((start, line))
        start += len(line)
    return found


def _pieces(lane: Lane) -> list[str]:
    return [visible(piece.text.replace("\t", "    ")) for piece in lane.pieces]


def _foot(race: Race, seconds: float) -> Table:
    states = [state_at(lane, seconds) for lane in race.lanes]
    plain, speculative = (now.tokens_per_second for now in states)
    lead = ""
    if plain and speculative:
        has_ended = all(now.finished for now in states)
        lead = f"{speculative / plain:.2f} times as fast{'' if has_ended else ' so far'}"
    left = Text.assemble((f" {seconds:.2f} s  ", "dim"), (lead, "bold"))
    return _two_ends(left, Text("drafted and accepted ", _DRAFTED))


def _two_ends(left: Text, right: Text) -> Table:
    row = Table.grid(expand=True)
    row.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    row.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    row.add_row(left, right)
    return row


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
