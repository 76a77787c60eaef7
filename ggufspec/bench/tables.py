"""Renders summaries as tables, and tables as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from ggufspec.bench.records import BenchResults
from ggufspec.bench.summary import RankedDraft, Speedup, Summary, ranked_drafts, summarize

NONE = "-"


@dataclass(frozen=True)
class Table:
    """A title, columns, rows of cells, and notes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def overview(results: BenchResults) -> Table:
    made = summarize(results)
    has_energy = any(row.joules_per_token is not None for row in made)
    columns = [
        *("", "tokens/s", "mean ± std", "min-max", "ms/token", "first token"),
        *("speed-up", "95 % interval", "accepted", "tokens/round"),
        *(["joules/token"] if has_energy else []),
    ]
    cells = []
    for row in made:
        joules = NONE if row.joules_per_token is None else f"{row.joules_per_token:.2f}"
        cells.append(
            [
                row.contender.name,
                f"{row.median:.2f}",
                f"{row.mean:.2f} ± {row.std:.2f}" if row.std is not None else f"{row.mean:.2f}",
                f"{row.low:.2f}-{row.high:.2f}",
                f"{row.ms_per_token:.1f}",
                f"{row.first_token_seconds:.2f} s",
                speedup_cell(row),
                interval(row.speedup),
                acceptance_cell(row),
                f"{row.mean_length:.2f}",
                *([joules] if has_energy else []),
            ]
        )
    return Table("", columns, cells)


def ranking(results: BenchResults) -> Table | None:
    """The drafts of several pairs, the fastest first; None for a single pair."""
    if not (made := ranked_drafts(results)):
        return None
    columns = ["draft", "fastest with", "speed-up", "95 % interval", "accepted", "tokens/round"]
    cells = [
        [
            *(each.draft, each.contender, f"{each.speedup.ratio:.2f}", interval(each.speedup)),
            *(share_cell(each.accepted), f"{each.tokens_per_round:.2f}"),
            NONE if each.ms_per_step is None else f"{each.ms_per_step:.2f}",
        ]
        for each in made
    ]
    notes = [
        _fastest([each for each in made if each.temperature == temperature])
        for temperature in dict.fromkeys(each.temperature for each in made)
    ]
    return Table("Drafts, the fastest first", [*columns, "ms/step"], cells, notes)


def _fastest(drafts: Sequence[RankedDraft]) -> str:
    """A sentence on which draft to use, of those at one temperature."""
    best, *others = drafts
    if best.speedup.ratio <= 1:
        return f"Temperature {best.temperature:g}: no draft is faster than plain decoding."
    low = best.speedup.low
    close = [each.draft for each in others if low is None or (each.speedup.high or math.inf) > low]
    doubt = f"; not shown to be faster than {', '.join(close)}" if close else ""
    return f"Temperature {best.temperature:g}: {best.draft} is the fastest{doubt}."


def positions(results: BenchResults) -> Table | None:
    """Acceptance by position; None if nothing was drafted."""
    if not (made := [row for row in summarize(results) if row.by_position]):
        return None
    n = max(len(row.by_position) for row in made)
    cells = [[row.contender.name, *(f"{each:.0%}" for each in row.by_position)] for row in made]
    cells = [row + [""] * (n + 1 - len(row)) for row in cells]
    columns = ["accepted up to position", *(str(i) for i in range(1, n + 1))]
    return Table("Acceptance by position, of the drafts that long", columns, cells)


def by_category(results: BenchResults) -> Table | None:
    """The speed-up of each contender in each category; None for a single category."""
    names = [name for name in dict.fromkeys(text.category for text in results.measurements) if name]
    if len(names) < 2:
        return None
    compared = [row.contender.name for row in summarize(results) if row.speedup]
    found = {name: {row.contender.name: row for row in summarize(results, name)} for name in names}
    cells = []
    for contender in compared:
        rows = [found[name].get(contender) for name in names]
        ratios = [row.speedup.ratio for row in rows if row and row.speedup]
        mean = f"{geometric_mean(ratios):.2f}" if ratios else NONE
        cells.append([contender, *map(speedup_cell, rows), mean])
    return Table("Speed-up by category", ["", *names, "geometric mean"], cells)


def interval(speedup: Speedup | None, n_decimals: int = 2) -> str:
    """The confidence interval of a speed-up."""
    if speedup is None or speedup.low is None:
        return NONE
    return f"{speedup.low:.{n_decimals}f}-{speedup.high:.{n_decimals}f}"


def speedup_cell(row: Summary | None) -> str:
    return f"{row.speedup.ratio:.2f}" if row is not None and row.speedup else NONE


def acceptance_cell(row: Summary | None) -> str:
    return share_cell(row.accepted if row is not None else None)


def share_cell(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def to_markdown(table: Table) -> str:
    """A table in GitHub's Markdown."""

    def line(cells: Sequence[str]) -> str:
        escaped = (" ".join(cell.splitlines()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(escaped)} |"

    head = [f"**{table.title}**", ""] if table.title else []
    rule = line(["---" if i == 0 else "---:" for i in range(len(table.columns))])
    lines = [*head, line(table.columns), rule, *map(line, table.rows)]
    lines += [f"\n{note}" for note in table.notes]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """A table for spreadsheets; notes are left out."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([table.columns[0] or "contender", *table.columns[1:]])
    writer.writerows(table.rows)
    return written.getvalue()
