"""What a benchmark measures: contenders, prompts, experiments, and presets of known experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from ggufspec.bench import tables
from ggufspec.bench.records import DRAFT_ALONE, PLAIN, BenchResults, Contender, TextKey
from ggufspec.bench.tables import Table
from ggufspec.common import defaults
from ggufspec.common.prompts import Prompt
from ggufspec.common.reading import read_toml

Item = TypeVar("Item")

_FOLDER = Path(__file__).parent
KINDS: Mapping[str, Sequence[str]] = read_toml(_FOLDER / "prompts.toml")


@dataclass(frozen=True)
class Experiment:
    contenders: Sequence[Contender]
    prompts: Sequence[Prompt]
    n_runs: int
    n_tokens: int
    n_warm_up: int = 16
    seed: int = 0
    ignore_eos: bool = True
    # Use the target's chat template; None: if it has one, for prompts with category or system.
    chat: bool | None = None

    def of_pair(self, pair: str) -> Experiment:
        """The experiment for one of several pairs; `pair` is "" if there is only one."""
        if not pair:
            return self
        return replace(self, contenders=[each.of_pair(pair) for each in self.contenders])

    def order(self) -> Iterator[TextKey]:
        """All texts in the order in which they are generated: the contenders alternate."""
        for run in range(self.n_runs):
            for i, prompt in enumerate(self.prompts):
                order = rotated(self.contenders, run * len(self.prompts) + i)
                yield from (TextKey(each.name, prompt.name, run) for each in order)


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """The items in the order of turn `turn`; over the turns, each item is first equally often."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


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
    names: Sequence[str], *, temperatures: Sequence[float], sampling: Mapping[str, Any]
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


def own_prompts() -> list[Prompt]:
    """The built-in prompts: some for free continuation, some with text to repeat."""
    return [
        Prompt(id=f"{kind} {i}", category=kind, turns=(text,))
        for kind, texts in KINDS.items()
        for i, text in enumerate(texts, 1)
    ]


def spread(prompts: Sequence[Prompt], n_most: int | None) -> list[Prompt]:
    """At most `n_most` prompts: the first ones of each category, the same number of each."""
    if n_most is None or n_most >= len(prompts):
        return list(prompts)
    rank: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        rank[prompt.category] = rank.get(prompt.category, 0) + 1
        ranked.append((rank[prompt.category], i))
    return [prompts[i] for i in sorted(i for _, i in sorted(ranked)[:n_most])]


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    pairs: Sequence[tuple[str, str, str, str]]  # target, draft: registered names, then the source's
    experiment: Experiment
    tables: Callable[[BenchResults], list[Table]]  # renders its results
    load: Mapping[str, Any]  # arguments of ggufspec.load
    published: Sequence[Table]

    @staticmethod
    def of_table(name: str, table: Mapping[str, Any]) -> Preset:
        prompts = [
            Prompt(id=each["id"], turns=(each["text"],), system=each.get("system"))
            for each in table["prompts"]
        ]
        competing = contenders(**table["contenders"])
        if rules := table.get("variants"):
            last = competing.pop()
            competing += [
                replace(last, name=variant, options={**last.options, "verify": rule})
                for variant, rule in rules.items()
            ]
        return Preset(
            name=name,
            about=table["about"],
            pairs=[tuple(names) for names in table["pairs"]],
            experiment=Experiment(competing, prompts, **table["experiment"]),
            tables=getattr(tables, table["table"]),
            load=table.get("load", {}),
            published=[Table(**each) for each in table["published"]],
        )


PRESETS = {
    name: Preset.of_table(name, table)
    for name, table in read_toml(_FOLDER / "presets.toml").items()
}
