"""Timed texts -> what each contender gives in each cell, and what holds over all. Pure.

A cell is a target, a draft, a sampling and a kind of prompt. In a turn every contender writes the
same number of tokens behind the same prompt, so that ratios are taken turn by turn. The *survey*
tries every length (and every combination of the rival's grid); the *finals* measure the best of
them anew, so that the best is not merely the luckiest.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

PLAIN, AUTO, RIVAL = "plain", "auto", "llama default"
FIXED, GRID = "fixed ", "llama n "  # and what follows
SURVEY, FINALS = "survey", "finals"


class Cell(NamedTuple):
    """Where contenders are compared. `sampling` is a temperature, or "default"."""

    target: str
    draft: str
    sampling: str
    prompts: str
    adversarial: bool

    @property
    def name(self) -> str:
        """What the tables call it."""
        draft = f" ({self.draft})" if self.adversarial else ""
        return f"{self.target}{draft}, {self.sampling}, {self.prompts}"


@dataclass(frozen=True)
class Text:
    """One timed text. `turn`, which it shares with the others, is "run.prompt"."""

    cell: Cell
    stage: str
    turn: str
    contender: str
    tokens_per_second: float
    n_generated: int
    n_drafted: int
    n_accepted: int

    @property
    def prompt(self) -> str:
        """Which one of its kind."""
        return self.turn.rpartition(".")[2]


class Middle(NamedTuple):
    """A median with its spread from least to most; of several prompts, the mean of medians.

    That is a geometric mean: prompts differ far more than turns of one of them do.
    """

    median: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Middle | None:
        """Of one prompt. None where there are no values."""
        return Middle.of_prompts({"": values})

    @staticmethod
    def of_prompts(by_prompt: Mapping[str, Sequence[float]]) -> Middle | None:
        """None where there are no values."""
        values = [value for some in by_prompt.values() for value in some]
        if not values:
            return None
        middle = geometric_mean(median(some) for some in by_prompt.values() if some)
        return Middle(middle, min(values), max(values), len(values))


@dataclass(frozen=True)
class Report:
    """What a cell says. `ours` is auto where it was measured, else the best fixed length.

    `rates` are tokens/s, `gains` are ratios to plain, of the stage that decides (the finals, if
    there were any); `surveyed` are gains of the survey. `against` are ours over the others.
    """

    cell: Cell
    ours: str | None
    best_fixed: str | None
    best_rival: str | None
    rates: Mapping[str, Middle]
    gains: Mapping[str, Middle]
    surveyed: Mapping[str, float]
    against: Mapping[str, Middle]  # "plain", "fixed", "rival default", "rival best"


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers; nan of none."""
    known = list(values)
    return statistics.geometric_mean(known) if known else math.nan


def best(gains: Mapping[str, float], prefix: str, n: int = 1) -> list[str]:
    """The n contenders of a kind that gain the most, the best first."""
    names = [name for name in gains if name.startswith(prefix)]
    return sorted(names, key=lambda name: -gains[name])[:n]


def ratios(texts: Sequence[Text], contender: str, base: str) -> Middle | None:
    """Speed over that of another contender in the same turn, turn by turn."""
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
    return Middle.of_prompts(found)


def rates_of(texts: Sequence[Text], contender: str) -> Middle | None:
    """Tokens per second."""
    found = defaultdict(list)
    for text in texts:
        if text.contender == contender:
            found[text.prompt].append(text.tokens_per_second)
    return Middle.of_prompts(found)


def gains_of(texts: Sequence[Text]) -> dict[str, float]:
    """The ratio of each contender to plain."""
    return {name: middle.median for name, middle in _of_each(texts).items()}


def _of_each(texts: Sequence[Text]) -> dict[str, Middle]:
    names = dict.fromkeys(text.contender for text in texts)
    return {name: middle for name in names if (middle := ratios(texts, name, PLAIN))}


