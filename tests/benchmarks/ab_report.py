"""Computes ratios of speeds from timed texts, and renders them as Markdown tables.

In a turn all contenders continue one prompt with the same target and sampling; ratios are taken
turn by turn. A cell of the tables is a target, a sampling and a kind of prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import NamedTuple

from tests.benchmarks.contender_options import (
    AUTO,
    AUTO_CHAINS,
    FIXED,
    GRID,
    LLAMA,
    NGRAM,
    PLAIN,
    is_llama,
)
from tests.benchmarks.text_file import Cell, Text

_ALL = "all, geometric mean"
_HEAD = (
    *("file", "temperature", "text", "turns", "plain, t/s", "auto, t/s", "auto / plain"),
    *("/ best fixed setting", "/ llama.cpp's defaults", "/ its best of a grid", "/ auto, chains"),
)
_LEGEND = (
    "Medians over turns; of the ratios to llama.cpp and to auto with chains only, and in the last "
    "row of each block, geometric means. In brackets: the best setting of that cell."
)


_Speeds = Mapping[str, float]  # tokens per second by contender: the texts of a turn


def turns_of(texts: Iterable[Text]) -> list[_Speeds]:
    """The turns, in order."""
    found: dict[object, dict[str, float]] = defaultdict(dict)
    for text in texts:
        if text.tokens_per_second > 0:
            found[text.turn][text.contender] = text.tokens_per_second
    return list(found.values())


def ratios(turns: Iterable[_Speeds], contender: str, base: str) -> list[float]:
    """The ratios of their speeds in the turns that have both."""
    return [each[contender] / each[base] for each in turns if contender in each and base in each]


def best_of(turns: Sequence[_Speeds], names: Sequence[str]) -> str | None:
    """The contender with the largest median speed-up over plain; None: none was measured.

    In the turns that have all of them, so that a setting measured on few prompts has no advantage.
    """
    measured = [name for name in names if ratios(turns, name, PLAIN)]
    common = [each for each in turns if all(name in each for name in (PLAIN, *measured))] or turns
    return max(measured, key=lambda name: median(ratios(common, name, PLAIN) or [0]), default=None)


@dataclass(frozen=True)
class CellReport:
    """The results of a cell. `against` are auto's ratios to the others, turn by turn."""

    cell: Cell
    turns: Sequence[_Speeds]
    best_fixed: str | None
    best_llama: str | None
    against: Mapping[str, Sequence[float]]  # "plain", "fixed", "llama", "grid", "chains"


def report(cell: Cell, texts: Iterable[Text]) -> CellReport:
    """The report of one cell."""
    turns = turns_of(texts)
    names = list(dict.fromkeys(name for each in turns for name in each))
    fixed = best_of(turns, [name for name in names if name.startswith((PLAIN, NGRAM, FIXED))])
    grid = [name for name in names if name == LLAMA or name.startswith(GRID)]
    best = best_of(turns, grid) if len(grid) > 1 else None
    others = {"plain": PLAIN, "fixed": fixed, "llama": LLAMA, "grid": best, "chains": AUTO_CHAINS}
    against = {name: ratios(turns, AUTO, other) for name, other in others.items() if other}
    against = {name: found for name, found in against.items() if found}
    return CellReport(cell, turns, fixed, best, against)


def reports(
    texts: Sequence[Text], *, least: int = 1, merged: Mapping[str, str] | None = None
) -> list[CellReport]:
    """One for each cell, by target, temperature and kind.

    Turns with a text of fewer than `least` tokens are left out. `merged`: kinds by new names.
    """
    short = {text.turn for text in texts if text.n_generated < least}
    by_cell: dict[Cell, list[Text]] = {}
    for text in texts:
        if text.turn not in short:
            named = replace(text, kind=(merged or {}).get(text.kind, text.kind))
            by_cell.setdefault(named.cell, []).append(named)
    order = {target: i for i, target in enumerate(dict.fromkeys(c.target for c in by_cell))}
    cells = sorted(by_cell, key=lambda c: (order[c.target], c.temperature, c[1:]))
    return [report(cell, by_cell[cell]) for cell in cells]


class Verdict(NamedTuple):
    """One threshold."""

    what: str
    found: float
    needed: float

    @property
    def holds(self) -> bool:
        """Whether it is reached."""
        return self.found >= self.needed


# Thresholds: the worst cell; medians of cells by quantization and kind; geometric means over all
# prompts by quantization, greedy and not. The latter two for prompts with code and edits.
_WORST = {"plain": 0.97, "fixed": 0.97, "chains": 0.98}
_CELLS = {("Q4_0", "code"): 1.22, ("Q4_0", "edit"): 1.35, ("Q4_K_M", "edit"): 1.1}
_LLAMA = {"Q4_0": (1.65, 1.5), "Q4_K_M": (2.1, 2.0)}
_GRID = 1.3
_LABELS = {
    "plain": "plain",
    "fixed": "best fixed setting",
    "llama": "llama.cpp's defaults",
    "grid": "llama.cpp's best of a grid",
    "chains": "auto with chains only",
}
_BY_MEAN = ("llama", "grid", "chains")  # compared over all prompts by geometric means


