"""Computes the data of a plot: speed-ups, pass costs, acceptance, timelines."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from ggufspec.bench.records import BenchResults, Contender, Measurement, by_position
from ggufspec.bench.summary import Speedup, Summary, ratio_of, summarize

AUTO = "auto"
MAX_LINES = 6  # more lines are hard to tell apart
_MAX_LENGTHS = 3  # lengths of one series in the plot of acceptance
_MAX_BARS = 16
_MIN_SAMPLES = 5  # least number of drafts or passes for a mean that is shown
_MAX_STEPS = 64  # tokens of a timeline
_LENGTH = "n_draft"
_FIRST = ("drafter", "verify")  # these options come first in the name of a series
_NAMES = {"drafter": "{}", "verify": "{}", "tree": "tree {}", "temperature": "T {}"}


@dataclass(frozen=True)
class SpeedupLine:
    """The speed-ups of one series by draft length; `auto`: with an automatic length."""

    number: int  # of the series, which has the same colour in all subplots
    name: str  # the options that differ from other series; "" for a single series
    lengths: Sequence[int]
    speedups: Sequence[Speedup]
    auto: Speedup | None


@dataclass(frozen=True)
class AcceptanceCurve:
    """`shares[i]`: of the drafts with over i tokens, the share with tokens 0 to i accepted."""

    number: int
    name: str  # the draft length
    is_auto: bool
    shares: Sequence[float]


@dataclass(frozen=True)
class Timeline:
    """One text's token counts and times: 0 at the start, then one value after each round."""

    name: str
    tokens: Sequence[int]
    seconds: Sequence[float]


@dataclass(frozen=True)
class TimelinePair:
    prompt: str
    n_tokens: int  # number of tokens shown
    is_whole: bool
    plain: Timeline
    best: Timeline


def series_names(results: BenchResults) -> list[str]:
    """The names of the series by number; empty for a single series."""
    found = [name for name, _ in _series(results)]
    return found if len(found) > 1 else []


def speedup_lines(results: BenchResults) -> list[SpeedupLine]:
    """Speed-ups by length; empty if no series has two lengths to compare."""
    made = []
    for number, (name, members) in enumerate(_series(results)):
        found = [(row.contender.options.get(_LENGTH), row.speedup) for row in members]
        fixed = {n: speedup for n, speedup in found if speedup and type(n) is int}
        auto = next((speedup for n, speedup in reversed(found) if speedup and n == AUTO), None)
        if fixed or auto:
            lengths = sorted(fixed)
            made.append(SpeedupLine(number, name, lengths, [fixed[n] for n in lengths], auto))
    return made if any(len(line.lengths) > 1 for line in made) else []


def acceptances(results: BenchResults) -> list[AcceptanceCurve]:
    """Acceptance of at most MAX_LINES contenders: auto and the longest length of each series.

    A single series also shows half its longest length, and a quarter; more lines would overlap.
    """
    ranked: list[tuple[int, AcceptanceCurve]] = []
    series = _series(results)
    for number, (_, members) in enumerate(series):
        known = [row for row in members if row.by_position]
        known.sort(key=lambda row: _longest(row.contender), reverse=True)
        fixed = [row for row in known if _longest(row.contender) < math.inf]
        kept = fixed[:1]
        for row in fixed[1:]:
            if len(series) == 1 and 2 * _longest(row.contender) <= _longest(kept[-1].contender):
                kept.append(row)
        chosen = [row for row in known if row not in fixed]
        for rank, row in enumerate([*chosen, *kept[:_MAX_LENGTHS]]):
            shares = _shares(results.of(row.contender.name))
            label = str(row.contender.options.get(_LENGTH, row.contender.name))
            ranked.append((rank, AcceptanceCurve(number, label, row in chosen, shares)))
    ranked.sort(key=lambda each: (each[0], each[1].number))
    return sorted((line for _, line in ranked[:MAX_LINES]), key=lambda line: line.number)


def pass_costs(results: BenchResults) -> tuple[list[int], list[float]]:
    """(numbers of tokens, median seconds) of target passes, without sizes that occurred rarely.

    Both are empty unless size 1 and a larger one remain.
    """
    names = {contender.name for contender in results.contenders if contender.model == "pair"}
    passes = defaultdict(list)
    for text in results.measurements:
        if text.contender in names:
            for round_ in text.rounds:
                if round_.target_seconds > 0:
                    passes[round_.n_drafted + 1].append(round_.target_seconds)
    sizes = sorted(n for n, seconds in passes.items() if len(seconds) >= _MIN_SAMPLES)
    if len(sizes) < 2 or sizes[0] != 1:
        return [], []
    return sizes, [median(passes[n]) for n in sizes]


