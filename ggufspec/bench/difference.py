"""Two benchmarks -> what has changed from one to the other, and what speaks against the comparison.

Pure. Of two sessions, tokens/s tell also how fast the machine was each time; speed-ups over plain
decoding, each of its own session, do not: they decide where there are any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ggufspec.bench.records import Contender, Measurement, Results
from ggufspec.bench.table import Row, Speedup, doubts, ratio_of_texts, rows
from ggufspec.bench.tables import Table

_NONE = "-"
_COLUMNS = (
    *("", "tokens/s before", "tokens/s after", "ratio", "95 % interval"),
    *("ratio of speed-ups", "its 95 % interval", "accepted before", "accepted after", "verdict"),
)
_N_SHOWN = 60
_Key = tuple[str, int]


@dataclass(frozen=True)
class Change:
    """What has become of one contender.

    `ratio`: of the rates of the same texts, after / before. `relative`: the same of the speed-ups
    over plain. None: nothing can be paired.
    """

    before: Row
    after: Row
    ratio: Speedup | None
    relative: Speedup | None

    @property
    def verdict(self) -> str:
        """What decides is the speed-up where there is one, else the rate."""
        return _verdict(self.relative or self.ratio)


def changes(before: Results, after: Results) -> list[Change]:
    """Those of the contenders that have written in both."""
    then = {row.contender.name: row for row in rows(before)}
    return [
        Change(then[now.contender.name], now, *_ratios(before, after, now.contender))
        for now in rows(after)
        if now.contender.name in then
    ]


def compare(before: Results, after: Results) -> Table:
    """The changes, and in its notes whatever else may have caused them."""
    found = changes(before, after)
    notes = [
        *_absent(before, after, found),
        *_circumstances(before, after),
        *_of_the_machine(found),
        *(f"before: {doubt}" for doubt in doubts(before)),
        *(f"after: {doubt}" for doubt in doubts(after)),
    ]
    return Table("After compared with before", _COLUMNS, [_cells(each) for each in found], notes)


def _ratios(
    before: Results, after: Results, contender: Contender
) -> tuple[Speedup | None, Speedup | None]:
    """Of the rates, and of the speed-ups, paired by prompt and run."""
    then, now = _rates(before.of(contender.name)), _rates(after.of(contender.name))
    shared = [key for key in now if key in then]
    logs = {key: math.log(now[key] / then[key]) for key in shared}
    names = {each.name: each.baseline for each in before.contenders}
    plain_before = names.get(contender.name)
    if contender.baseline is None or plain_before is None:
        return ratio_of_texts(logs), None
    plain_then, plain_now = (
        _rates(before.of(plain_before)),
        _rates(after.of(contender.baseline)),
    )
    relative = {
        key: logs[key] - math.log(plain_now[key] / plain_then[key])
        for key in shared
        if key in plain_now and key in plain_then
    }
    return ratio_of_texts(logs), ratio_of_texts(relative)


def _rates(texts: Sequence[Measurement]) -> dict[_Key, float]:
    """Of the texts in which there was anything to measure."""
    return {
        (text.prompt, text.run): text.tokens_per_second
        for text in texts
        if text.tokens_per_second > 0
    }


def _verdict(ratio: Speedup | None) -> str:
    if ratio is None:
        return "no text in common"
    if ratio.low is None or ratio.high is None:
        return "too few texts"
    if ratio.low > 1:
        return "faster"
    return "slower" if ratio.high < 1 else "no difference shown"


def _cells(change: Change) -> list[str]:
    before, after = change.before, change.after
    return [
        after.contender.name,
        f"{before.median:.2f}",
        f"{after.median:.2f}",
        f"{change.ratio.ratio:.3f}" if change.ratio else _NONE,
        _interval(change.ratio),
        f"{change.relative.ratio:.3f}" if change.relative else _NONE,
        _interval(change.relative),
        _share(before.accepted),
        _share(after.accepted),
        change.verdict,
    ]


def _interval(ratio: Speedup | None) -> str:
    """Finer than that of a speed-up: what has changed may be little."""
    if ratio is None or ratio.low is None:
        return _NONE
    return f"{ratio.low:.3f}-{ratio.high:.3f}"


def _share(accepted: float | None) -> str:
    return _NONE if accepted is None else f"{accepted:.1%}"


# Notes -------------------------------------------------------------------------------------------


def _absent(before: Results, after: Results, found: Sequence[Change]) -> Iterator[str]:
    shared = {change.after.contender.name for change in found}
    for when, results in (("before", before), ("after", after)):
        alone = [row.contender.name for row in rows(results) if row.contender.name not in shared]
        if alone:
            yield f"only {when}: {', '.join(alone)}"
    options = {each.name: each.options for each in before.contenders}
    for contender in after.contenders:
        if contender.name in shared:
            then, now = options[contender.name], contender.options
            for told in _differences(then, now):
                yield f"options of {contender.name} differ: {told}"


def _circumstances(before: Results, after: Results) -> Iterator[str]:
    for what in ("machine", "versions", "models", "settings"):
        told = list(_differences(getattr(before, what), getattr(after, what)))
        if told:
            yield f"{what} differ: {'; '.join(told)}"
    texts = [{(each.prompt, each.run) for each in both.measurements} for both in (before, after)]
    if texts[0] != texts[1] and texts[0] & texts[1]:
        n_both = len(texts[0] & texts[1])
        yield (
            f"texts differ: {len(texts[0])} before, {len(texts[1])} after (prompts times runs); "
            f"compared are the {n_both} in both, but the medians are of all"
        )


def _of_the_machine(found: Sequence[Change]) -> Iterator[str]:
    """What the rate of plain decoding says of all the others."""
    for change in found:
        name, verdict = change.after.contender.name, _verdict(change.ratio)
        is_plain = any(other.after.contender.baseline == name for other in found)
        if is_plain and change.ratio and verdict in ("faster", "slower"):
            yield (
                f"{name} itself is {change.ratio.ratio:.2f} times as fast as before: the machine, "
                "or llama.cpp, changed; verdicts on the others are of their speed-ups over it"
            )


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    then, now = dict(_flat(before)), dict(_flat(after))
    for name in dict.fromkeys([*then, *now]):
        old, new = (_told(each, name) for each in (then, now))
        if old != new:
            yield f"{name} was {_short(old)}, is {_short(new)}"


def _flat(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Facts within facts by the names that lead to them."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _told(facts: Mapping[str, Any], name: str) -> str:
    if name not in facts:
        return "not told"
    return json.dumps(facts[name], ensure_ascii=False)


def _short(told: str) -> str:
    return told if len(told) <= _N_SHOWN else f"{told[: _N_SHOWN - 3]}..."
