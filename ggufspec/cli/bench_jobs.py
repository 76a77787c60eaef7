"""Turns the options of `ggufspec bench` into pairs of models, each with its experiment."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ggufspec.bench.baselines import BASELINES, LLAMA_SERVER, Baseline, open_baselines
from ggufspec.bench.experiment import (
    PRESETS,
    Experiment,
    Preset,
    baseline_contenders,
    contenders,
    own_prompts,
    spread,
)
from ggufspec.bench.llama_server import LlamaCppProgram
from ggufspec.bench.records import BenchResults, Contender
from ggufspec.bench.run import PairBenchmark
from ggufspec.bench.tables import Table, general
from ggufspec.cli import render, text_settings
from ggufspec.cli.loading import PairOptions
from ggufspec.common import defaults
from ggufspec.common.facts import plain
from ggufspec.common.files import format_bytes
from ggufspec.common.prompts import TEXTS, Prompt, read_prompts
from ggufspec.decoding.sampling_options import Sampling
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CONSTRAINTS, CheckedOptions, file_sampling
from ggufspec.errors import PromptError
from ggufspec.models.header import read_header
from ggufspec.models.heads import DraftFile, read_draft
from ggufspec.models.named_shape import shape_of_name
from ggufspec.models.pull import locate
from ggufspec.models.registry import load_registry
from ggufspec.standin.padded import padded_file, parse_size

_N_TOKENS = 128
_N_RUNS = 3
_OF_CONTENDERS = ("lengths", "trees", "drafters", "rules", "temperatures", "against")
_STAND_IN = (
    "a stand-in: the embedded 7 M-parameter model of old novels, padded with zeros to the cost "
    "of {:,.0f} M, with its draft of 1.5 M"
)


@dataclass(frozen=True)
class BenchOptions:
    preset: str | None
    pair: PairOptions
    lengths: Sequence[int | str]
    trees: Sequence[str]
    drafters: Sequence[str]
    rules: Sequence[str]
    temperatures: Sequence[float]
    sampling: dict[str, Any]
    prompt: str | None
    prompt_file: Path | None
    n_prompts: int | None
    chat: bool | None
    n_tokens: int | None
    ignore_eos: bool | None
    n_runs: int | None
    n_warm_up: int
    seed: int
    against: str | None
    load_settings: dict[str, Any]

    @property
    def has_draft(self) -> bool:
        return not self.pair.target or bool(self.pair.draft)

    def of_experiment(self) -> dict[str, Any]:
        names = ("n_runs", "n_warm_up", "n_tokens", "ignore_eos", "chat", "seed")
        fields = {"prompts": _prompts(self), **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in fields.items() if value is not None}


def jobs_of(options: BenchOptions) -> tuple[list[PairBenchmark], str, dict[str, Any]]:
    """The pairs to measure, a title, and the settings that must be equal to resume a benchmark.

    Raises GgufspecError; nothing is loaded yet.
    """
    pair = options.pair
    pair.check()
    if pair.target is not None and pair.draft is None:
        _check_needs_no_draft(options)
    if options.against is not None and options.load_settings["rpc"]:
        raise click.UsageError(
            "--against cannot be combined with --rpc: the other programs would use this machine "
            "only"
        )
    jobs, title = _jobs_of_pair(options) if options.preset is None else _jobs_of_preset(options)
    experiment = jobs[0].experiment
    fields = ("n_tokens", "n_runs", "ignore_eos", "chat", "seed")
    settings = {
        "preset": options.preset,
        "models": [[str(job.target), job.draft and str(job.draft)] for job in jobs],
        "load": {name: value for name, value in jobs[0].load.items() if value is not None},
        "prompts": [[each.name, list(each.turns)] for each in experiment.prompts],
        **{name: getattr(experiment, name) for name in fields},
    }
    return jobs, title, plain(settings)


def tables_of(preset_name: str | None, results: BenchResults) -> tuple[list[Table], list[Table]]:
    """The tables of a preset, else the general ones; and the tables that its source published."""
    chosen = None if preset_name is None else PRESETS[preset_name]
    made = (chosen.tables if chosen else general)(results)
    return [table for table in made if table.rows], list(chosen.published) if chosen else []


def opened_baselines(
    job: PairBenchmark, engine: Engine, llama_bin: Path | None, warn: Callable[[str], None]
) -> AbstractContextManager[Sequence[Baseline]]:
    """The other programs of a job that can run here; calls `warn` with the reason if one cannot."""
    wanted = list(dict.fromkeys(each.program for each in job.experiment.contenders if each.program))
    if not wanted:
        return nullcontext(())
    found = shutil.which("llama-server")
    folder = llama_bin or (Path(found).parent if found else None)
    if folder is None:
        warn("llama.cpp's programs are left out: llama-server is not on PATH; give --llama-bin")
    target, draft = engine.pair.target, engine.pair.draft or engine.pair.target
    if draft is not target and draft.model.adapters:
        warn("llama.cpp's programs draft without the adapters of --lora-draft: they have no option")
    program = LlamaCppProgram(
        *(Path(), job.target, job.draft, engine.n_ctx, target.n_threads, draft.n_threads),
        n_gpu_layers=target.model.n_gpu_layers,
        n_gpu_layers_draft=draft.model.n_gpu_layers,
        overrides=target.model.overrides,
        overrides_draft=draft.model.overrides if draft is not target else (),
        adapters=target.model.adapters,
    )
    return open_baselines(folder, program, warn, wanted)


def _jobs_of_pair(options: BenchOptions) -> tuple[list[PairBenchmark], str]:
    given = options.of_experiment()
    _contenders(options, options.sampling)  # raises errors before files are searched
    pairs = options.pair.find_each()
    target = next(iter(pairs.values()))[0]
    own = file_sampling(read_header(target).values)
    if options.temperatures:
        own.options.pop("temperature", None)
    competing = _contenders(
        options, text_settings.with_file_sampling(options.sampling, own, verbose=True)
    )
    # By default all texts have the same length, unless a constraint ends them.
    is_constrained = any(competing[0].options.get(name) is not None for name in CONSTRAINTS)
    usual = Experiment(competing, own_prompts(), _N_RUNS, _N_TOKENS, ignore_eos=not is_constrained)
    experiment = replace(usual, **given)
    pair = options.pair
    if pair.target is None:
        what = _about_stand_in(pair)
        title = what[0].upper() + what[1:]
    else:
        title = plain(" with ".join(filter(None, (pair.target, pair.draft))))
    load = options.load_settings
    return [_job(experiment, load, paths, name) for name, paths in pairs.items()], title


def _job(
    experiment: Experiment,
    load: Mapping[str, Any],
    paths: tuple[Path, DraftFile | None],
    pair: str,
    labels: tuple[str, str] = ("", ""),
) -> PairBenchmark:
    """The job of a pair: with room for its drafts, without contenders that it does not support.

    A head cannot write text alone, nor draft in stages.
    """
    target, draft = paths
    competing = experiment.of_pair(pair).contenders
    lengths = [each.options.get("n_draft") for each in competing]
    room = max([defaults.N_DRAFT_MAX, *(n for n in lengths if isinstance(n, int))])
    if draft is not None and read_draft(read_header(target), draft)[1] is not None:
        competing = [
            each
            for each in competing
            if each.model != "draft" and each.options.get("drafter") != "staged"
        ]
    own = replace(experiment, contenders=competing)
    load = {**load, "n_draft_max": room}
    return PairBenchmark(target, draft, own, pair, *labels, load=load)


def _contenders(options: BenchOptions, sampling: dict[str, Any]) -> list[Contender]:
    if "none" in options.drafters:
        raise click.UsageError(
            "--drafter none is plain decoding, which is always measured; name one that drafts, "
            "such as ngram"
        )
    temperatures = options.temperatures or [sampling.get("temperature", Sampling.temperature)]
    made = contenders(
        lengths=options.lengths or [defaults.N_DRAFT],
        trees=options.trees or [defaults.TREE],
        drafters=options.drafters or [None],
        rules=options.rules or [defaults.VERIFY],
        temperatures=temperatures,
        sampling=sampling,
        has_draft=options.has_draft,
    )
    for each in made:
        CheckedOptions.of(dict(each.options))  # type: ignore[arg-type]  # report errors before loading
    if options.against is not None:
        names = [each for each in BASELINES if options.has_draft or each != LLAMA_SERVER]
        made += baseline_contenders(names, temperatures=temperatures, sampling=sampling)
    return made


def _check_needs_no_draft(options: BenchOptions) -> None:
    text_settings.refuse_without_draft()
    needs = None
    if options.preset is not None:
        needs = f"--preset {options.preset}"
    elif "model" in options.drafters:
        needs = "--drafter model"
    elif not options.drafters and any(isinstance(n, int) for n in options.lengths):
        needs = "--draft-n with a number"
    if needs is not None:
        raise click.UsageError(
            f"{needs} needs a draft model: name one with --draft, or use --drafter ngram"
        )


def _jobs_of_preset(options: BenchOptions) -> tuple[list[PairBenchmark], str]:
    name = options.preset or ""
    constraints = [f"{each}_file" for each in options.sampling]
    its_own = [*_OF_CONTENDERS, *options.sampling, *constraints]
    for other in filter(text_settings.is_on_command_line, its_own):
        raise click.UsageError(
            f"--preset {name} sets {text_settings.flag_of(other)} itself; leave one of them out"
        )
    chosen = PRESETS[name]
    experiment = replace(chosen.experiment, **options.of_experiment())
    # Options that the user gives replace the preset's settings.
    own = {key: value for key, value in chosen.load.items() if not text_settings.was_given(key)}
    load = {**options.load_settings, **own}

    def job(paths: tuple[Path, DraftFile | None], target: str, draft: str) -> PairBenchmark:
        return _job(
            experiment, load, paths, " / ".join(filter(None, (target, draft))), (target, draft)
        )

    if options.pair.target is not None:
        jobs = []
        for own_name, paths in options.pair.find_each().items():
            draft_name = own_name or (Path(paths[1]).name if paths[1] else "")
            jobs.append(job(paths, plain(paths[0].name), plain(draft_name)))
        return jobs, f"{name}, on the given pair{'s' if len(jobs) > 1 else ''}"
    files = {name: locate(name) for pair in chosen.pairs for name in pair[:2]}
    _report_missing(chosen, [name for name, found in files.items() if found is None])
    jobs = [
        job((target[0], draft[0]), *labels)
        for target_name, draft_name, *labels in chosen.pairs
        if (target := files[target_name]) and (draft := files[draft_name])
    ]
    if jobs:
        return jobs, chosen.about.rstrip(".")
    stand_in, its_draft = options.pair.find()
    for is_own_draft in dict.fromkeys(target == draft for target, draft, *_ in chosen.pairs):
        paths = (stand_in, stand_in if is_own_draft else its_draft)
        jobs.append(job(paths, "stand-in", "itself" if is_own_draft else "its draft"))
    return jobs, f"{name}, NOT on the models that it names, but on {_about_stand_in(options.pair)}"


def _report_missing(chosen: Preset, names: Sequence[str]) -> None:
    registry = load_registry()
    for name in names:
        entry = registry.find(name)
        size = entry.size
        about = ""
        if size is None and entry.shape is not None:
            size, about = shape_of_name(name).n_bytes, "about "
        shown = f" ({about}{format_bytes(size)})" if size else ""
        render.note(
            f"{chosen.name} uses {name}{shown}, which is not on this machine; download "
            f"it with `ggufspec models pull {name}`"
        )


def _about_stand_in(pair: PairOptions) -> str:
    return _STAND_IN.format(padded_file(parse_size(pair.size)).n_params / 1e6)


def _prompts(options: BenchOptions) -> list[Prompt] | None:
    file = options.prompt_file
    if options.prompt is not None:
        if file is not None:
            raise click.UsageError("give the prompt with -p or with --prompts, not both")
        if not options.prompt:
            raise PromptError("the prompt is empty; give at least one character to continue")
        return [Prompt(id="prompt", turns=(options.prompt,))]
    if file is not None:
        return spread(read_prompts(file, TEXTS), options.n_prompts)
    if options.n_prompts is None:
        return None
    known = PRESETS[options.preset].experiment.prompts if options.preset else own_prompts()
    return spread(known, options.n_prompts)