def verdicts(cells: Sequence[CellReport]) -> list[Verdict]:
    """All thresholds for which there are measurements."""
    found = []
    for name, needed in _WORST.items():
        measured = [(median(each.against[name]), each) for each in cells if name in each.against]
        if measured:
            least, where = min(measured, key=lambda pair: pair[0])
            what = f"worst cell / {_LABELS[name]}: {where.cell.name}"
            found.append(Verdict(what, least, needed))
    for each in cells:
        for (quantization, kind), needed in _CELLS.items():
            if quantization in each.cell.target and kind == each.cell.kind and each.against:
                what = f"{each.cell.name} / plain"
                found.append(Verdict(what, median(each.against["plain"]), needed))
    if not {"code", "edit"} <= {each.cell.kind for each in cells}:
        return found
    for (target, sampling), block in _blocks(cells).items():
        is_sampled = block[0].cell.temperature > 0
        needed_of = {"grid": _GRID}
        for quantization, by_sampling in _LLAMA.items():
            if quantization in target:
                needed_of["llama"] = by_sampling[is_sampled]
        for name, needed in needed_of.items():
            if values := _joined(block, name):
                what = f"{target}, {sampling}: geometric mean / {_LABELS[name]}"
                found.append(Verdict(what, geometric_mean(values), needed))
    return found


def render(
    texts: Sequence[Text], *, least: int = 1, merged: Mapping[str, str] | None = None
) -> str:
    """Everything as Markdown."""
    cells = reports(texts, least=least, merged=merged)
    if not cells:
        return "No texts to report.\n"
    parts = [_table(_HEAD, _main_rows(cells)), _LEGEND, _settings_table(cells)]
    parts += ["\n".join(_remarks(texts, least))]
    parts += [
        "\n".join(
            f"- {'holds' if verdict.holds else 'FAILS'}: {verdict.found:.3f} (needed "
            f"{verdict.needed:.2f}), {verdict.what}"
            for verdict in verdicts(cells)
        )
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _main_rows(cells: Sequence[CellReport]) -> list[list[str]]:
    rows = []
    for (target, _), block in _blocks(cells).items():
        temperature = f"{block[0].cell.temperature:g}"
        for each in block:
            named = {"fixed": each.best_fixed, "grid": each.best_llama}
            rows.append(
                [
                    *(target, temperature, each.cell.kind, str(len(each.turns))),
                    *(_speed([each], name) for name in (PLAIN, AUTO)),
                    *(
                        _shown(
                            geometric_mean(values) if name in _BY_MEAN else median(values),
                            named.get(name),
                        )
                        if (values := each.against.get(name))
                        else ""
                        for name in _LABELS
                    ),
                ]
            )
        if len(block) > 1:
            rows.append(
                [
                    *(target, temperature, _ALL, str(sum(len(each.turns) for each in block))),
                    *(_speed(block, name) for name in (PLAIN, AUTO)),
                    *(
                        _shown(geometric_mean(values)) if (values := _joined(block, name)) else ""
                        for name in _LABELS
                    ),
                ]
            )
    return rows


def _settings_table(cells: Sequence[CellReport]) -> str:
    """The median speed-up over plain of every contender, with the number of turns if it differs."""
    names = list(dict.fromkeys(name for each in cells for turn in each.turns for name in turn))
    names = sorted((name for name in names if name != PLAIN), key=lambda name: is_llama(name))
    rows = []
    for each in cells:
        row = [each.cell.target, f"{each.cell.temperature:g}", each.cell.kind]
        for name in names:
            values = ratios(each.turns, name, PLAIN)
            n = f" ({len(values)})" if len(values) != len(each.turns) else ""
            row.append(f"{median(values):.2f}{n}" if values else "")
        rows.append(row)
    return _table(("file", "temperature", "text, x plain", *names), rows)


def _remarks(texts: Sequence[Text], least: int) -> list[str]:
    """The first text of each pair; texts that were left out; greedy texts of other lengths."""
    found = []
    by_turn: dict[object, dict[str, Text]] = defaultdict(dict)
    for text in texts:
        by_turn[text.turn][text.contender] = text
    seen: set[str] = set()
    for text in sorted(texts, key=lambda text: text.at):
        plain = by_turn[text.turn].get(PLAIN)
        if text.contender == AUTO and text.target not in seen and plain:
            seen.add(text.target)
            ratio = text.tokens_per_second / plain.tokens_per_second
            found.append(f"- first text of {text.target} ({text.cell.name}): {ratio:.3f} of plain")
    n_short = sum(
        any(text.n_generated < least for text in turn.values()) for turn in by_turn.values()
    )
    if n_short:
        found.append(f"- turns left out, with a text of fewer than {least} tokens: {n_short}")
    n_uneven = sum(
        len({text.n_generated for text in turn.values() if not is_llama(text.contender)}) > 1
        for turn in by_turn.values()
        if next(iter(turn.values())).cell.temperature == 0
    )
    if n_uneven:
        found.append(f"- turns at temperature 0 where our texts have different lengths: {n_uneven}")
    return found


def _blocks(cells: Sequence[CellReport]) -> dict[tuple[str, str], list[CellReport]]:
    found: dict[tuple[str, str], list[CellReport]] = {}
    for each in cells:
        found.setdefault((each.cell.target, each.cell.sampling), []).append(each)
    return found


def _joined(cells: Sequence[CellReport], name: str) -> list[float]:
    return [value for each in cells for value in each.against.get(name, ())]


def _speed(cells: Sequence[CellReport], contender: str) -> str:
    speeds = [turn[contender] for each in cells for turn in each.turns if contender in turn]
    return f"{median(speeds):.1f}" if speeds else ""


def _shown(ratio: float, setting: str | None = None) -> str:
    named = "defaults" if setting == LLAMA else (setting or "").removeprefix("llama ")
    return f"{ratio:.2f} ({named})" if named else f"{ratio:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
