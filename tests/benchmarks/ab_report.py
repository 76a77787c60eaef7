"""Computes speed-ups from timed texts, by condition, and checks them against thresholds.

A condition is a target, a draft, a sampling and a kind of prompt. In a turn each contender
generates the same number of tokens after the same prompt; ratios are taken turn by turn. The
*survey* measures all lengths (and llama.cpp's grid); the *finals* measure the best of them again,
so that the best is not chosen by chance.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

PLAIN, AUTO, LLAMA = "plain", "auto", "llama default"
FIXED, GRID = "fixed ", "llama n "  # and what follows
SURVEY, FINALS = "survey", "finals"


class Condition(NamedTuple):
    """Where contenders are compared. `sampling` is a temperature, or "default"."""

    target: str
    draft: str
    sampling: str
    prompts: str
    adversarial: bool

    @property
    def name(self) -> str:
        """Its name in the tables."""
        draft = f" ({self.draft})" if self.adversarial else ""
        return f"{self.target}{draft}, {self.sampling}, {self.prompts}"


@dataclass(frozen=True)
class Text:
    """One timed text. `turn`, which it shares with the others, is "run.prompt"."""

    condition: Condition
    stage: str
    turn: str
    contender: str
    tokens_per_second: float
    n_generated: int
    n_drafted: int
    n_accepted: int

    @property
    def prompt(self) -> str:
        """The number of the prompt."""
        return self.turn.rpartition(".")[2]


class MedianRange(NamedTuple):
    """A median with minimum and maximum; with several prompts, the geometric mean of medians.

    (Prompts differ far more than turns of one prompt.)
    """

    median: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> MedianRange | None:
        """The range of one prompt; None without values."""
        return MedianRange.of_prompts({"": values})

    @staticmethod
    def of_prompts(by_prompt: Mapping[str, Sequence[float]]) -> MedianRange | None:
        """None without values."""
        values = [value for some in by_prompt.values() for value in some]
        if not values:
            return None
        found_range = geometric_mean(median(some) for some in by_prompt.values() if some)
        return MedianRange(found_range, min(values), max(values), len(values))


@dataclass(frozen=True)
class Report:
    """The results of a condition. `ours` is auto if it was measured, else the best fixed length.

    `rates` are tokens/s, `speedups` are ratios to plain, of the finals if there were any, else of
    the survey; `surveyed` are speed-ups of the survey. `against` are ratios of ours to the others.
    """

    condition: Condition
    ours: str | None
    best_fixed: str | None
    best_grid: str | None
    rates: Mapping[str, MedianRange]
    speedups: Mapping[str, MedianRange]
    surveyed: Mapping[str, float]
    against: Mapping[str, MedianRange]  # "plain", "fixed", "llama default", "llama best"


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers; nan without numbers."""
    known = list(values)
    return statistics.geometric_mean(known) if known else math.nan


def best(speedups: Mapping[str, float], prefix: str, n: int = 1) -> list[str]:
    """The n contenders of a kind with the largest speed-up, best first."""
    names = [name for name in speedups if name.startswith(prefix)]
    return sorted(names, key=lambda name: -speedups[name])[:n]


def ratios(texts: Sequence[Text], contender: str, base: str) -> MedianRange | None:
    """Ratios of the speeds of two contenders, turn by turn."""
    bases = {
        (text.stage, text.turn): text.tokens_per_second
        for text in texts
        if text.contender == base and text.tokens_per_second > 0
    }
    found = defaultdict(list)
    for text in texts:
        turn = text.stage, text.turn
        if text.contender == contender and turn in bases:
            found[text.prompt].append(text.tokens_per_second / bases[turn])
    return MedianRange.of_prompts(found)


def rates_of(texts: Sequence[Text], contender: str) -> MedianRange | None:
    """Tokens per second."""
    found = defaultdict(list)
    for text in texts:
        if text.contender == contender:
            found[text.prompt].append(text.tokens_per_second)
    return MedianRange.of_prompts(found)


def speedups_of(texts: Sequence[Text]) -> dict[str, float]:
    """The ratio of each contender to plain."""
    return {name: found_range.median for name, found_range in _of_each(texts).items()}


def _of_each(texts: Sequence[Text]) -> dict[str, MedianRange]:
    names = dict.fromkeys(text.contender for text in texts)
    return {name: found_range for name in names if (found_range := ratios(texts, name, PLAIN))}


