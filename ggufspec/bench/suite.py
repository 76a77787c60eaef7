"""Measures one or several pairs of models into one BenchResults, and checks resumed results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.bench import machine
from ggufspec.bench.baselines import Baseline
from ggufspec.bench.records import BenchResults, TextKey
from ggufspec.bench.run import Experiment, OnTokens, Warn, divergences, measure
from ggufspec.common.facts import differences, plain
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.llama import devices
from ggufspec.models.heads import DraftFile


@dataclass(frozen=True)
class PairBenchmark:
    """The experiment of one pair. `pair`: its name in the results; "" if there is only one."""

    target: Path
    draft: DraftFile | None
    experiment: Experiment
    pair: str = ""
    target_label: str = ""
    draft_label: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)


def perform(
    benchmark: PairBenchmark,
    engine: Engine,
    results: BenchResults,
    progress: OnTokens,
    *,
    baselines: Sequence[Baseline],
    warn: Warn,
    on_text: Callable[[], None],
) -> None:
    """Measure the texts that the results do not have, and add them.

    `warn` gets the reason why a text is left out. `on_text` is called after each text, outside of
    all measured times. Results are kept on KeyboardInterrupt. Raises GgufspecError.
    """
    experiment = benchmark.experiment
    results.models[benchmark.pair] = _model_facts(benchmark, engine)
    done = {text.key for text in results.measurements}
    n_before = len(done)
    try:
        for text in measure(
            engine, experiment, done=done, progress=progress, baselines=baselines, warn=warn
        ):
            results.measurements.append(text)
            on_text()
        if len(results.measurements) > n_before:
            names = {each.name for each in experiment.contenders}
            others = [each for each in results.divergences if each.contender not in names]
            results.divergences = others + divergences(engine, experiment, results)
    finally:
        if (peak := machine.peak_rss()) is not None:
            results.memory["peak_rss_bytes"] = peak


def check_resumed(before: BenchResults, now: BenchResults) -> None:
    """Raise OptionError if results cannot be resumed: they are of another benchmark."""
    if found := list(differences(_conditions(before), _conditions(now))):
        raise OptionError(
            f"these results are of another benchmark: {'; '.join(found)}. Give the same "
            "options to --resume, or another file to --json"
        )


def _conditions(results: BenchResults) -> dict[str, Any]:
    """What all texts of a benchmark share."""
    # The kernel may have been updated in between; another processor or library changes the speed.
    machine = {name: value for name, value in results.machine.items() if name != "platform"}
    names = [each.name for each in results.contenders]
    options = {
        f"{each.name}: {name}": value
        for each in results.contenders
        for name, value in plain(each.options).items()
    }
    return {**results.settings, "contenders": names, **options, **machine, **results.versions}


def n_left(benchmark: PairBenchmark, results: BenchResults) -> int:
    """How many texts of a pair are not in the results yet."""
    done: set[TextKey] = {text.key for text in results.measurements}
    return sum(key not in done for key in benchmark.experiment.order())


def _model_facts(benchmark: PairBenchmark, engine: Engine) -> dict[str, Any]:
    has_gpu = bool(devices.gpus())
    facts: dict[str, Any] = {"placement": engine.placement}
    for whose, context, label in (
        ("target", engine.pair.target, benchmark.target_label),
        ("draft", engine.pair.draft, benchmark.draft_label),
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
