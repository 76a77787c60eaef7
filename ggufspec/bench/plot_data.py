"""Measurements -> what a picture of them shows: lines, stairs, bars. Pure: no colours, no axes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from ggufspec.bench.records import Contender, Measurement, Results
from ggufspec.bench.table import Row, Speedup, ratio_of, rows

AUTO = "auto"
MOST_LINES = 6  # more of them nobody tells apart
_MOST_LENGTHS = 3  # of one series, where acceptance is shown
_MOST_BARS = 16
_N_TELLING = 5  # drafts, or passes, of which a mean is worth showing
_MOST_STEPS = 64  # tokens of a text whose steps can still be seen
_LENGTH = "n_draft"
_FIRST = ("drafter", "verify")  # of what parts two ways to draft
_NAMES = {"drafter": "{}", "verify": "{}", "temperature": "T {}"}


@dataclass(frozen=True)
class Line:
    """The speed-ups of one way to draft, by length. `auto`: where the length is chosen."""

    number: int  # of the way to draft, which keeps its colour in every panel
    name: str  # what parts it from the other lines; empty where there is one
    lengths: Sequence[int]
    speedups: Sequence[Speedup]
    auto: Speedup | None


@dataclass(frozen=True)
class Acceptance:
    """How many drafts stood as far as position 1, 2 ... of those that were that long."""

    number: int
    name: str  # the length
    is_auto: bool
    shares: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """Tokens per second: the median of the texts, and the 95 % interval of their mean."""

    name: str
    rate: float
    low: float | None
    high: float | None
    speedup: Speedup | None


@dataclass(frozen=True)
class Written:
    """Tokens of one text after each round, from 0 on, and the seconds until then."""

    name: str
    tokens: Sequence[int]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Race:
    """The same prompt, written plainly and by the best of the others."""

    prompt: str
    n_tokens: int  # that are shown
    is_whole: bool
    plain: Written
    best: Written


def names(results: Results) -> list[str]:
    """What parts the ways to draft that are shown, by number; empty where there is but one."""
    found = [name for name, _ in _parts(results)]
    return found if len(found) > 1 else []


def lines(results: Results) -> list[Line]:
    """Speed-ups by length; empty where no way to draft has two lengths that can be compared."""
    made = []
    for number, (name, members) in enumerate(_parts(results)):
        fixed: dict[int, Speedup] = {}
        auto = None
        for row in members:
            length = row.contender.options.get(_LENGTH)
            if row.speedup is None:
                continue
            if length == AUTO:
                auto = row.speedup
            elif isinstance(length, int) and not isinstance(length, bool):
                fixed[length] = row.speedup
        if fixed or auto:
            lengths = sorted(fixed)
            made.append(Line(number, name, lengths, [fixed[n] for n in lengths], auto))
    return made if any(len(line.lengths) > 1 for line in made) else []


def acceptances(results: Results) -> list[Acceptance]:
    """At most MOST_LINES: auto and the longest of each way to draft in turn.

    Where there is but one way, also half its length, and half of that: more would coincide.
    """
    ranked: list[tuple[int, int, Acceptance]] = []
    parts = _parts(results)
    for number, (_, members) in enumerate(parts):
        known = [row for row in members if row.by_position]
        known.sort(key=lambda row: _reach(row.contender), reverse=True)
        fixed = [row for row in known if _reach(row.contender) < math.inf]
        kept = fixed[:1]
        for row in fixed[1:]:
            if len(parts) == 1 and 2 * _reach(row.contender) <= _reach(kept[-1].contender):
                kept.append(row)
        chosen = [row for row in known if row not in fixed]
        for rank, row in enumerate([*chosen, *kept[:_MOST_LENGTHS]]):
            shares = _shares(results.of(row.contender.name))
            line = Acceptance(number, _length_of(row.contender), row in chosen, shares)
            ranked.append((rank, number, line))
    ranked.sort(key=lambda each: each[:2])
    in_parts = sorted(ranked[:MOST_LINES], key=lambda each: (each[1], each[0]))
    return [line for _, _, line in in_parts]


def stairs(results: Results) -> tuple[list[int], list[float]]:
    """Tokens in a batch, and the median seconds of a pass of the target over them.

    Sizes are those that came often enough; empty without passes of one token beside others.
    """
    names = {contender.name for contender in results.contenders if contender.model == "pair"}
    passes = defaultdict(list)
    for text in results.measurements:
        if text.contender in names:
            for turn in text.rounds:
                if turn.target_seconds > 0:
                    passes[turn.n_drafted + 1].append(turn.target_seconds)
    sizes = sorted(n for n, seconds in passes.items() if len(seconds) >= _N_TELLING)
    if len(sizes) < 2 or sizes[0] != 1:
        return [], []
    return sizes, [median(passes[n]) for n in sizes]


def bars(results: Results) -> tuple[list[Bar], int]:
    """The contenders in their order, and how many more, slower ones there are."""
    made = rows(results)
    compared = [row for row in made if row.contender.baseline is not None]
    n_left = max(_MOST_BARS - (len(made) - len(compared)), 0)
    slow = sorted(compared, key=lambda row: row.median, reverse=True)[n_left:]
    shown = [row for row in made if row not in slow][:_MOST_BARS]
    return [_bar(results, row) for row in shown], len(made) - len(shown)


def race(results: Results) -> Race | None:
    """One text of the contender with the best speed-up, and plain's; None without their rounds.

    Of all pairs of texts it is the one in the middle: as much faster as is usual.
    """
    compared = [row for row in rows(results) if row.speedup]
    for row in sorted(compared, key=_height, reverse=True):
        assert row.contender.baseline is not None
        others = {(text.prompt, text.run): text for text in results.of(row.contender.baseline)}
        pairs = [
            (ours, other)
            for ours in results.of(row.contender.name)
            if (other := others.get((ours.prompt, ours.run)))
            and _seconds(ours)[-1] > 0
            and _seconds(other)[-1] > 0
        ]
        if not pairs:
            continue
        pairs.sort(key=lambda pair: pair[0].tokens_per_second * pair[1].generation_seconds)
        ours, other = pairs[len(pairs) // 2]
        n_all = max(ours.n_generated, other.n_generated)
        n_shown = min(n_all, _MOST_STEPS)
        shown = (_written(other, n_shown), _written(ours, n_shown))
        return Race(ours.prompt, n_shown, n_shown == n_all, *shown)
    return None


def _parts(results: Results) -> list[tuple[str, list[Row]]]:
    """The rows of those who speculate, by what they have in common but for the length: the best."""
    found: dict[str, list[Row]] = {}
    for row in rows(results):
        if row.contender.baseline is not None or row.by_position:
            key = json.dumps(_but_length(row.contender), sort_keys=True, default=str)
            found.setdefault(key, []).append(row)
    kept = sorted(found, key=lambda part: max(map(_height, found[part])), reverse=True)
    members = [rows_of for part, rows_of in found.items() if part in kept[:MOST_LINES]]
    options = [_but_length(each[0].contender) for each in members]
    known = dict.fromkeys([*_FIRST, *(name for each in options for name in each)])
    parting = [name for name in known if len({str(each.get(name)) for each in options}) > 1]
    return [
        (", ".join(_told(name, each.get(name)) for name in parting), rows_of)
        for each, rows_of in zip(options, members, strict=True)
    ]


def _but_length(contender: Contender) -> dict[str, object]:
    return {name: value for name, value in contender.options.items() if name != _LENGTH}


def _told(name: str, value: object) -> str:
    if value is None:
        return "draft" if name == "drafter" else f"no {name}"
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return _NAMES[name].format(shown) if name in _NAMES else f"{name} {shown}"


def _reach(contender: Contender) -> float:
    length = contender.options.get(_LENGTH)
    if length == AUTO:
        return math.inf
    return length if isinstance(length, int) else 0


def _length_of(contender: Contender) -> str:
    length = contender.options.get(_LENGTH)
    return contender.name if length is None else str(length)


def _height(row: Row) -> float:
    return row.speedup.ratio if row.speedup else 0.0


def _shares(texts: Sequence[Measurement]) -> list[float]:
    """Accepted of drafted by position, as far as there are enough drafts to tell."""
    n = max(len(text.drafted_by_position) for text in texts)
    drafted, accepted = [0] * n, [0] * n
    for text in texts:
        for i, (d, a) in enumerate(
            zip(text.drafted_by_position, text.accepted_by_position, strict=True)
        ):
            drafted[i] += d
            accepted[i] += a
    enough = min(_N_TELLING, max(drafted))
    return [a / d for a, d in zip(accepted, drafted, strict=True) if d and d >= enough]


def _bar(results: Results, row: Row) -> Bar:
    rates = [text.tokens_per_second for text in results.of(row.contender.name)]
    mean = ratio_of([math.log(rate) for rate in rates if rate > 0])
    low, high = (mean.low, mean.high) if mean else (None, None)
    return Bar(row.contender.name, row.median, low, high, row.speedup)


def _seconds(text: Measurement) -> list[float]:
    """When each round ended."""
    spent = (turn.draft_seconds + turn.target_seconds for turn in text.rounds)
    return list(accumulate(spent, initial=0.0))


def _written(text: Measurement, n_most: int) -> Written:
    tokens = list(accumulate((turn.n_tokens for turn in text.rounds), initial=0))
    tokens = [min(n, text.n_generated) for n in tokens]  # an end of text is drawn, not written
    n = next((i for i, written in enumerate(tokens) if written >= n_most), len(tokens) - 1)
    return Written(text.contender, tokens[: n + 1], _seconds(text)[: n + 1])
