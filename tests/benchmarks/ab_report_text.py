"""Reports of cells -> tables to read and a document for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.benchmarks.ab_report import (
    AUTO,
    FIXED,
    PLAIN,
    RIVAL,
    Cell,
    Middle,
    Report,
    Text,
    reports,
    single_best,
    verdicts,
)

_COLUMNS = {
    "plain": "/plain",
    "fixed": "/fixed",
    "rival default": "/default",
    "rival best": "/grid",
}


def cell_lines(report: Report) -> list[str]:
    """Everything of one cell: tokens/s and gains with their spreads."""
    lines = [f"{report.cell.name}"]
    shown = [PLAIN, AUTO, report.best_fixed, RIVAL, report.best_rival]
    for name in dict.fromkeys([*shown, *report.rates]):
        if name is None or name not in report.rates:
            continue
        gain = report.gains.get(name)
        lines.append(
            f"  {name:22}{_spread(report.rates[name], '.1f'):>26} t/s"
            f"{_spread(gain, '.3f') if gain else '':>26} x plain"
        )
    for name, middle in report.against.items():
        other = {"fixed": report.best_fixed, "rival best": report.best_rival}.get(name)
        named = f"{name} ({other})" if other else name
        lines.append(f"  {report.ours} / {named}: {_spread(middle, '.3f')}, {middle.n} turns")
    lengths = [
        f"{name.removeprefix(FIXED)}: {gain:.2f}"
        for name, gain in report.surveyed.items()
        if name.startswith(FIXED)
    ]
    if lengths:
        lines.append(f"  survey of fixed lengths, x plain: {', '.join(lengths)}")
    return lines


def overview_lines(cells: Sequence[Report]) -> list[str]:
    """A line for each cell, then what holds over all of them."""
    width = max([len(cell.cell.name) for cell in cells] + [4])
    head = f"{'cell':{width}}  {'plain t/s':>9}  {'ours t/s':>9}"
    lines = [head + "".join(f"{told:>10}" for told in _COLUMNS.values()) + "  (fixed; grid)"]
    for cell in cells:
        plain, ours = cell.rates.get(PLAIN), cell.rates.get(cell.ours or "")
        ratios = "".join(
            f"{cell.against[name].median:>10.3f}" if name in cell.against else f"{'-':>10}"
            for name in _COLUMNS
        )
        lines.append(
            f"{cell.cell.name:{width}}  {_rate(plain)}  {_rate(ours)}{ratios}"
            f"  ({(cell.best_fixed or '-').removeprefix(FIXED)}; {cell.best_rival or '-'})"
        )
    for told, some in _groups(cells):
        single = single_best(some)
        if single:
            line = (
                f"best single length over {told}: {single.fixed}, {single.fixed_gain:.3f} x plain"
            )
            if single.auto_gain is not None:
                line += f"; auto {single.auto_gain:.3f}, {single.ratio:.3f} of it"
            lines.append(line)
    lines += [
        f"{'holds' if verdict.holds else 'FAILS':5}  {verdict.found:.3f} (needed "
        f"{verdict.needed:.2f})  {verdict.what}"
        for verdict in verdicts(cells)
    ]
    return lines


def tell(texts: Sequence[Text]) -> str:
    """The whole result, as text."""
    cells = reports(texts)
    blocks = ["\n".join(cell_lines(cell)) for cell in cells]
    return "\n\n".join([*blocks, "\n".join(overview_lines(cells))]) + "\n"


def document(texts: Sequence[Text], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything raw, and what it comes to. `texts_from` undoes the first part."""
    cells = reports(texts)
    return {
        **settings,
        "cells": [_cell_document(cell) for cell in cells],
        "verdicts": [{**verdict._asdict(), "holds": verdict.holds} for verdict in verdicts(cells)],
        "texts": [{**asdict(text), "cell": text.cell._asdict()} for text in texts],
    }


def texts_from(document: dict[str, Any]) -> list[Text]:
    """The raw texts of a document."""
    return [Text(**{**text, "cell": Cell(**text["cell"])}) for text in document["texts"]]


def _cell_document(report: Report) -> dict[str, Any]:
    middles = {
        name: {of: middle._asdict() for of, middle in table.items()}
        for name, table in (
            ("rates", report.rates),
            ("gains", report.gains),
            ("against", report.against),
        )
    }
    return {
        **report.cell._asdict(),
        "name": report.cell.name,
        "ours": report.ours,
        "best_fixed": report.best_fixed,
        "best_rival": report.best_rival,
        "surveyed": dict(report.surveyed),
        **middles,
    }


def _groups(cells: Sequence[Report]) -> list[tuple[str, Sequence[Report]]]:
    friendly = [cell for cell in cells if not cell.cell.adversarial]
    if len(friendly) in (0, len(cells)):
        return [("all cells", cells)]
    return [("all cells", cells), ("all but the adversarial cells", friendly)]


def _spread(middle: Middle, form: str) -> str:
    return f"{middle.median:{form}} ({middle.low:{form}}-{middle.high:{form}})"


def _rate(middle: Middle | None) -> str:
    return f"{middle.median:>9.1f}" if middle else f"{'-':>9}"