def rate_bars(results: BenchResults) -> tuple[list[tuple[Summary, Speedup | None]], int]:
    """(bars in the order of the contenders, number of slower contenders without a bar).

    A bar is (summary, mean of the texts' rates with its 95 % interval).
    """
    made = summarize(results)
    compared = [row for row in made if row.contender.baseline is not None]
    n_left = max(_MAX_BARS - (len(made) - len(compared)), 0)
    slow = sorted(compared, key=lambda row: row.median, reverse=True)[n_left:]
    shown = [row for row in made if row not in slow][:_MAX_BARS]
    rates = [[text.tokens_per_second for text in results.of(row.contender.name)] for row in shown]
    means = [ratio_of([math.log(rate) for rate in each if rate > 0]) for each in rates]
    return list(zip(shown, means, strict=True)), len(made) - len(shown)


def timelines(results: BenchResults) -> TimelinePair | None:
    """The best contender's text of median speed-up, and plain's; None if no rounds are known."""
    compared = [row for row in summarize(results) if row.speedup]
    for row in sorted(compared, key=_ratio, reverse=True):
        pairs = [
            (ours, other)
            for ours, other in results.with_plain(row.contender)
            if _seconds(ours)[-1] > 0 and _seconds(other)[-1] > 0
        ]
        if not pairs:
            continue
        pairs.sort(key=lambda pair: pair[0].tokens_per_second * pair[1].generation_seconds)
        ours, other = pairs[len(pairs) // 2]
        n_all = max(ours.n_generated, other.n_generated)
        n_shown = min(n_all, _MAX_STEPS)
        shown = (_timeline(other, n_shown), _timeline(ours, n_shown))
        return TimelinePair(ours.prompt, n_shown, n_shown == n_all, *shown)
    return None


def _series(results: BenchResults) -> list[tuple[str, list[Summary]]]:
    """(name, summaries) of the best series: contenders that differ only in draft length."""
    found: dict[str, list[Summary]] = {}
    for row in summarize(results):
        if row.contender.baseline is not None or row.by_position:
            key = json.dumps(_without_length(row.contender), sort_keys=True, default=str)
            found.setdefault(key, []).append(row)
    kept = sorted(found, key=lambda part: max(map(_ratio, found[part])), reverse=True)
    members = [group for part, group in found.items() if part in kept[:MAX_LINES]]
    options = [_without_length(each[0].contender) for each in members]
    known = dict.fromkeys([*_FIRST, *(name for each in options for name in each)])
    differing = [name for name in known if len({str(each.get(name)) for each in options}) > 1]
    return [
        (", ".join(_shown(name, each.get(name)) for name in differing), group)
        for each, group in zip(options, members, strict=True)
    ]


def _without_length(contender: Contender) -> dict[str, object]:
    return {name: value for name, value in contender.options.items() if name != _LENGTH}


def _shown(name: str, value: object) -> str:
    if value is None:
        return "draft" if name == "drafter" else f"no {name}"
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return _NAMES[name].format(shown) if name in _NAMES else f"{name} {shown}"


def _longest(contender: Contender) -> float:
    length = contender.options.get(_LENGTH)
    if length == AUTO:
        return math.inf
    return length if isinstance(length, int) else 0


def _ratio(row: Summary) -> float:
    return row.speedup.ratio if row.speedup else 0.0


def _shares(texts: Sequence[Measurement]) -> list[float]:
    drafted, accepted = by_position(texts)
    enough = min(_MIN_SAMPLES, max(drafted))
    return [a / d for a, d in zip(accepted, drafted, strict=True) if d and d >= enough]


def _seconds(text: Measurement) -> list[float]:
    """The time at the end of each round, starting with 0."""
    spent = (round_.draft_seconds + round_.target_seconds for round_ in text.rounds)
    return list(accumulate(spent, initial=0.0))


def _timeline(text: Measurement, n_max: int) -> Timeline:
    tokens = list(accumulate((round_.n_tokens for round_ in text.rounds), initial=0))
    tokens = [min(n, text.n_generated) for n in tokens]  # an end-of-text token is not counted
    n = next((i for i, written in enumerate(tokens) if written >= n_max), len(tokens) - 1)
    return Timeline(text.contender, tokens[: n + 1], _seconds(text)[: n + 1])
