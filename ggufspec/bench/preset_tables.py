"""Renders the results of each preset as the table of its source."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from ggufspec.bench.contenders import DRAFT_ALONE, PLAIN
from ggufspec.bench.records import BenchResults
from ggufspec.bench.summary import Summary, summarize
from ggufspec.bench.tables import (
    Table,
    acceptance_cell,
    by_category,
    overview,
    positions,
    ranking,
    speedup_cell,
)

_CONFIDENCE = 0.95
_SAME_RULE = (
    "Google's and DeepMind's papers describe the same rule: their columns differ by chance only."
)


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
    lengths: list[str] = []
    for pair, of_pair, facts in _by_pair(results):
        known = {row.contender.label: row for row in of_pair}
        for label, whose in ((DRAFT_ALONE, "draft"), (PLAIN, "target")):
            if label in known:
                alone[str(facts.get(f"{whose}_label", whose))] = _milliseconds(known[label])
        speculative = [row for row in of_pair if row.contender.baseline is not None]
        lengths = lengths or [row.contender.label for row in speculative]
        faster = [speedup_cell(row) for row in speculative]
        plain = [_milliseconds(known[PLAIN])] if PLAIN in known else ["-"]
        cells = [_milliseconds(row) for row in speculative]
        pairs.append([pair or "pair", *plain, *cells, " / ".join(faster)])
    columns = ["Target / draft", "regular", *lengths, "speed-up"]
    whole = [row for row in pairs if len(row) == len(columns)]
    models = [list(each) for each in alone.items()]
    return [
        Table("Regular sampling", ["Model_type", "Ms/token"], models),
        Table("Speculative sampling", columns, whole),
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


def temperatures(results: BenchResults) -> list[Table]:
    """Speed-up and acceptance rate, by rule and temperature."""
    compared = [row for row in summarize(results) if row.speedup]
    temperatures = list(dict.fromkeys(row.contender.temperature for row in compared))
    made: list[Table] = []
    for title, cell in (("Speed-up", speedup_cell), ("Accepted", acceptance_cell)):
        lines = []
        for rule in dict.fromkeys(str(row.contender.options.get("verify")) for row in compared):
            of_rule = {
                row.contender.temperature: row
                for row in compared
                if row.contender.options.get("verify") == rule
            }
            lines.append([rule, *(cell(of_rule.get(each)) for each in temperatures)])
        columns = ["rule", *(f"T {each:g}" for each in temperatures)]
        made.append(Table(f"{title} by temperature", columns, lines))
    return made


def _by_pair(results: BenchResults) -> list[tuple[str, list[Summary], dict[str, Any]]]:
    made = summarize(results)
    return [
        (pair, [row for row in made if row.contender.pair == pair], results.models.get(pair, {}))
        for pair in dict.fromkeys(row.contender.pair for row in made)
    ]


def _milliseconds(row: Summary) -> str:
    return f"{row.ms_per_token:.1f}ms"


def _accepted(row: Summary, results: BenchResults) -> str:
    """The acceptance rate with its interval, over rounds: tokens of a draft are not independent."""
    texts = results.of(row.contender.name)
    n_rounds = sum(text.n_rounds for text in texts)
    if row.accepted is None or not n_rounds:
        return "-"
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    reach = z * (row.accepted * (1 - row.accepted) / n_rounds) ** 0.5
    return f"{row.accepted:.1%} ± {reach:.1%}"
