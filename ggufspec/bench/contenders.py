"""The contenders of a benchmark: plain decoding, the draft alone, all variants, baselines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

from ggufspec.bench.records import Contender
from ggufspec.common import defaults

PLAIN = "plain"
DRAFT_ALONE = "draft alone"
Item = TypeVar("Item")

_STEPS = (5, 3, 2, 1)  # number of places by which the order may rotate


def contenders(
    *,
    lengths: Sequence[int | str],
    trees: Sequence[str] = (defaults.TREE,),
    drafters: Sequence[str | None] = (None,),
    rules: Sequence[str] = (defaults.VERIFY,),
    temperatures: Sequence[float],
    sampling: Mapping[str, Any] | None = None,
    has_draft: bool,
) -> list[Contender]:
    """Plain decoding, the draft alone (if there is one), and all combinations of the options.

    `lengths`: draft lengths, or "auto". `drafters`: names; None is the engine's choice. `sampling`:
    options of all contenders. Names contain options that differ: "draft 3", "draft auto, T 0.7".
    """
    made: list[Contender] = []
    for suffix, options in _by_temperature(temperatures, sampling):
        undrafted = {**options, "drafter": "none"}
        plain = Contender(f"{PLAIN}{suffix}", undrafted)
        made.append(plain)
        if has_draft:
            made.append(Contender(f"{DRAFT_ALONE}{suffix}", undrafted, "draft"))
        for rule, drafter, tree, length in product(rules, drafters, trees, lengths):
            named = [f"draft {length}"]
            named += [f"tree {tree}"] if len(trees) > 1 else []
            named += [drafter] if drafter is not None and len(drafters) > 1 else []
            named += [rule] if len(rules) > 1 else []
            own = {**options, "n_draft": length, "tree": tree}
            own |= {"drafter": drafter, "verify": rule}
            made.append(Contender(", ".join(named) + suffix, own, baseline=plain.name))
    return made


def baseline_contenders(
    names: Sequence[str],
    *,
    temperatures: Sequence[float],
    sampling: Mapping[str, Any] | None = None,
) -> list[Contender]:
    """Contenders for other programs, compared with plain decoding at the same temperature."""
    return [
        Contender(f"{name}{suffix}", options, "baseline", f"{PLAIN}{suffix}", program=name)
        for suffix, options in _by_temperature(temperatures, sampling)
        for name in names
    ]


def _by_temperature(
    temperatures: Sequence[float], sampling: Mapping[str, Any] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(suffix of the names, options) for each temperature; no suffix for a single temperature."""
    for temperature in temperatures:
        shown = f"{temperature:g}"
        if float(shown) != temperature:  # nearly equal temperatures need different names
            shown = repr(temperature)
        suffix = f", T {shown}" if len(temperatures) > 1 else ""
        yield suffix, {**(sampling or {}), "temperature": temperature}


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """The items in the order of turn `turn`; over the turns, each item is first equally often."""
    n = len(items)
    step = next(step for step in _STEPS if math.gcd(step, n) == 1)
    first = turn * step % n
    return [*items[first:], *items[:first]]
