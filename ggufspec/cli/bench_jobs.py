"""From what a user asks of `ggufspec bench` to pairs of models and what they are to write."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli.files import read_prompt_file
from ggufspec.cli.names import find_models
from ggufspec.cli.names import stand_in as padded
from ggufspec.cli.text_settings import was_given
from ggufspec.common import defaults
from ggufspec.errors import GgufspecError, PromptError

if TYPE_CHECKING:
    from ggufspec.bench.baselines import Peer
    from ggufspec.bench.presets import Pair, Preset
    from ggufspec.bench.prompts import Prompt
    from ggufspec.bench.records import Contender, Results
    from ggufspec.bench.suite import Job
    from ggufspec.bench.tables import Table
    from ggufspec.engine.engine import Engine

_N_TOKENS = 128
_N_RUNS = 3
_N_WARM_UP = 32
_CONTENDERS = ("lengths", "drafters", "rules", "temperatures")  # options that say who competes
_STAND_IN = (
    "a stand-in: the embedded 7 M-parameter model of old novels, padded with zeros to the cost "
    "of {:,.0f} M, with its draft of 1.5 M"
)


def jobs_of(
    preset_name: str | None,
    *,
    target: str | None,
    draft: str | None,
    size: str,
    cache_dir: Path | None,
    lengths: Sequence[int | str],
    drafters: Sequence[str],
    rules: Sequence[str],
    temperatures: Sequence[float],
    sampling: dict[str, Any],
    prompt: str | None,
    prompt_file: Path | None,
    n_prompts: int | None,
    chat: bool | None,
    n_tokens: int | None,
    ignore_eos: bool | None,
    n_runs: int | None,
    n_warm_up: int | None,
    seed: int,
    against: str | None,
    load_settings: dict[str, Any],
    offline: bool,
) -> tuple[list[Job], str, dict[str, Any]]:
    """What to measure, what to call it, and the settings that a later run must share to go on.

    Raises GgufspecError; nothing is loaded yet.
    """
    if draft is not None and target is None:
        raise click.UsageError("--draft without --target: name the model that it drafts for")
    if target is not None and draft is None:
        _check_needs_no_draft(preset_name, lengths, drafters)
    if against is not None and load_settings["rpc"]:
        raise click.UsageError(
            "--against with --rpc would be unfair: the others would decode on this machine alone"
        )
    prompts = _prompts(preset_name, prompt, prompt_file, n_prompts)
    changed = {
        "prompts": prompts,
        "n_runs": n_runs,
        "n_tokens": n_tokens,
        "n_warm_up": _N_WARM_UP if n_warm_up is None else n_warm_up,
        "ignore_eos": ignore_eos,
        "chat": chat,
        "seed": seed,
    }
    if preset_name is None:
        has_draft = not target or bool(draft)
        competing = _contenders(
            lengths, drafters, rules, temperatures, sampling, has_draft=has_draft
        )
        if against is not None:
            competing += _peers(temperatures, sampling, has_draft=has_draft)
        jobs, what = _jobs_of_pair(
            target, draft, size, cache_dir, competing, changed, load_settings, offline
        )
    else:
        files = [f"{name}_file" for name in sampling]  # that a grammar may come from
        _refuse_with_preset(preset_name, [*_CONTENDERS, "against", *sampling, *files])
        jobs, what = _jobs_of_preset(
            preset_name, target, draft, size, cache_dir, changed, load_settings, offline
        )
    from ggufspec.bench.records import plain

    settings = {
        "preset": preset_name,
        "models": [[str(job.target), job.draft and str(job.draft)] for job in jobs],
        "load": {name: value for name, value in jobs[0].load.items() if value is not None},
        "prompts": [[each.name, list(each.turns)] for each in jobs[0].plan.prompts],
        "n_tokens": jobs[0].plan.n_tokens,
        "n_runs": jobs[0].plan.n_runs,
        "ignore_eos": jobs[0].plan.ignore_eos,
        "chat": jobs[0].plan.chat,
        "seed": seed,
    }
    return jobs, what, plain(settings)


def _check_needs_no_draft(
    preset_name: str | None, lengths: Sequence[int | str], drafters: Sequence[str]
) -> None:
    """What needs a draft model, needs one. Raises UsageError."""
    wants = None
    if preset_name is not None and preset_name != "staged":
        wants = f"--preset {preset_name}"
    elif "model" in drafters:
        wants = "--drafter model"
    elif not drafters and any(isinstance(n, int) for n in lengths):
        wants = "--draft-n with a number"
    if wants is not None:
        raise click.UsageError(
            f"{wants} needs a draft model: name one with --draft, or let --drafter ngram draft"
        )


def tables_of(preset_name: str | None, results: Results) -> tuple[list[Table], Sequence[Table]]:
    """The tables of a preset, or all that there are, and those that its source published."""
    from ggufspec.bench.preset_forms import tables
    from ggufspec.bench.presets import preset

    if preset_name is None:
        return tables("overview", results), ()
    chosen = preset(preset_name)
    return tables(chosen.form, results), chosen.published


def _contenders(
    lengths: Sequence[int | str],
    drafters: Sequence[str],
    rules: Sequence[str],
    temperatures: Sequence[float],
    sampling: dict[str, Any],
    *,
    has_draft: bool,
) -> list[Contender]:
    from ggufspec.bench.contenders import contenders
    from ggufspec.engine.options import Request

    if "none" in drafters:
        raise click.UsageError(
            "--drafter none is what plain decoding does anyway; name one that drafts, such as ngram"
        )
    made = contenders(
        lengths=lengths or [defaults.N_DRAFT],
        drafters=drafters or [None],
        rules=rules or [defaults.VERIFY],
        temperatures=temperatures or [defaults.TEMPERATURE],
        sampling=sampling,
        has_draft=has_draft,
    )
    for each in made:
        Request.of(dict(each.options))  # type: ignore[arg-type]  # what is wrong is known at once
    return made


def _peers(
    temperatures: Sequence[float], sampling: dict[str, Any], *, has_draft: bool
) -> list[Contender]:
    from ggufspec.bench.baselines import LLAMA_SERVER, LLAMA_SIMPLE, PEERS
    from ggufspec.bench.contenders import peer_contenders

    names = [name for name in PEERS if has_draft or name not in (LLAMA_SERVER, LLAMA_SIMPLE)]
    wanted = temperatures or [defaults.TEMPERATURE]
    return peer_contenders(names, temperatures=wanted, sampling=sampling)


@contextmanager
def opened_peers(
    job: Job, engine: Engine, llama_bin: Path | None, told: Callable[[str], None]
) -> Iterator[Sequence[Peer]]:
    """The others of a job that can run here; `told` hears why one cannot."""
    wanted = list(dict.fromkeys(each.peer for each in job.plan.contenders if each.peer))
    if not wanted:
        yield ()
        return
    from ggufspec.bench.baselines import peers

    found = shutil.which("llama-server")
    folder = llama_bin or (Path(found).parent if found else None)
    if folder is None:
        told("llama.cpp's programs are left out: PATH has no llama-server; name it by --llama-bin")
    target, draft = engine.target, engine.draft
    with peers(
        folder,
        job.target,
        job.draft,
        n_ctx=engine.n_ctx,
        n_threads=target.n_threads,
        n_threads_draft=(draft or target).n_threads,
        n_gpu_layers=target.model.n_gpu_layers,
        n_gpu_layers_draft=(draft or target).model.n_gpu_layers,
        heard=told,
        wanted=wanted,
    ) as others:
        yield others


def with_peers(job: Job, others: Sequence[Peer]) -> Job:
    """The same without those who cannot run here."""
    names = {peer.name for peer in others}
    able = [each for each in job.plan.contenders if each.peer is None or each.peer in names]
    return replace(job, plan=replace(job.plan, contenders=able))


def _jobs_of_pair(
    target: str | None,
    draft: str | None,
    size: str,
    folder: Path | None,
    competing: Sequence[Contender],
    changed: dict[str, Any],
    load_settings: dict[str, Any],
    offline: bool,
) -> tuple[list[Job], str]:
    from ggufspec.bench.prompts import own_prompts
    from ggufspec.bench.records import plain
    from ggufspec.bench.run import Plan
    from ggufspec.bench.suite import Job

    plan = Plan(
        contenders=competing,
        **{
            **changed,
            "prompts": changed["prompts"] or own_prompts(),
            "n_runs": changed["n_runs"] or _N_RUNS,
            "n_tokens": changed["n_tokens"] or _N_TOKENS,
            "ignore_eos": _ignores_eos(changed["ignore_eos"], competing[0]),
        },
    )
    paths: tuple[Path, Path | None]
    if target is None:
        paths, what = _stand_in(size, folder)
    else:
        paths = find_models(target, draft, offline=offline)
        what = plain(target if draft is None else f"{target} with {draft}")
    load = {**load_settings, **_room(plan)}
    return [Job(*paths, plan, load=load)], what[0].upper() + what[1:]


def _ignores_eos(asked: bool | None, contender: Contender) -> bool:
    """By default, all texts are equally long; but a grammar ends them where it will."""
    held = any(contender.options.get(name) for name in ("grammar", "json_schema"))
    return not held if asked is None else asked


def _jobs_of_preset(
    name: str,
    target: str | None,
    draft: str | None,
    size: str,
    folder: Path | None,
    changed: dict[str, Any],
    load_settings: dict[str, Any],
    offline: bool,
) -> tuple[list[Job], str]:
    from ggufspec.bench.presets import preset
    from ggufspec.bench.records import plain
    from ggufspec.bench.suite import Job, plan_of

    chosen = preset(name)
    load = {**load_settings, **_unless_given(chosen.load)}
    if target is not None:
        paths = find_models(target, draft, offline=offline)
        labels = (plain(paths[0].name), plain(paths[1].name) if paths[1] else "")
        pair = " / ".join(filter(None, labels))
        plan = plan_of(chosen, pair, **changed)
        what = f"{name}, on a pair of yours"
        return [Job(*paths, plan, pair, *labels, load={**load, **_room(plan)})], what
    here = [(pair, found) for pair in chosen.pairs if (found := _located(pair)) is not None]
    if here:
        _tell_missing(chosen, [pair for pair in chosen.pairs if pair not in dict(here)])
        jobs = []
        for known, files in here:
            plan = plan_of(chosen, known.label, **changed)
            labels = (known.target_label, known.draft_label)
            jobs.append(Job(*files, plan, known.label, *labels, load={**load, **_room(plan)}))
        return jobs, chosen.about.rstrip(".")
    _tell_missing(chosen, chosen.pairs)
    (stand_in, its_draft), what = _stand_in(size, folder)
    jobs = []
    for both in dict.fromkeys((pair.target == pair.draft) for pair in chosen.pairs):
        draft_path = stand_in if both else its_draft
        labels = ("stand-in", "itself" if both else "its draft")
        pair_name = " / ".join(labels)
        plan = plan_of(chosen, pair_name, **changed)
        load_all = {**load, **_room(plan)}
        jobs.append(Job(stand_in, draft_path, plan, pair_name, *labels, load=load_all))
    return jobs, f"{name}, NOT on the models that it names, but on {what}"


def _located(pair: Pair) -> tuple[Path, Path] | None:
    """The files of a pair if both are on this machine."""
    from ggufspec.models.pull import locate

    try:
        target, draft = locate(pair.target), locate(pair.draft)
    except GgufspecError:
        return None  # a registry of the user's without them
    return (target[0], draft[0]) if target and draft else None


def _tell_missing(chosen: Preset, pairs: Sequence[Pair]) -> None:
    """Which models would have to be pulled, and how large they are."""
    from ggufspec.common.files import format_bytes
    from ggufspec.models.pull import locate
    from ggufspec.models.registry import load_registry
    from ggufspec.models.shapes import reckoned

    registry = load_registry()
    names = dict.fromkeys(name for pair in pairs for name in (pair.target, pair.draft))
    for name in names:
        if locate(name) is not None:
            continue
        entry = registry.find(name)
        size = entry.size
        about = ""
        if size is None and entry.shape is not None:
            size, about = reckoned(entry).n_bytes, "about "
        told = f" ({about}{format_bytes(size)})" if size else ""
        click.echo(
            f"ggufspec: {chosen.name} names {name}{told}, which is not here: "
            f"`ggufspec models pull {name}`",
            err=True,
        )


def _stand_in(size: str, folder: Path | None) -> tuple[tuple[Path, Path], str]:
    """The embedded pair with its padded target, written first if it is not there yet."""
    from ggufspec.standin import embedded

    n_params = embedded.parse_size(size)
    target = padded(size, folder)
    shape = embedded.plan_shape(n_params)
    return (target, embedded.embedded_draft()), _STAND_IN.format(shape.n_params / 1e6)


def _prompts(
    preset_name: str | None, prompt: str | None, prompt_file: Path | None, n_prompts: int | None
) -> list[Prompt] | None:
    """Those that were given; None: the preset's, or our own."""
    from ggufspec.bench.presets import preset
    from ggufspec.bench.prompts import Prompt, own_prompts, prompts_of, spread

    if prompt is not None:
        if prompt_file is not None:
            raise click.UsageError("give the prompt with -p or with --prompts, not both")
        if not prompt:
            raise PromptError("the prompt is empty; give at least one character to continue")
        return [Prompt("prompt", "", (prompt,))]
    if prompt_file is None:
        if n_prompts is None:
            return None
        return spread(preset(preset_name).prompts if preset_name else own_prompts(), n_prompts)
    return spread(prompts_of(read_prompt_file(prompt_file), str(prompt_file)), n_prompts)


def _room(plan: Any) -> dict[str, Any]:
    """What `load` has to be told for the longest drafts."""
    lengths = [each.options.get("n_draft") for each in plan.contenders]
    longest = max((n for n in lengths if isinstance(n, int)), default=0)
    return {"n_draft_max": max(longest, defaults.N_DRAFT_MAX)}


def _unless_given(load: Any) -> dict[str, Any]:
    """A preset's settings of loading, less those that the user has given."""
    return {name: value for name, value in load.items() if not was_given(name)}


def _refuse_with_preset(preset_name: str, names: Sequence[str]) -> None:
    """Raises UsageError where the user gave what the preset says itself."""
    options = {each.name: each.opts[0] for each in click.get_current_context().command.params}
    given = [options[name] for name in names if name in options and was_given(name)]
    if given:
        raise click.UsageError(
            f"--preset {preset_name} has its own {given[0]}; leave one of them out"
        )
