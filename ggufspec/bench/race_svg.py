"""Writes a race as an SVG that CSS alone animates; without animation, it shows the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from ggufspec.bench.race import Lane, Race, frame_times, state_at
from ggufspec.bench.race_frame import ABOUT, lead, numbers
from ggufspec.bench.race_text import TextLine, cropped, harmless, lines_of

_CELL, _ROW = 7.8, 20  # pixels; a cell of a monospaced font of 13 pixels
_N_CELLS = 50  # of a line of text
_PAD, _GAP, _EDGE = 18, 16, 20  # inside a lane, between the lanes, around them
_LANE = int(_N_CELLS * _CELL) + 2 * _PAD
_WIDTH = 2 * _LANE + _GAP + 2 * _EDGE
_TOP = 54  # where the lanes begin
_TEXT_TOP = 84  # of a lane, where its text begins
_MOST_ROWS = 18  # more scroll

_LEAD_IN, _PAUSE = 0.8, 4.0  # seconds of the loop before and after the race
_COUNTERS_EACH, _MOST_COUNTERS = 0.2, 60  # seconds; and how many at most

_STYLE = """\
.t{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",\
monospace;fill:#d4dbe3;white-space:pre}
.d{fill:#56d364}.f{fill:#8b949e}.n{fill:#f0f6fc;font-weight:600}
.h{font-size:15px}.r{text-anchor:end}
.c>*{visibility:hidden}.c>:last-child{visibility:visible}
"""


def svg(race: Race, speed: float = 1.0) -> str:
    """The document; it plays in a loop, at `speed` times the original speed."""
    each = max(_COUNTERS_EACH * speed, race.seconds / _MOST_COUNTERS)
    clock = _Clock(race, speed, frame_times(race, each))
    lines = [lines_of(lane.pieces, _N_CELLS) for lane in race.lanes]
    n_rows = min(max(*map(len, lines), 1), _MOST_ROWS)
    lane_height = _TEXT_TOP + n_rows * _ROW + 8
    height = _TOP + lane_height + 48
    body = [_prompt(race)]
    for i, lane in enumerate(race.lanes):
        body.append(f'<g transform="translate({_EDGE + i * (_LANE + _GAP)},{_TOP})">')
        body += _card(lane, lane_height, drafted=lane is race.speculative)
        body += _counters(lane, clock)
        body += _bar(lane, clock, drafted=lane is race.speculative)
        body += _text(lane, lines[i], n_rows, clock)
        body.append("</g>")
    body += _foot(race, clock, height, speed)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" xml:space="preserve" role="img" '
            f"aria-label={_label(race)}>",
            f"<style>{_STYLE}{clock.rules()}"
            "@media (prefers-reduced-motion:reduce){*{animation:none!important}}</style>",
            f'<rect width="{_WIDTH}" height="{height}" rx="12" fill="#0d1117"/>',
            f'<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="11.5" '
            'fill="none" stroke="#30363d"/>',
            *body,
            "</svg>",
            "",
        ]
    )


class _Clock:
    """Converts times into shared CSS animations; numbers may change at `moments`."""

    def __init__(self, race: Race, speed: float, moments: Sequence[float]) -> None:
        self.moments = moments
        self._speed = speed
        self._loop = _LEAD_IN + race.seconds / speed + _PAUSE
        self._names: dict[str, str] = {}

    def steps(self, changes: Iterable[tuple[float, str]]) -> str:
        """The class of what has these declarations from these seconds of the race on."""
        return self._name("".join(f"{self._share(at)}{{{style}}}" for at, style in changes))

    def seen(self, start: float, end: float | None = None) -> str:
        """The class of what is seen from `start` to `end`; None: to the end of the loop."""
        hidden, visible = "visibility:hidden", "visibility:visible"
        until = "" if end is None else f"{self._share(end)},to{{{hidden}}}"
        begin = "" if start < 0 else f"0%{{{hidden}}}"
        return self._name(f"{begin}{self._share(start)}{{{visible}}}{until or f'to{{{visible}}}'}")

    def rules(self) -> str:
        return "".join(
            f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {self._loop:.2f}s step-end "
            "infinite}"
            for frames, name in self._names.items()
        )

    def _share(self, seconds: float) -> str:
        """The position in the loop; negative times are its start."""
        at = 0.0 if seconds < 0 else _LEAD_IN + seconds / self._speed
        return f"{100 * at / self._loop:.2f}%"

    def _name(self, frames: str) -> str:
        return self._names.setdefault(frames, f"k{len(self._names)}")


def _label(race: Race) -> str:
    speedup = "" if race.speedup is None else f": {race.speedup:.2f} times as fast"
    return quoteattr(f"Plain and speculative decoding side by side{speedup}")


def _prompt(race: Race) -> str:
    n_cells = int((_WIDTH - 2 * _EDGE) / _CELL)
    return _letters(cropped("Prompt: " + harmless(race.prompt), n_cells), _EDGE + 2, 34, "f")


def _card(lane: Lane, height: int, *, drafted: bool) -> list[str]:
    about = f'<tspan class="f" dx="8">{escape(ABOUT.get(lane.name, ""))}</tspan>'
    return [
        f'<rect width="{_LANE}" height="{height}" rx="8" fill="#161b22" '
        f'stroke="{"#2ea043" if drafted else "#30363d"}"/>',
        f'<text class="t n h" x="{_PAD}" y="30">{escape(lane.name)}{about}</text>',
        f'<rect x="{_PAD}" y="58" width="{_LANE - 2 * _PAD}" height="5" rx="2.5" fill="#30363d"/>',
    ]


def _counters(lane: Lane, clock: _Clock) -> list[str]:
    numbers_at = [numbers(lane, state_at(lane, at)) for at in clock.moments]
    return [
        *_changing([speed for speed, _ in numbers_at], clock, _LANE - _PAD, 30, "n h r"),
        *_changing([amount for _, amount in numbers_at], clock, _LANE - _PAD, 50, "f r"),
    ]


def _bar(lane: Lane, clock: _Clock, *, drafted: bool) -> list[str]:
    changes = [(-1.0, "transform:scaleX(0)")]
    changes += [(at, f"transform:scaleX({state_at(lane, at).share:.3f})") for at in clock.moments]
    return [
        f'<g transform="translate({_PAD},58)"><rect class="{clock.steps(_changes(changes))}" '
        f'width="{_LANE - 2 * _PAD}" height="5" rx="2.5" '
        f'fill="{"#3fb950" if drafted else "#58a6ff"}"/></g>'
    ]


def _text(lane: Lane, lines: Sequence[TextLine], n_rows: int, clock: _Clock) -> list[str]:
    """The text, each run at its time; it scrolls if it is longer than the lane."""
    height = n_rows * _ROW
    scroll = []
    if len(lines) > n_rows:
        scroll = [(-1.0, "transform:translateY(0)")]
        for i in range(n_rows, len(lines)):
            first = next((run.piece for line in lines[i:] for run in line), None)
            if first is not None:
                at = lane.pieces[first].seconds
                scroll.append((at, f"transform:translateY({(n_rows - 1 - i) * _ROW}px)"))
    moved = max(len(lines) - n_rows, 0) * _ROW
    runs = [
        _letters(
            run.text,
            run.column * _CELL,
            i * _ROW + 14,
            ("d " if run.drafted else "") + clock.seen(lane.pieces[run.piece].seconds),
            n_cells=run.n_cells,
        )
        for i, line in enumerate(lines)
        for run in line
        if run.text.strip()
    ]
    inner = f' class="{clock.steps(_changes(scroll))}"' if scroll else ""
    still = f' transform="translate(0,{-moved})"' if scroll else ""
    return [
        f'<svg x="{_PAD}" y="{_TEXT_TOP - 8}" width="{_LANE - 2 * _PAD}" height="{height + 6}">',
        f"<g{inner}{still}>",
        *runs,
        "</g>",
        "</svg>",
    ]


def _foot(race: Race, clock: _Clock, height: int, speed: float) -> list[str]:
    leads = [lead(race, [state_at(lane, at) for lane in race.lanes]) for at in clock.moments]
    seconds = [f"{at:.1f} s" for at in clock.moments]
    how_fast = "" if speed == 1 else f", played at {speed:g} times their speed"
    legend = "drafted, and accepted by the target"
    x, y = _EDGE + 2, height - 19
    return [
        _letters(legend, x, y, "d"),
        _letters(f"ran one after the other{how_fast}", x + (len(legend) + 2) * _CELL, y, "f"),
        *_changing(seconds, clock, _WIDTH - _EDGE - 245, y, "f r"),
        *_changing(leads, clock, _WIDTH - _EDGE - 2, y, "n r"),
    ]


def _changing(texts: Sequence[str], clock: _Clock, x: float, y: float, style: str) -> list[str]:
    """Texts that replace each other in one place, right-aligned; empty ones are left out."""
    changes = _changes(list(zip(clock.moments, texts, strict=True)))
    ends = [*(at for at, _ in changes[1:]), None]
    made = []
    for i, ((at, text), end) in enumerate(zip(changes, ends, strict=True)):
        if text:
            seen = clock.seen(-1.0 if i == 0 else at, end)
            made.append(f'<text class="t {style} {seen}" x="{x:g}" y="{y:g}">{escape(text)}</text>')
    return ['<g class="c">', *made, "</g>"]


def _changes(entries: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The entries that differ from the one before."""
    return [pair for i, pair in enumerate(entries) if i == 0 or pair[1] != entries[i - 1][1]]


def _letters(text: str, x: float, y: float, style: str, *, n_cells: int = 0) -> str:
    """A text element; with `n_cells`, it has that width in any font."""
    kept = text.lstrip(" ")
    x += (len(text) - len(kept)) * _CELL if n_cells else 0
    kept = kept.rstrip(" ")
    n_cells -= len(text) - len(kept)
    width = f' textLength="{n_cells * _CELL:g}"' if n_cells > 0 else ""
    return f'<text class="t {style}" x="{x:g}" y="{y:g}"{width}>{escape(kept)}</text>'
