"""Compares two benchmarks: the change of each contender, and other possible causes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ggufspec.bench.records import BenchResults
from ggufspec.bench.summary import (
    Speedup,
    Summary,
    log_ratios,
    ratio_of_texts,
    summarize,
    warnings_of,
)
from ggufspec.bench.tables import NONE, Table, acceptance_cell, interval
from ggufspec.common.facts import differences

_COLUMNS = (
    *("", "tokens/s before", "tokens/s after", "ratio", "95 % interval"),
    *("ratio of speed-ups", "its 95 % interval", "accepted before", "accepted after", "verdict"),
)
_N_DECIMALS = 3  # changes may be small


@dataclass(frozen=True)
class Change:
    before: Summary
    after: Summary
    ratio: Speedup | None  # rates after / rates before; None: no text is in both benchmarks
    relative: Speedup | None  # the same for speed-ups over plain

    @property
    def verdict(self) -> str:
        return _verdict(self.relative or self.ratio)


def changes(before: BenchResults, after: BenchResults) -> list[Change]:
    found = []
    then = {row.contender.name: row for row in summarize(before)}
    for now in summarize(after):
        name, plain = now.contender.name, now.contender.baseline
        if name not in then:
            continue
        # Ratios of rates and of speed-ups, paired by prompt and run.
        logs, relative = log_ratios(after.of(name), before.of(name)), None
        plain_before = then[name].contender.baseline
        if plain is not None and plain_before is not None:
            of_plain = log_ratios(after.of(plain), before.of(plain_before))
            relative = ratio_of_texts(
                {key: logs[key] - of_plain[key] for key in logs if key in of_plain}
            )
        found.append(Change(then[name], now, ratio_of_texts(logs), relative))
    return found


def compare(before: BenchResults, after: BenchResults) -> Table:
    """The changes as a table; the notes name other possible causes."""
    found = changes(before, after)
    notes = [
        *_absent(before, after, found),
        *_circumstances(before, after),
        *_plain_changes(found),
        *(f"before: {warning}" for warning in warnings_of(before)),
        *(f"after: {warning}" for warning in warnings_of(after)),
    ]
    return Table("After compared with before", _COLUMNS, [_cells(each) for each in found], notes)


def _verdict(ratio: Speedup | None) -> str:
    if ratio is None:
        return "no text in common"
    if ratio.low is None or ratio.high is None:
        return "too few texts"
    if ratio.low > 1:
        return "faster"
    return "slower" if ratio.high < 1 else "no difference shown"


def _cells(change: Change) -> list[str]:
    both = change.before, change.after
    cells = [change.after.contender.name, *(f"{row.median:.2f}" for row in both)]
    for ratio in (change.ratio, change.relative):
        cells.append(f"{ratio.ratio:.{_N_DECIMALS}f}" if ratio else NONE)
        cells.append(interval(ratio, _N_DECIMALS))
    return [*cells, *map(acceptance_cell, both), change.verdict]


def _absent(before: BenchResults, after: BenchResults, found: Sequence[Change]) -> Iterator[str]:
    shared = {change.after.contender.name for change in found}
    for when, results in (("before", before), ("after", after)):
        names = (row.contender.name for row in summarize(results))
        if alone := [name for name in names if name not in shared]:
            yield f"only {when}: {', '.join(alone)}"
    options = {each.name: each.options for each in before.contenders}
    for contender in after.contenders:
        if contender.name in shared:
            for change in differences(options[contender.name], contender.options):
                yield f"options of {contender.name} differ: {change}"


def _circumstances(before: BenchResults, after: BenchResults) -> Iterator[str]:
    for what in ("machine", "versions", "models", "settings"):
        if found := list(differences(getattr(before, what), getattr(after, what))):
            yield f"{what} differ: {'; '.join(found)}"
    texts = [{(each.prompt, each.run) for each in both.measurements} for both in (before, after)]
    if texts[0] != texts[1] and texts[0] & texts[1]:
        n_both = len(texts[0] & texts[1])
        yield (
            f"texts differ: {len(texts[0])} before, {len(texts[1])} after (prompts x runs); ratios "
            f"use the {n_both} texts in both, medians use all"
        )


def _plain_changes(found: Sequence[Change]) -> Iterator[str]:
    for change in found:
        name, verdict = change.after.contender.name, _verdict(change.ratio)
        is_plain = any(other.after.contender.baseline == name for other in found)
        if is_plain and change.ratio and verdict in ("faster", "slower"):
            yield (
                f"{name} itself is {change.ratio.ratio:.2f} times as fast as before: the machine "
                "or llama.cpp changed; the other verdicts use speed-ups over it"
            )