def report(cell: Cell, texts: Sequence[Text]) -> Report:
    """What the texts of one cell say."""
    surveyed = [text for text in texts if text.stage == SURVEY]
    decisive = [text for text in texts if text.stage == FINALS] or surveyed
    gains = gains_of(decisive)
    fixed = next(iter(best(gains, FIXED)), None)
    rival = next(iter(best(gains, GRID)), None)
    ours = AUTO if AUTO in gains else fixed
    others = {"plain": PLAIN, "fixed": fixed, "rival default": RIVAL, "rival best": rival}
    if ours == fixed:
        del others["fixed"]
    against = {
        name: ratios(decisive, ours, other) for name, other in others.items() if ours and other
    }
    names = dict.fromkeys(text.contender for text in decisive)
    return Report(
        cell=cell,
        ours=ours,
        best_fixed=fixed,
        best_rival=rival,
        rates={name: middle for name in names if (middle := rates_of(decisive, name))},
        gains=_of_each(decisive),
        surveyed=gains_of(surveyed),
        against={name: middle for name, middle in against.items() if middle is not None},
    )


def reports(texts: Iterable[Text]) -> list[Report]:
    """One for each cell that was begun, in order."""
    by_cell: dict[Cell, list[Text]] = {}
    for text in texts:
        by_cell.setdefault(text.cell, []).append(text)
    return [report(cell, of) for cell, of in by_cell.items()]


class SingleBest(NamedTuple):
    """The one fixed length that serves all cells best: geometric means of gains over plain."""

    fixed: str
    fixed_gain: float
    auto_gain: float | None  # None: auto was not measured

    @property
    def ratio(self) -> float:
        """Auto over it; nan without auto."""
        return math.nan if self.auto_gain is None else self.auto_gain / self.fixed_gain


def single_best(cells: Sequence[Report]) -> SingleBest | None:
    """Chosen by the survey, where every length was tried; told by the finals, if all have it."""
    decisive = [{name: at.median for name, at in cell.gains.items()} for cell in cells]
    surveyed = [cell.surveyed or gains for cell, gains in zip(cells, decisive, strict=True)]
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
    """Geometric means of what all tables have."""
    first, *others = tables or [{}]
    common = [name for name in first if all(name in table for table in others)]
    return {name: geometric_mean(table[name] for table in tables) for name in common}


class Verdict(NamedTuple):
    """One thing that must hold."""

    what: str
    found: float
    needed: float

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return self.found >= self.needed


# Geometric means over cells at temperature 0, and at each other sampling.
_NEEDED = {"rival default": (1.2, 1.7), "rival best": (1.1, 1.25)}
_WORST = {"fixed": 0.97, "plain": 0.97, "rival best": 0.97}
_LABELS = {
    "plain": "plain",
    "fixed": "best fixed length",
    "rival default": "llama.cpp's defaults",
    "rival best": "llama.cpp's best of the grid",
}
_SINGLE = 1.05


def verdicts(cells: Sequence[Report]) -> list[Verdict]:
    """Everything that can be judged by what was measured."""
    found = []
    for name, needed in _WORST.items():
        measured = [(cell.against[name].median, cell) for cell in cells if name in cell.against]
        if measured:
            least, where = min(measured, key=lambda pair: pair[0])
            what = f"worst cell / {_LABELS[name]}: {where.cell.name}"
            found.append(Verdict(what, least, needed))
    single = single_best(cells)
    if single and not math.isnan(single.ratio):
        what = f"geometric mean / best single length ({single.fixed})"
        found.append(Verdict(what, single.ratio, _SINGLE))
    for name, (at_zero, elsewhere) in _NEEDED.items():
        by_sampling: dict[str, list[float]] = {}
        for cell in cells:
            if name in cell.against:
                by_sampling.setdefault(cell.cell.sampling, []).append(cell.against[name].median)
        for sampling, values in by_sampling.items():
            what = f"geometric mean / {_LABELS[name]}, sampling {sampling}"
            needed = at_zero if is_greedy(sampling) else elsewhere
            found.append(Verdict(what, geometric_mean(values), needed))
    return found


def is_greedy(sampling: str) -> bool:
    """Whether this is temperature 0."""
    return sampling != "default" and float(sampling) == 0
