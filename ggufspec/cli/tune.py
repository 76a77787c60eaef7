"""`ggufspec tune`: measures passes of a pair, prints tables and a chart, stores the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render, shared
from ggufspec.cli.loading import PairOptions, find_draft, find_model, late_bars, load_with_bars
from ggufspec.cli.options import added, load_options, options
from ggufspec.cli.text_settings import conditions, refuse_without_draft, was_given
from ggufspec.common import defaults
from ggufspec.common.facts import counted
from ggufspec.common.files import CACHE_VARIABLE
from ggufspec.models.header import read_header

if TYPE_CHECKING:
    from ggufspec.bench.tune import Tuned

ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
_SETTINGS = {
    "n_threads": "target, {} thread{}",
    "n_threads_draft": "draft, {} thread{}",
    "n_batch": "target, n_batch {}",
    "n_batch_draft": "draft, n_batch {}",
}


@click.command(name="tune", cls=shared.SectionedCommand)
@shared.pair_options(
    *("target", "draft", "offline"),
    target={"required": False},
    draft={"more": "Without it, only the target is measured."},
)
@load_options()
@added(*options("tune"), *options("output", "as_json", "verbose", verbose=shared.LOG))
def command(
    pair: PairOptions,
    n_most: int,
    depth: int,
    n_runs: int,
    load_settings: dict[str, Any],
    as_json: bool,
    forgets: bool,
) -> None:
    """Measure the passes of the target and of the draft on this machine.

    Threads and prompt batch sizes are tried unless they are given; flash attention is chosen as at
    loading. The result is stored in the cache folder (GGUFSPEC_CACHE); later commands use it for
    the same files, unless options say otherwise.

    \b
      ggufspec tune --target large.gguf --draft small.gguf
      ggufspec tune --target large.gguf --draft small.gguf -t 8 --max-n 32 --json
      ggufspec tune --forget
    """
    if forgets:
        _forget(pair, as_json=as_json)
        return
    if pair.target is None:
        raise click.UsageError("name a target to measure with --target, or give --forget")
    n_ctx = _n_ctx(load_settings["n_ctx"], depth, n_most)
    from ggufspec.bench import tune
    from ggufspec.drafting.profile_store import TunedSettings, obstacle

    threads = (load_settings["n_threads"], load_settings["n_threads_draft"])
    attention, n_batch = load_settings["flash_attention"], load_settings["n_batch"]
    attention = None if attention == defaults.FLASH_ATTENTION else attention
    given = TunedSettings(*threads, attention, n_batch, n_batch)
    loaded = {**load_settings, "n_ctx": n_ctx, "n_draft_max": n_most, "tuned": False}
    target, draft = pair.find()
    if draft is None:
        refuse_without_draft()
    with load_with_bars(target, draft, loaded) as engine, late_bars() as bars:
        tuned = tune.tune(
            engine, given, n_most=n_most, depth=depth, n_runs=n_runs, progress=bars.update
        )
    is_kept = tune.keep(tuned)
    document = _document(tuned)
    if as_json:
        settings = {"max_n": n_most, "depth": depth, "runs": n_runs, **load_settings}
        under = conditions((target, draft), settings)
        render.echo_json({**document, "remembered": is_kept, **under})
    else:
        _print_report(document, read_header(target).matrix_type)
    if not is_kept:
        render.note(
            f"the result could not be stored in {obstacle() or 'the cache folder'}. Make room, or "
            f"set {CACHE_VARIABLE} to another folder"
        )


def _forget(pair: PairOptions, *, as_json: bool) -> None:
    from ggufspec.bench import tune

    target = None if pair.target is None else find_model(pair.target, offline=True)
    draft = None if pair.draft is None else find_draft(pair.draft, offline=True)
    n_forgotten = tune.forget(target, draft)
    if as_json:
        render.echo_json({"forgotten": n_forgotten})
    else:
        render.echo(f"Deleted {counted(n_forgotten, 'record')}.")


def _n_ctx(n_ctx: int | None, depth: int, n_most: int) -> int | None:
    """The context to load. Raises BadParameter if it is too small for the measurements."""
    asked = was_given("depth")
    needed = n_most + 1 + (depth if asked else 0)
    if n_ctx and n_ctx < needed:
        tokens = f"{depth} tokens and " if asked else ""
        raise click.BadParameter(
            f"a context of {n_ctx} has no room for {tokens}a pass of {n_most + 1}: use at least "
            f"{needed}, or a smaller --max-n{' or --depth' if asked else ''}",
            param_hint="-c",
        )
    return needed if asked and n_ctx is None else n_ctx


def _document(tuned: Tuned) -> dict[str, Any]:
    from ggufspec.bench.tune import best_length, break_even_acceptance

    costs, one = tuned.costs, tuned.passes[0].seconds
    needed = {str(n): break_even_acceptance(costs, n) for n in range(1, len(tuned.passes))}
    best = [(each, *best_length(costs, each)) for each in ACCEPTANCE_RATES]
    target = []
    for measured in tuned.passes:
        of_one = {"relative_to_one": measured.seconds / one}
        per_token = {"seconds_per_token": measured.seconds / measured.n_tokens}
        target.append({**asdict(measured), **of_one, **per_token})
    return {
        "chosen": asdict(tuned.chosen),
        "trials": [asdict(trial) for trial in tuned.trials],
        "attention": tuned.attention,
        "depth": tuned.depth,
        "target": target,
        "draft": tuned.step
        and {
            "step": asdict(tuned.step),
            "reading": tuned.reading and asdict(tuned.reading),
            "step_relative_to_one": tuned.step.seconds / one,
            "cannot_pay": costs.draft_cannot_pay,
            "break_even_acceptance": needed,
            "best_lengths": [
                {"acceptance": acceptance, "n_draft": n, "speedup": speedup}
                for acceptance, n, speedup in best
            ],
        },
        "facts": tuned.facts,
    }


def _print_report(found: dict[str, Any], matrix_type: str) -> None:
    if attention := found["attention"]:
        render.echo(f"{attention[0].upper()}{attention[1:]}.\n")
    _print_trials(found["trials"])
    passes, draft = found["target"], found["draft"]
    header = ["Tokens per pass", "ms", "relative to one", "ms/token"]
    rows = []
    for row in passes:
        relative, per_token = f"{row['relative_to_one']:.2f}", _ms(row["seconds_per_token"])
        rows.append([str(row["n_tokens"]), _ms(row["seconds"]), relative, per_token])
    if draft:
        header += ["break-even acceptance"]
        needed = [f"{c:.0%}" if c else "never" for c in draft["break_even_acceptance"].values()]
        for row, text in zip(rows, ["", *needed], strict=True):
            row.append(text)
    render.echo_table(header, rows)
    if draft:
        render.echo(
            "A pass over 4 tokens verifies 3 drafted ones. Drafting 3 tokens is faster than plain "
            "decoding if the\nacceptance rate is above the break-even acceptance.\n"
        )
    if not found["facts"]["pair"]["target"]["n_gpu_layers"]:
        from ggufspec.engine.speeds import weights_note

        render.echo(f"The target's weights are {weights_note(matrix_type)}.\n")
    render.echo(f"Milliseconds by tokens per pass, with {found['depth']} tokens in the cache:\n")
    names = [f"{row['n_tokens']:2}: {_ms(row['seconds']):>5}" for row in passes]
    render.echo_bars([row["seconds"] for row in passes], names)
    if draft:
        _print_draft(draft)


def _print_trials(trials: Sequence[dict[str, Any]]) -> None:
    sizes = sorted({size for trial in trials for size in trial["target_seconds"]})
    columns = {
        f"{counted(size, 'token')}, ms": [each["target_seconds"].get(size) for each in trials]
        for size in sizes
    }
    columns["draft step, ms"] = [each["draft_seconds"] for each in trials]
    columns["prompt, ms/token"] = [each["reading_seconds"] for each in trials]
    columns = {name: seconds for name, seconds in columns.items() if any(seconds)}
    rows = []
    for i, trial in enumerate(trials):
        value, what = trial["value"], _SETTINGS[trial["what"]]
        times = [_ms(seconds[i]) for seconds in columns.values()]
        chosen = "chosen" if trial["is_chosen"] else ""
        rows.append([what.format(value, "" if value == 1 else "s"), *times, chosen])
    if rows:
        render.echo_table(["Setting", *columns, ""], rows)


def _print_draft(draft: dict[str, Any]) -> None:
    step, n = draft["step"], draft["step"]["n_tokens"]
    what = "draft token" if n == 1 else f"block of {n} draft tokens"
    render.echo(
        f"\nOne {what} costs {_ms(step['seconds'])} ms, "
        f"{draft['step_relative_to_one']:.1%} of a target pass over one token."
    )
    if draft["cannot_pay"]:
        render.echo("Drafting cannot help, even if the target accepts every token.")
        return
    rows = [
        [f"{best['acceptance']:.0%}", str(best["n_draft"] or "none"), f"{best['speedup']:.2f}"]
        for best in draft["best_lengths"]
    ]
    render.echo_table(["acceptance rate", "best draft length", "speed-up"], rows)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    ms = 1000 * seconds
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
