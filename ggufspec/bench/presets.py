"""Known experiments: their models, prompts, settings and published results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec.bench import tables
from ggufspec.bench.contenders import contenders
from ggufspec.bench.prompts import own_prompts
from ggufspec.bench.records import BenchResults, Contender
from ggufspec.bench.run import Experiment
from ggufspec.bench.tables import Table
from ggufspec.common.prompts import Prompt
from ggufspec.common.toml import read_toml

# For presets that do not name a pair or an experiment.
_PAIR = ("Llama-3.1-8B-Instruct-Q4_K_M", "Llama-3.2-1B-Instruct-Q4_K_M", "8B", "1B")
_EXPERIMENT = {"n_runs": 3, "n_tokens": 96}


@dataclass(frozen=True)
class PresetPair:
    """Registered names of two models, and their names in the source's table."""

    target: str
    draft: str
    target_label: str
    draft_label: str


@dataclass(frozen=True)
class Preset:
    """A known experiment. `load`: arguments of ggufspec.load; `tables`: renders its results."""

    name: str
    about: str
    pairs: Sequence[PresetPair]
    experiment: Experiment
    tables: Callable[[BenchResults], list[Table]]
    load: Mapping[str, Any]
    published: Sequence[Table]

    @staticmethod
    def of_table(name: str, table: Mapping[str, Any]) -> Preset:
        """A preset from its table in presets.toml."""
        given = table.get("prompts")
        prompts = own_prompts()
        if isinstance(given, list):
            named = ((each["id"], each["text"], each.get("system")) for each in given)
            prompts = [Prompt(id=id_, turns=(text,), system=system) for id_, text, system in named]
        elif given is not None:
            prompts = prompts[:given]
        competing = _with_variants(contenders(**table["contenders"]), table.get("variants", {}))
        return Preset(
            name=name,
            about=table["about"],
            pairs=[PresetPair(*names) for names in table.get("pairs", [_PAIR])],
            experiment=Experiment(competing, prompts, **table.get("experiment", _EXPERIMENT)),
            tables=getattr(tables, table.get("table", "general")),
            load=table.get("load", {}),
            published=[Table(**each) for each in table.get("published", ())],
        )


def _with_variants(made: list[Contender], rules: Mapping[str, str]) -> list[Contender]:
    """The contenders; if there are rules, the last one becomes one for each rule."""
    *others, last = made
    variants = [
        replace(last, name=name, options={**last.options, "verify": rule})
        for name, rule in rules.items()
    ]
    return [*others, *variants] if variants else made


PRESETS = {
    name: Preset.of_table(name, table)
    for name, table in read_toml(Path(__file__).with_suffix(".toml")).items()
}
