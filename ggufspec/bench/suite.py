"""A benchmark of one or several pairs of models: what is measured of each, in one Results.

Knows plans and facts of engines; neither options nor files of results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ggufspec.bench import machine
from ggufspec.bench.baselines import Peer
from ggufspec.bench.presets import Preset
from ggufspec.bench.records import Key, Results, plain
from ggufspec.bench.run import Heard, Plan, Told, measure, partings
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.llama import devices


@dataclass(frozen=True)
class Job:
    """One pair and what it is to write. `pair`: its name in the results; "" if there is one."""

    target: Path
    draft: Path | None
    plan: Plan
    pair: str = ""
    target_label: str = ""
    draft_label: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)


def plan_of(preset: Preset, pair: str, **changed: Any) -> Plan:
    """A preset's plan for one of its pairs, with what the user has `changed` (None: nothing)."""
    plan = Plan(
        contenders=[each.of_pair(pair) for each in preset.contenders],
        prompts=preset.prompts,
        n_runs=preset.n_runs,
        n_tokens=preset.n_tokens,
        ignore_eos=preset.ignore_eos,
        chat=preset.chat,
    )
    return replace(plan, **{name: value for name, value in changed.items() if value is not None})


def perform(
    job: Job,
    engine: Engine,
    results: Results,
    heard: Heard | None = None,
    *,
    peers: Sequence[Peer] = (),
    told: Told | None = None,
    kept: Callable[[], None] = lambda: None,
) -> int:
    """Measure what is not in the results yet, and add it; returns how many texts that were.

    `told` hears why a text was left out. `kept` is called after every text, while no clock runs.
    What there is when a KeyboardInterrupt comes, stays. Raises GgufspecError.
    """
    results.models[job.pair] = _facts(job, engine)
    done = {text.key for text in results.measurements}
    n = 0
    try:
        for text in measure(engine, job.plan, done=done, heard=heard, peers=peers, told=told):
            results.measurements.append(text)
            n += 1
            kept()
        if n:
            names = {each.name for each in job.plan.contenders}
            others = [each for each in results.partings if each.contender not in names]
            results.partings = others + partings(engine, job.plan, results)
    finally:
        peak = machine.peak_rss()
        if peak is not None:
            results.memory["peak_rss_bytes"] = peak
    return n


def check_resumed(before: Results, now: Results) -> None:
    """Whether results may be gone on with: raises OptionError where they are of something else."""
    differing = [
        f"{name} was {_shortened(before.settings.get(name))}, is {_shortened(value)}"
        for name, value in now.settings.items()
        if before.settings.get(name) != value
    ]
    names = [[each.name for each in results.contenders] for results in (before, now)]
    if names[0] != names[1]:
        differing.append(f"contenders were {_shortened(names[0])}, are {_shortened(names[1])}")
    else:
        for old, new in zip(before.contenders, now.contenders, strict=True):
            differing += _differing(f"{new.name}: ", old.options, new.options)
    # A kernel may be updated between two evenings; another processor or library is another speed.
    machines = [
        {name: value for name, value in results.machine.items() if name != "platform"}
        for results in (before, now)
    ]
    differing += _differing("", *machines)
    differing += _differing("", before.versions, now.versions)
    if differing:
        raise OptionError(
            f"these results are of another benchmark: {'; '.join(differing)}. Give the same "
            "options to --resume, or another file to --json"
        )


def n_left(job: Job, results: Results) -> int:
    """How many texts of a job are not in the results yet."""
    done: set[Key] = {text.key for text in results.measurements}
    return sum(key not in done for key in job.plan.order())


def _facts(job: Job, engine: Engine) -> dict[str, Any]:
    has_gpu = bool(devices.gpus())
    facts: dict[str, Any] = {"placement": engine.placement}
    for whose, context, label in (
        ("target", engine.target, job.target_label),
        ("draft", engine.draft, job.draft_label),
    ):
        if context is None:
            continue
        model = context.model
        n_layers = min(model.n_gpu_layers, model.n_layers) if has_gpu else 0
        facts |= {
            whose: plain(model.path.name),
            f"{whose}_label": label or plain(model.path.name),
            f"{whose}_description": model.description,
            f"{whose}_bytes": model.n_bytes,
            f"{whose}_params": model.n_params,
            f"{whose}_layers": f"{n_layers}/{model.n_layers}",
            f"{whose}_threads": context.n_threads,
        }
    return facts


def _differing(of: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed, as it is read back from JSON."""
    then, since = plain(before), plain(now)
    return [
        f"{of}{name} was {_shortened(then.get(name))}, is {_shortened(since.get(name))}"
        for name in dict.fromkeys([*then, *since])
        if then.get(name) != since.get(name)
    ]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
