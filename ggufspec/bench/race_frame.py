"""Lays out one moment of a race as rows of styled spans, for terminals and recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ggufspec.bench.race import N_GRAMS, PLAIN, SPECULATIVE, Lane, LaneState, Race, state_at
from ggufspec.bench.race_text import TextLine, cropped, harmless, lines_of, n_cells_of, shown

Style = Literal["text", "drafted", "border", "title", "number", "bar", "fast bar", "faint"]

NARROW = 80  # cells; below, the lanes are stacked
ABOUT = {PLAIN: "the target alone", SPECULATIVE: "with a draft", N_GRAMS: "no draft model"}

_LANE_ROWS = 4  # of a lane, besides its text: two borders, the numbers, the bar
_OTHER_ROWS = 2  # the prompt above, the legend below


class Span(NamedTuple):
    """Text in one style."""

    text: str
    style: Style


SpanRow = list[Span]


@dataclass(frozen=True)
class Glyphs:
    """The characters that lines are drawn with."""

    corners: str  # upper left, upper right, lower left, lower right
    across: str
    down: str
    bar: str
    rest: str
    ellipsis: str


BOXES = Glyphs("╭╮╰╯", "─", "│", "━", "─", "…")
ASCII = Glyphs("++++", "-", "|", "#", ".", "...")


@dataclass(frozen=True)
class RaceLayout:
    """A race fitted into a terminal: text does not move, it only appears."""

    race: Race
    width: int
    lane_width: int
    stacked: bool
    n_text_rows: int  # of each lane
    lines: tuple[Sequence[TextLine], Sequence[TextLine]]
    glyphs: Glyphs


def lay_out(race: Race, width: int, height: int, glyphs: Glyphs = BOXES) -> RaceLayout:
    """Fit a race into a terminal; side by side if it is wide enough."""
    stacked = width < NARROW
    lane_width = max(width if stacked else (width - 1) // 2, 12)
    plain, speculative = (lines_of(lane.pieces, lane_width - 4) for lane in race.lanes)
    room = height - _OTHER_ROWS
    n_rows = (room // 2 if stacked else room) - _LANE_ROWS
    n_rows = max(min(n_rows, max(len(plain), len(speculative))), 1)
    return RaceLayout(race, width, lane_width, stacked, n_rows, (plain, speculative), glyphs)


def frame(layout: RaceLayout, seconds: float) -> list[SpanRow]:
    """The rows to show so many seconds after the start, from the top."""
    race = layout.race
    states = [state_at(lane, seconds) for lane in race.lanes]
    plain, speculative = (
        _lane(layout, lane, lines, now)
        for lane, lines, now in zip(race.lanes, layout.lines, states, strict=True)
    )
    prompt = "Prompt: " + harmless(race.prompt)
    head = " " + cropped(prompt, layout.width - 2, mark=layout.glyphs.ellipsis)
    if layout.stacked:
        lanes = [*plain, *speculative]
    else:
        lanes = [
            [*left, Span(" ", "text"), *right]
            for left, right in zip(plain, speculative, strict=True)
        ]
    return [[Span(head, "faint")], *lanes, _foot(layout, min(seconds, race.seconds), states)]


def numbers(lane: Lane, now: LaneState) -> tuple[str, str]:
    """The speed of a lane, and its number of tokens."""
    speed = "" if now.tokens_per_second is None else f"{now.tokens_per_second:.1f} tokens/s"
    if now.finished:
        return speed, f"{now.n_tokens} tokens in {lane.seconds:.2f} s"
    return speed, f"{now.n_tokens} of {len(lane.tokens)}"


def lead(race: Race, states: Sequence[LaneState]) -> str:
    if all(now.finished for now in states):
        return "" if race.speedup is None else f"{race.speedup:.2f} times as fast"
    plain, speculative = (now.tokens_per_second for now in states)
    return f"{speculative / plain:.2f} times as fast so far" if plain and speculative else ""


def _lane(
    layout: RaceLayout, lane: Lane, lines: Sequence[TextLine], now: LaneState
) -> list[SpanRow]:
    glyphs, inner = layout.glyphs, layout.lane_width - 4
    left, right = numbers(lane, now)
    right = cropped(right, inner - len(left) - 1, mark=glyphs.ellipsis)
    gap = " " * (inner - len(left) - len(right))
    n_done = round(now.share * inner)
    bar: Style = "bar" if lane is layout.race.plain else "fast bar"
    text = shown(lines, now.n_pieces)[-layout.n_text_rows :]
    rows: list[SpanRow] = [
        [Span(left, "number"), Span(gap, "text"), Span(right, "faint")],
        [Span(glyphs.bar * n_done, bar), Span(glyphs.rest * (inner - n_done), "border")],
        *([Span(run.text, "drafted" if run.drafted else "text") for run in line] for line in text),
        *([] for _ in range(layout.n_text_rows - len(text))),
    ]
    bottom = glyphs.corners[2] + glyphs.across * (inner + 2) + glyphs.corners[3]
    walled = (_walled(row, inner, glyphs) for row in rows)
    return [_top(layout, lane), *walled, [Span(bottom, "border")]]


def _walled(row: SpanRow, inner: int, glyphs: Glyphs) -> SpanRow:
    wall = Span(glyphs.down, "border")
    fill = " " * (inner - sum(n_cells_of(span.text) for span in row))
    return [wall, Span(" ", "text"), *row, Span(fill + " ", "text"), wall]


def _top(layout: RaceLayout, lane: Lane) -> SpanRow:
    glyphs, width = layout.glyphs, layout.lane_width
    about = f", {ABOUT[lane.name]}" if lane.name in ABOUT else ""
    title = cropped(lane.name, width - 6, mark=glyphs.ellipsis)
    about = about if len(title) + len(about) <= width - 6 else ""
    rest = width - 5 - len(title) - len(about)
    return [
        Span(glyphs.corners[0] + glyphs.across + " ", "border"),
        Span(title, "title"),
        Span(about + " ", "faint"),
        Span(glyphs.across * rest + glyphs.corners[1], "border"),
    ]


def _foot(layout: RaceLayout, seconds: float, states: Sequence[LaneState]) -> SpanRow:
    """The time, the speed-up, and the meaning of the colour, if there is room."""
    left = f" {seconds:.2f} s  "
    room = layout.width - len(left)
    middle = cropped(lead(layout.race, states), room, mark=layout.glyphs.ellipsis)
    used, legend = len(left) + len(middle), "drafted and accepted"
    row = [Span(left, "faint"), Span(middle, "number")]
    if used + len(legend) + 2 <= layout.width:
        gap = " " * (layout.width - 1 - used - len(legend))
        row += [Span(gap, "text"), Span(legend, "drafted")]
    return row
