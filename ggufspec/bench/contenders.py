"""Who competes: plain decoding, the draft alone, every way to speculate that was asked for, peers.

Pure: names and options of generation; no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ggufspec.bench.records import Contender
from ggufspec.common import defaults

PLAIN = "plain"
DRAFT_ALONE = "draft alone"
Anyone = TypeVar("Anyone")

_STEPS = (5, 3, 2, 1)  # contenders by which the order moves on in each turn


def contenders(
    *,
    lengths: Sequence[int | str],
    drafters: Sequence[str | None] = (None,),
    rules: Sequence[str] = (defaults.VERIFY,),
    temperatures: Sequence[float],
    sampling: Mapping[str, Any] | None = None,
    has_draft: bool,
) -> list[Contender]:
    """Plain, the draft alone (where there is one), and all combinations.

    lengths: tokens drafted, or "auto"; drafters: None is the engine's choice; sampling: what all
    have in common. Names tell only what differs: "draft 3", "draft auto, ngram, rejection, T 0.7".
    """
    made: list[Contender] = []
    common = dict(sampling or {})
    for temperature in temperatures:
        behind = _behind(temperature, temperatures)
        options = {**common, "temperature": temperature}
        plain = Contender(f"{PLAIN}{behind}", {**options, "drafter": "none"})
        made.append(plain)
        if has_draft:
            alone = {**options, "drafter": "none"}
            made.append(Contender(f"{DRAFT_ALONE}{behind}", alone, "draft"))
        for rule in rules:
            for drafter in drafters:
                for length in lengths:
                    named = [f"draft {length}"]
                    named += [drafter] if drafter is not None and len(drafters) > 1 else []
                    named += [rule] if len(rules) > 1 else []
                    made.append(
                        Contender(
                            ", ".join(named) + behind,
                            {**options, "n_draft": length, "drafter": drafter, "verify": rule},
                            baseline=plain.name,
                        )
                    )
    return made


def peer_contenders(
    names: Sequence[str],
    *,
    temperatures: Sequence[float],
    sampling: Mapping[str, Any] | None = None,
) -> list[Contender]:
    """Peers by their names, compared with our own plain decoding at the same temperature."""
    made = []
    for temperature in temperatures:
        behind = _behind(temperature, temperatures)
        for name in names:
            made.append(
                Contender(
                    f"{name}{behind}",
                    {**(sampling or {}), "temperature": temperature},
                    model="peer",
                    baseline=f"{PLAIN}{behind}",
                    peer=name,
                )
            )
    return made


def _behind(temperature: float, temperatures: Sequence[float]) -> str:
    """What a name tells of the temperature: nothing where there is one."""
    shown = f"{temperature:g}"
    if float(shown) != temperature:  # two that are nearly the same need two names
        shown = repr(temperature)
    return f", T {shown}" if len(temperatures) > 1 else ""


def in_turn(contenders: Sequence[Anyone], turn: int) -> list[Anyone]:
    """In the order of that turn: another one begins each time, and each of them as often."""
    n = len(contenders)
    step = next(step for step in _STEPS if math.gcd(step, n) == 1)
    first = turn * step % n
    return [*contenders[first:], *contenders[:first]]
