"""Each preset's table in its source's form. Pure: results in, tables out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

from ggufspec.bench.contenders import DRAFT_ALONE, PLAIN
from ggufspec.bench.records import Results
from ggufspec.bench.table import Row, rows
from ggufspec.bench.tables import Table, by_category, overview, positions

_CONFIDENCE = 0.95


def tables(form: str, results: Results) -> list[Table]:
    """The tables of a form that has a name; of any other, all that there is to tell."""
    made = _FORMS.get(form, _overview)(results)
    return [table for table in made if table is not None and table.rows]


def _overview(results: Results) -> list[Table | None]:
    return [overview(results), by_category(results), positions(results)]


def _notebook(results: Results) -> list[Table | None]:
    """Model | GPU layers | tokens/s | gain %."""
    made: list[Table | None] = []
    for pair, of_pair in _by_pair(results):
        facts = results.models.get(pair, {})
        names = {"target": facts.get("target_label", ""), "draft": facts.get("draft_label", "")}
        layers = {whose: facts.get(f"{whose}_layers", "") for whose in names}
        cells = []
        for row in of_pair:
            label = row.contender.label
            if label == PLAIN:
                cells.append([names["target"], layers["target"], f"{row.median:.2f}", "-"])
            elif label == DRAFT_ALONE:
                cells.append([names["draft"], layers["draft"], f"{row.median:.2f}", "-"])
            else:
                accepted = f" ({row.accepted:.1%} accepted)" if row.accepted is not None else ""
                gain = f"{row.speedup.ratio - 1:.0%}" if row.speedup else "-"
                where = " and ".join(filter(None, layers.values()))
                cells.append([f"speculative, {label}{accepted}", where, f"{row.median:.2f}", gain])
        made.append(Table("", ["Model", "GPU layers", "tokens/s", "gain %"], cells))
    return made


def _llama_ssp(results: Results) -> list[Table | None]:
    """Milliseconds a token: models alone, then pairs."""
    alone: dict[str, str] = {}
    pairs = []
    lengths: list[str] = []
    for pair, of_pair in _by_pair(results):
        facts = results.models.get(pair, {})
        known = {row.contender.label: row for row in of_pair}
        for label, whose in ((DRAFT_ALONE, "draft"), (PLAIN, "target")):
            if label in known:
                alone[str(facts.get(f"{whose}_label", whose))] = _milliseconds(known[label])
        speculative = [row for row in of_pair if row.contender.baseline is not None]
        lengths = lengths or [row.contender.label for row in speculative]
        faster = [f"{row.speedup.ratio:.2f}" if row.speedup else "-" for row in speculative]
        plain = [_milliseconds(known[PLAIN])] if PLAIN in known else ["-"]
        cells = [_milliseconds(row) for row in speculative]
        pairs.append([pair or "pair", *plain, *cells, " / ".join(faster)])
    columns = ["Target / draft", "regular", *lengths, "times as fast"]
    whole = [row for row in pairs if len(row) == len(columns)]
    return [
        Table(
            "Regular sampling", ["Model_type", "Ms/token"], [list(each) for each in alone.items()]
        ),
        Table("Speculative sampling", columns, whole),
    ]


def _llmss(results: Results) -> list[Table | None]:
    """speed(tokens/sec): draft | target | each variant; then what each accepted."""
    made: list[Table | None] = []
    for pair, of_pair in _by_pair(results):
        facts = results.models.get(pair, {})
        known = {row.contender.label: row for row in of_pair}
        order = [known[name] for name in (DRAFT_ALONE, PLAIN) if name in known]
        order += [row for row in of_pair if row.contender.baseline is not None]
        called = {DRAFT_ALONE: facts.get("draft_label", ""), PLAIN: facts.get("target_label", "")}
        names = [str(called.get(row.contender.label, row.contender.label)) for row in order]
        speeds = ["speed(tokens/sec)", *(f"{row.median:.2f}" for row in order)]
        accepted = ["accepted, 95 % interval", *(_accepted(row, results) for row in order)]
        made.append(
            Table(
                pair,
                ["", *names],
                [speeds, accepted],
                [
                    "Google's and DeepMind's papers tell one rule, with one law: their columns are "
                    "two samples of it, and differ by chance alone."
                ],
            )
        )
    return made


def _gpt2(results: Results) -> list[Table | None]:
    """Method | num_runs | time | +/- std | speedup, seconds a text."""
    made: list[Table | None] = []
    for pair, of_pair in _by_pair(results):
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


def _temperatures(results: Results) -> list[Table | None]:
    """The speed-up and the accepted share, by rule and temperature."""
    compared = [row for row in rows(results) if row.speedup]
    temperatures = list(dict.fromkeys(row.contender.temperature for row in compared))
    made: list[Table | None] = []
    for title, cell in (("Speed-up", _ratio), ("Accepted", _share)):
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


_FORMS: dict[str, Callable[[Results], Sequence[Table | None]]] = {
    "notebook": _notebook,
    "llama-ssp": _llama_ssp,
    "llmss": _llmss,
    "gpt2": _gpt2,
    "temperatures": _temperatures,
}


def _by_pair(results: Results) -> list[tuple[str, list[Row]]]:
    made = rows(results)
    pairs = dict.fromkeys(row.contender.pair for row in made)
    return [(pair, [row for row in made if row.contender.pair == pair]) for pair in pairs]


def _milliseconds(row: Row) -> str:
    return f"{row.ms_per_token:.1f}ms"


def _accepted(row: Row, results: Results) -> str:
    """The accepted share with its interval: tokens of a draft stand and fall together, so that
    rounds, not tokens, are what is independent."""
    texts = results.of(row.contender.name)
    n_rounds = sum(text.n_rounds for text in texts)
    if row.accepted is None or not n_rounds:
        return "-"
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    reach = z * (row.accepted * (1 - row.accepted) / n_rounds) ** 0.5
    return f"{row.accepted:.1%} ± {reach:.1%}"


def _ratio(row: Row | None) -> str:
    return f"{row.speedup.ratio:.2f}" if row is not None and row.speedup else "-"


def _share(row: Row | None) -> str:
    return f"{row.accepted:.1%}" if row is not None and row.accepted is not None else "-"
