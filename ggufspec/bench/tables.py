"""Renders summaries as tables, in Markdown, or like those of a preset's publication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, geometric_mean
from typing import Any

from ggufspec.bench.records import DRAFT_ALONE, PLAIN, BenchResults
from ggufspec.bench.summary import RankedDraft, Speedup, Summary, ranked_drafts, summarize

NONE = "-"
_CONFIDENCE = 0.95
_SAME_RULE = (
    "Google's and DeepMind's papers describe the same rule: their columns differ only by chance."
)


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def overview(results: BenchResults) -> Table:
    rows = []
    for row in summarize(results):
        std = f" ± {row.std:.2f}" if row.std is not None else ""
        cells = {
            "tokens/s": f"{row.median:.2f}",
            "mean ± std": f"{row.mean:.2f}{std}",
            "min-max": f"{row.low:.2f}-{row.high:.2f}",
            "ms/token": f"{row.ms_per_token:.1f}",
            "first token": f"{row.first_token_seconds:.2f} s",
            "speed-up": speedup_cell(row),
            "95 % interval": interval(row.speedup),
            "accepted": acceptance_cell(row),
            "tokens/round": f"{row.mean_length:.2f}",
        }
        rows.append((row.contender.name, cells))
    return _grid("", "", rows)


def ranking(results: BenchResults) -> Table | None:
    """The drafts of several pairs, the fastest first; None for a single pair."""
    if not (made := ranked_drafts(results)):
        return None
    rows = []
    for each in made:
        cells = {
            "fastest with": each.fastest.contender.label,
            "speed-up": f"{each.speedup.ratio:.2f}",
            "95 % interval": interval(each.speedup),
            "accepted": acceptance_cell(each.fastest),
            "tokens/round": f"{each.fastest.mean_length:.2f}",
            "ms/step": NONE if each.ms_per_step is None else f"{each.ms_per_step:.2f}",
        }
        rows.append((each.fastest.contender.pair, cells))
    notes = [
        f"Temperature {temperature:g}: {_fastest(list(drafts))}."
        for temperature, drafts in groupby(made, lambda each: each.fastest.contender.temperature)
    ]
    return _grid("Drafts, the fastest first", "draft", rows, notes)


def _fastest(drafts: Sequence[RankedDraft]) -> str:
    best, *others = drafts
    if best.speedup.ratio <= 1:
        return "no draft is faster than plain decoding"
    low = best.speedup.low
    close = [
        each.fastest.contender.pair
        for each in others
        if low is None or (each.speedup.high or math.inf) > low
    ]
    doubt = f"; not shown to be faster than {', '.join(close)}" if close else ""
    return f"{best.fastest.contender.pair} is the fastest{doubt}"


def positions(results: BenchResults) -> Table | None:
    """Acceptance by position; None if nothing was drafted."""
    rows = [
        (row.contender.name, {str(i): f"{share:.0%}" for i, share in enumerate(row.by_position, 1)})
        for row in summarize(results)
        if row.by_position
    ]
    title = "Acceptance by position, for drafts at least that long"
    return _grid(title, "accepted up to position", rows, missing="") if rows else None


def by_category(results: BenchResults) -> Table | None:
    """The speed-up of each contender in each category; None for a single category."""
    names = [name for name in dict.fromkeys(text.category for text in results.measurements) if name]
    if len(names) < 2:
        return None
    found = {name: {row.contender.name: row for row in summarize(results, name)} for name in names}
    rows = []
    for contender in (row.contender.name for row in summarize(results) if row.speedup):
        of_each = {name: found[name].get(contender) for name in names}
        ratios = [row.speedup.ratio for row in of_each.values() if row and row.speedup]
        cells = {name: speedup_cell(row) for name, row in of_each.items()}
        cells["geometric mean"] = f"{geometric_mean(ratios):.2f}" if ratios else NONE
        rows.append((contender, cells))
    return _grid("Speed-up by category", "", rows)


# Tables in the form of the presets' sources.


def general(results: BenchResults) -> list[Table]:
    """All general tables: the ranking of drafts, speeds, categories, acceptance by position."""
    found = (ranking(results), overview(results), by_category(results), positions(results))
    return [table for table in found if table is not None]


def notebook(results: BenchResults) -> list[Table]:
    """Model | GPU layers | tokens/s | gain %."""
    made: list[Table] = []
    for _, of_pair, facts in _by_pair(results):
        names = {"target": facts.get("target_label", ""), "draft": facts.get("draft_label", "")}
        layers = {whose: facts.get(f"{whose}_layers", "") for whose in names}
        cells = []
        for row in of_pair:
            label = row.contender.label
            if (whose := {PLAIN: "target", DRAFT_ALONE: "draft"}.get(label)) is not None:
                cells.append([names[whose], layers[whose], f"{row.median:.2f}", "-"])
            else:
                accepted = f" ({row.accepted:.1%} accepted)" if row.accepted is not None else ""
                gain = f"{row.speedup.ratio - 1:.0%}" if row.speedup else "-"
                where = " and ".join(filter(None, layers.values()))
                cells.append([f"speculative, {label}{accepted}", where, f"{row.median:.2f}", gain])
        made.append(Table("", ["Model", "GPU layers", "tokens/s", "gain %"], cells))
    return made


def llama_ssp(results: BenchResults) -> list[Table]:
    """Milliseconds per token: models alone, then pairs."""
    alone: dict[str, str] = {}
    pairs = []
    for pair, of_pair, facts in _by_pair(results):
        known = {row.contender.label: f"{row.ms_per_token:.1f}ms" for row in of_pair}
        for label, whose in ((DRAFT_ALONE, "draft"), (PLAIN, "target")):
            if label in known:
                alone[str(facts.get(f"{whose}_label", whose))] = known[label]
        speculative = [row for row in of_pair if row.contender.baseline is not None]
        cells = {row.contender.label: known[row.contender.label] for row in speculative}
        faster = " / ".join(map(speedup_cell, speculative))
        pairs.append(
            (pair or "pair", {"regular": known.get(PLAIN, NONE), **cells, "speed-up": faster})
        )
    models = [(name, {"Ms/token": cell}) for name, cell in alone.items()]
    return [
        _grid("Regular sampling", "Model_type", models),
        _grid("Speculative sampling", "Target / draft", pairs),
    ]


def llmss(results: BenchResults) -> list[Table]:
    """speed(tokens/sec): draft | target | each variant; then acceptance rates."""
    made: list[Table] = []
    for pair, of_pair, facts in _by_pair(results):
        known = {row.contender.label: row for row in of_pair}
        order = [known[name] for name in (DRAFT_ALONE, PLAIN) if name in known]
        order += [row for row in of_pair if row.contender.baseline is not None]
        called = {DRAFT_ALONE: facts.get("draft_label", ""), PLAIN: facts.get("target_label", "")}
        names = [str(called.get(row.contender.label, row.contender.label)) for row in order]
        speeds = ["speed(tokens/sec)", *(f"{row.median:.2f}" for row in order)]
        accepted = ["accepted, 95 % interval", *(_accepted(row, results) for row in order)]
        made.append(Table(pair, ["", *names], [speeds, accepted], [_SAME_RULE]))
    return made


def gpt2(results: BenchResults) -> list[Table]:
    """Method | num_runs | time | +/- std | speedup, in seconds per text."""
    made: list[Table] = []
    for pair, of_pair, _ in _by_pair(results):
        plain = next((row for row in of_pair if row.contender.baseline is None), None)
        cells, notes = [], []
        for row in of_pair:
            is_plain = row.contender.baseline is None
            method = "Autoregressive Sampling" if is_plain else "Speculative Sampling"
            std = f"{row.std_seconds:.2f}" if row.std_seconds is not None else "-"
            ratio = plain.mean_seconds / row.mean_seconds if plain and row.mean_seconds else 1.0
            cells.append([method, str(row.n_texts), f"{row.mean_seconds:.2f}", std, f"{ratio:.2f}"])
            if row.accepted is not None:
                notes.append(f"{row.accepted:.1%} of the drafted tokens were accepted.")
        columns = ["Method", "num_runs", "time", "+/- std", "speedup"]
        made.append(Table(pair, columns, cells, notes))
    return made


# Grids, cells and Markdown.


def _grid(
    title: str,
    corner: str,
    rows: Sequence[tuple[str, Mapping[str, str]]],
    notes: Sequence[str] = (),
    missing: str = NONE,
) -> Table:
    columns = list(dict.fromkeys(column for _, cells in rows for column in cells))
    body = [[name, *(cells.get(column, missing) for column in columns)] for name, cells in rows]
    return Table(title, [corner, *columns], body, notes)


def interval(speedup: Speedup | None, n_decimals: int = 2) -> str:
    if speedup is None or speedup.low is None:
        return NONE
    return f"{speedup.low:.{n_decimals}f}-{speedup.high:.{n_decimals}f}"


def speedup_cell(row: Summary | None) -> str:
    return f"{row.speedup.ratio:.2f}" if row is not None and row.speedup else NONE


def acceptance_cell(row: Summary | None) -> str:
    return NONE if row is None or row.accepted is None else f"{row.accepted:.1%}"


def to_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        escaped = (" ".join(cell.splitlines()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(escaped)} |"

    head = [f"**{table.title}**", ""] if table.title else []
    rule = line(["---" if i == 0 else "---:" for i in range(len(table.columns))])
    lines = [*head, line(table.columns), rule, *map(line, table.rows)]
    lines += [f"\n{note}" for note in table.notes]
    return "\n".join(lines) + "\n"


def _by_pair(results: BenchResults) -> list[tuple[str, list[Summary], dict[str, Any]]]:
    made = summarize(results)
    return [
        (pair, [row for row in made if row.contender.pair == pair], results.models.get(pair, {}))
        for pair in dict.fromkeys(row.contender.pair for row in made)
    ]


def _accepted(row: Summary, results: BenchResults) -> str:
    """The acceptance rate with an interval over rounds, since a draft's tokens are dependent."""
    texts = results.of(row.contender.name)
    n_rounds = sum(text.n_rounds for text in texts)
    if row.accepted is None or not n_rounds:
        return "-"
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    reach = z * (row.accepted * (1 - row.accepted) / n_rounds) ** 0.5
    return f"{row.accepted:.1%} ± {reach:.1%}"
