"""Computes ratios of speeds from timed texts, and renders them as Markdown tables.

In a turn all contenders continue one prompt with the same target and sampling; ratios are taken
turn by turn. A cell of the tables is a target, a sampling and a kind of prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

from tests.benchmarks.loaded_pair import AUTO, AUTO_CHAINS, FIXED, LLAMA, NGRAM, PLAIN
from tests.benchmarks.text_file import Cell, Text

_ALL = "all, geometric mean"
_HEAD = (
    *("file", "temperature", "text", "turns", "plain, t/s", "auto, t/s", "auto / plain"),
    *("/ best fixed setting", "/ llama.cpp's defaults", "/ auto, chains"),
)
_LEGEND = (
    "Medians over turns; of the ratios to llama.cpp and to auto with chains only, and in the last "
    "row of each block, geometric means. In brackets: the best fixed setting of that cell."
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
    against: Mapping[str, Sequence[float]]  # "plain", "fixed", "llama", "chains"


def report(cell: Cell, texts: Iterable[Text]) -> CellReport:
    """The report of one cell."""
    turns = turns_of(texts)
    names = list(dict.fromkeys(name for each in turns for name in each))
    fixed = best_of(turns, [name for name in names if name.startswith((PLAIN, NGRAM, FIXED))])
    others = {"plain": PLAIN, "fixed": fixed, "llama": LLAMA, "chains": AUTO_CHAINS}
    against = {name: ratios(turns, AUTO, other) for name, other in others.items() if other}
    against = {name: found for name, found in against.items() if found}
    return CellReport(cell, turns, fixed, against)


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


_COLUMNS = ("plain", "fixed", "llama", "chains")  # of `against`
_BY_MEAN = ("llama", "chains")  # compared by geometric means


def render(
    texts: Sequence[Text], *, least: int = 1, merged: Mapping[str, str] | None = None
) -> str:
    """Everything as Markdown."""
    cells = reports(texts, least=least, merged=merged)
    if not cells:
        return "No texts to report.\n"
    parts = [_table(_HEAD, _main_rows(cells)), _LEGEND, _settings_table(cells)]
    parts += ["\n".join(_remarks(texts, least))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _main_rows(cells: Sequence[CellReport]) -> list[list[str]]:
    rows = []
    for (target, _), block in _blocks(cells).items():
        start = [target, f"{block[0].cell.temperature:g}"]
        for each in block:
            shown = [*start, each.cell.kind, str(len(each.turns))]
            shown += [_speed([each], name) for name in (PLAIN, AUTO)]
            for name in _COLUMNS:
                mean = geometric_mean if name in _BY_MEAN else median
                values, setting = each.against.get(name), each.best_fixed
                named = f" ({setting})" if name == "fixed" else ""
                shown.append(f"{mean(values):.2f}{named}" if values else "")
            rows.append(shown)
        if len(block) > 1:
            shown = [*start, _ALL, str(sum(len(each.turns) for each in block))]
            shown += [_speed(block, name) for name in (PLAIN, AUTO)]
            for name in _COLUMNS:
                joined = [value for each in block for value in each.against.get(name, ())]
                shown.append(f"{geometric_mean(joined):.2f}" if joined else "")
            rows.append(shown)
    return rows


def _settings_table(cells: Sequence[CellReport]) -> str:
    """The median speed-up over plain of every contender, with the number of turns if it differs."""
    names = list(dict.fromkeys(name for each in cells for turn in each.turns for name in turn))
    names = sorted((name for name in names if name != PLAIN), key=lambda name: name == LLAMA)
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
        len({text.n_generated for text in turn.values() if text.contender != LLAMA}) > 1
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


def _speed(cells: Sequence[CellReport], contender: str) -> str:
    speeds = [turn[contender] for each in cells for turn in each.turns if contender in turn]
    return f"{median(speeds):.1f}" if speeds else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