def report(condition: Condition, texts: Sequence[Text]) -> Report:
    """The report of one condition."""
    surveyed = [text for text in texts if text.stage == SURVEY]
    decisive = [text for text in texts if text.stage == FINALS] or surveyed
    speedups = speedups_of(decisive)
    fixed = next(iter(best(speedups, FIXED)), None)
    program = next(iter(best(speedups, GRID)), None)
    ours = AUTO if AUTO in speedups else fixed
    others = {"plain": PLAIN, "fixed": fixed, "llama default": LLAMA, "llama best": program}
    if ours == fixed:
        del others["fixed"]
    against = {
        name: ratios(decisive, ours, other) for name, other in others.items() if ours and other
    }
    names = dict.fromkeys(text.contender for text in decisive)
    return Report(
        condition=condition,
        ours=ours,
        best_fixed=fixed,
        best_grid=program,
        rates={name: found_range for name in names if (found_range := rates_of(decisive, name))},
        speedups=_of_each(decisive),
        surveyed=speedups_of(surveyed),
        against={
            name: found_range for name, found_range in against.items() if found_range is not None
        },
    )


def reports(texts: Iterable[Text]) -> list[Report]:
    """One for each condition, in order."""
    by_condition: dict[Condition, list[Text]] = {}
    for text in texts:
        by_condition.setdefault(text.condition, []).append(text)
    return [report(condition, of) for condition, of in by_condition.items()]


class SingleBest(NamedTuple):
    """The best single length for all conditions, by geometric means of speed-ups."""

    fixed: str
    fixed_speedup: float
    auto_speedup: float | None  # None: auto was not measured

    @property
    def ratio(self) -> float:
        """Auto / it; nan without auto."""
        return math.nan if self.auto_speedup is None else self.auto_speedup / self.fixed_speedup


def single_best(conditions: Sequence[Report]) -> SingleBest | None:
    """Chosen by the survey, which has all lengths; measured by the finals, if all have it."""
    decisive = [
        {name: at.median for name, at in condition.speedups.items()} for condition in conditions
    ]
    surveyed = [
        condition.surveyed or speedups
        for condition, speedups in zip(conditions, decisive, strict=True)
    ]
    found = _means(surveyed)
    names = best(found, FIXED)
    if not names:
        return None
    chosen = names[0]
    finals = _means(decisive)
    if chosen in finals:
        found = finals
    return SingleBest(chosen, found[chosen], found.get(AUTO))


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Geometric means of the names that are in all tables."""
    first, *others = tables or [{}]
    common = [name for name in first if all(name in table for table in others)]
    return {name: geometric_mean(table[name] for table in tables) for name in common}


class Verdict(NamedTuple):
    """One threshold."""

    what: str
    found: float
    needed: float

    @property
    def holds(self) -> bool:
        """Whether it is reached."""
        return self.found >= self.needed


# Geometric means over conditions at temperature 0, and at each other sampling.
_NEEDED = {"llama default": (1.2, 1.7), "llama best": (1.1, 1.25)}
_WORST = {"fixed": 0.97, "plain": 0.97, "llama best": 0.97}
_LABELS = {
    "plain": "plain",
    "fixed": "best fixed length",
    "llama default": "llama.cpp's defaults",
    "llama best": "llama.cpp's best of the grid",
}
_SINGLE = 1.05


def verdicts(conditions: Sequence[Report]) -> list[Verdict]:
    """All thresholds for which there are measurements."""
    found = []
    for name, needed in _WORST.items():
        measured = [
            (condition.against[name].median, condition)
            for condition in conditions
            if name in condition.against
        ]
        if measured:
            least, where = min(measured, key=lambda pair: pair[0])
            what = f"worst condition / {_LABELS[name]}: {where.condition.name}"
            found.append(Verdict(what, least, needed))
    single = single_best(conditions)
    if single and not math.isnan(single.ratio):
        what = f"geometric mean / best single length ({single.fixed})"
        found.append(Verdict(what, single.ratio, _SINGLE))
    for name, (at_zero, elsewhere) in _NEEDED.items():
        by_sampling: dict[str, list[float]] = {}
        for condition in conditions:
            if name in condition.against:
                by_sampling.setdefault(condition.condition.sampling, []).append(
                    condition.against[name].median
                )
        for sampling, values in by_sampling.items():
            what = f"geometric mean / {_LABELS[name]}, sampling {sampling}"
            needed = at_zero if is_greedy(sampling) else elsewhere
            found.append(Verdict(what, geometric_mean(values), needed))
    return found


def is_greedy(sampling: str) -> bool:
    """Whether this is temperature 0."""
    return sampling != "default" and float(sampling) == 0
