"""Replays a race on a terminal, and prints its end."""

from __future__ import annotations

import sys
from time import monotonic, sleep

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ggufspec.bench.race import N_GRAMS, PLAIN, SPECULATIVE, Lane, Race, state_at
from ggufspec.common.facts import visible

NARROW = 80  # cells; in narrower terminals the lanes are stacked
_ABOUT = {PLAIN: "the target alone", SPECULATIVE: "with a draft", N_GRAMS: "no draft model"}
_DRAFTED = "green"
_FRAME_SECONDS = 1 / 20
_ENDLESS = 1_000_000  # rows: the final output may scroll
_BESIDE_TEXT = 4  # cells of a panel: two borders, two blanks
_LANE_ROWS = 4  # of a lane, besides its text: two borders, the numbers, the bar
_OTHER_ROWS = 2  # the prompt above, the legend below


def show(race: Race, speed: float, *, color: bool) -> bool:
    """Play a race on the alternate screen, then print both texts; `speed` 0: only print.

    `color`: whether to send escape codes for styles. Returns whether the user interrupted the race.
    """
    console = Console(
        file=sys.stdout,
        highlight=False,
        color_system="auto" if color else None,
        no_color=not color,
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
        amount = f"{now.n_tokens} tokens in {lane.seconds:.2f} s"
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
    """Lines of the whole text (so that no word moves later), each with the index of its start."""
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
    """The time, the speed-up, and the meaning of the colour."""
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
