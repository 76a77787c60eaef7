"""Renders reports as text tables and as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.benchmarks.ab_report import (
    AUTO,
    FIXED,
    LLAMA,
    PLAIN,
    Condition,
    MedianRange,
    Report,
    Text,
    reports,
    single_best,
    verdicts,
)

_COLUMNS = {
    "plain": "/plain",
    "fixed": "/fixed",
    "llama default": "/default",
    "llama best": "/grid",
}


def condition_lines(report: Report) -> list[str]:
    """The lines of one condition: tokens/s and speed-ups with their ranges."""
    lines = [f"{report.condition.name}"]
    shown = [PLAIN, AUTO, report.best_fixed, LLAMA, report.best_grid]
    for name in dict.fromkeys([*shown, *report.rates]):
        if name is None or name not in report.rates:
            continue
        speedup = report.speedups.get(name)
        lines.append(
            f"  {name:22}{_spread(report.rates[name], '.1f'):>26} t/s"
            f"{_spread(speedup, '.3f') if speedup else '':>26} x plain"
        )
    for name, found_range in report.against.items():
        other = {"fixed": report.best_fixed, "llama best": report.best_grid}.get(name)
        named = f"{name} ({other})" if other else name
        lines.append(
            f"  {report.ours} / {named}: {_spread(found_range, '.3f')}, {found_range.n} turns"
        )
    lengths = [
        f"{name.removeprefix(FIXED)}: {speedup:.2f}"
        for name, speedup in report.surveyed.items()
        if name.startswith(FIXED)
    ]
    if lengths:
        lines.append(f"  survey of fixed lengths, x plain: {', '.join(lengths)}")
    return lines


def overview_lines(conditions: Sequence[Report]) -> list[str]:
    """A line for each condition, then results over all of them."""
    width = max([len(condition.condition.name) for condition in conditions] + [4])
    head = f"{'condition':{width}}  {'plain t/s':>9}  {'ours t/s':>9}"
    lines = [head + "".join(f"{shown:>10}" for shown in _COLUMNS.values()) + "  (fixed; grid)"]
    for condition in conditions:
        plain, ours = condition.rates.get(PLAIN), condition.rates.get(condition.ours or "")
        ratios = "".join(
            f"{condition.against[name].median:>10.3f}"
            if name in condition.against
            else f"{'-':>10}"
            for name in _COLUMNS
        )
        lines.append(
            f"{condition.condition.name:{width}}  {_rate(plain)}  {_rate(ours)}{ratios}"
            f"  ({(condition.best_fixed or '-').removeprefix(FIXED)}; {condition.best_grid or '-'})"
        )
    for shown, some in _groups(conditions):
        single = single_best(some)
        if single:
            found = f"{single.fixed}, {single.fixed_speedup:.3f} x plain"
            line = f"best single length over {shown}: {found}"
            if single.auto_speedup is not None:
                line += f"; auto {single.auto_speedup:.3f}, {single.ratio:.3f} of it"
            lines.append(line)
    lines += [
        f"{'holds' if verdict.holds else 'FAILS':5}  {verdict.found:.3f} (needed "
        f"{verdict.needed:.2f})  {verdict.what}"
        for verdict in verdicts(conditions)
    ]
    return lines


def render(texts: Sequence[Text]) -> str:
    """The whole result as text."""
    conditions = reports(texts)
    blocks = ["\n".join(condition_lines(condition)) for condition in conditions]
    return "\n\n".join([*blocks, "\n".join(overview_lines(conditions))]) + "\n"


def document(texts: Sequence[Text], settings: dict[str, Any]) -> dict[str, Any]:
    """All raw texts, and the reports. `texts_from` reads the texts."""
    conditions = reports(texts)
    return {
        **settings,
        "conditions": [_condition_document(condition) for condition in conditions],
        "verdicts": [
            {**verdict._asdict(), "holds": verdict.holds} for verdict in verdicts(conditions)
        ],
        "texts": [{**asdict(text), "condition": text.condition._asdict()} for text in texts],
    }


def texts_from(document: dict[str, Any]) -> list[Text]:
    """The raw texts of a document."""
    return [
        Text(**{**text, "condition": Condition(**text["condition"])}) for text in document["texts"]
    ]


def _condition_document(report: Report) -> dict[str, Any]:
    medians = {
        name: {of: found_range._asdict() for of, found_range in table.items()}
        for name, table in (
            ("rates", report.rates),
            ("speedups", report.speedups),
            ("against", report.against),
        )
    }
    return {
        **report.condition._asdict(),
        "name": report.condition.name,
        "ours": report.ours,
        "best_fixed": report.best_fixed,
        "best_grid": report.best_grid,
        "surveyed": dict(report.surveyed),
        **medians,
    }


def _groups(conditions: Sequence[Report]) -> list[tuple[str, Sequence[Report]]]:
    friendly = [condition for condition in conditions if not condition.condition.adversarial]
    if len(friendly) in (0, len(conditions)):
        return [("all conditions", conditions)]
    return [("all conditions", conditions), ("all but the adversarial conditions", friendly)]


def _spread(found_range: MedianRange, form: str) -> str:
    return f"{found_range.median:{form}} ({found_range.low:{form}}-{found_range.high:{form}})"


def _rate(found_range: MedianRange | None) -> str:
    return f"{found_range.median:>9.1f}" if found_range else f"{'-':>9}"
