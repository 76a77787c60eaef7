"""`ggufspec bench`: measures plain and speculative decoding; prints tables, draws plots."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import INTERRUPTED, render, shared
from ggufspec.cli.loading import late_bars, load_with_bars
from ggufspec.cli.option_values import FILE
from ggufspec.cli.options import added, gathered, groups, load_options, options
from ggufspec.cli.text_settings import to_generate
from ggufspec.common.files import check_writable, format_bytes, write_file
from ggufspec.errors import GgufspecError, OptionError

if TYPE_CHECKING:
    from ggufspec.bench.records import BenchResults
    from ggufspec.bench.run import PairBenchmark
    from ggufspec.bench.tables import Table

_STARTING = "Starting what to compare with"
SAVE_SECONDS = 2.0  # minimum time between two writes of the file
SAVE_SHARE = 0.05  # maximum share of the time spent on writes: one takes seconds with many texts


@click.group(cls=shared.SectionedGroup, invoke_without_command=True)
@shared.pair_options(target={"required": False}, draft={"more": shared.SEVERAL})
@gathered("sampling", *groups("sampling", "constraints"), make=to_generate)
@load_options()
@added(*groups("bench", "bench_compare"), *options("output", "verbose", verbose=shared.LOG))
@click.pass_context
def command(
    context: click.Context,
    /,
    preset: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    llama_bin: Path | None,
    resume: bool,
    form: str,
    load_settings: dict[str, Any],
    **given: Any,
) -> int:
    """Measure plain and speculative decoding in alternation, with confidence intervals.

    Without --target, a stand-in of the embedded pair is measured: nothing to download. Each text
    starts with an empty cache. Ctrl-C keeps what was measured, and --resume continues.

    \b
      ggufspec bench --target large.gguf --draft small.gguf --draft-n auto,1-8 --temp 0,0.8
      ggufspec bench --target large.gguf --draft small.gguf,smaller.gguf
      ggufspec bench --preset notebook
      ggufspec bench --prompts spec_bench.jsonl --json out.json --format markdown
    """
    if resume and json_path is None:
        raise click.UsageError("--resume needs the file to continue: name it with --json")
    if context.invoked_subcommand is not None:
        return 0
    from ggufspec.bench.run import n_left
    from ggufspec.cli.bench_jobs import BenchOptions, jobs_of

    if plot_path is not None:
        from ggufspec.bench import plot

        plot.check(plot_path)
    options = BenchOptions(preset=preset, load_settings=load_settings, **given)
    jobs, title, settings = jobs_of(options)
    results = _results_of(jobs, settings, json_path, resume=resume)
    failure: GgufspecError | None = None
    try:
        for job in jobs:
            _perform(job, results, json_path, llama_bin)
    except KeyboardInterrupt:
        results.interrupted = True
    except GgufspecError as error:  # earlier measurements are kept and printed
        results.interrupted, failure = True, error
    try:
        if results.measurements or failure is None:
            _save(results, json_path)
    except GgufspecError as error:
        failure = failure or error
    if results.measurements:
        _print(preset, title, results, form, sum(n_left(job, results) for job in jobs))
        if plot_path is not None:
            plot.draw(results, plot_path)
            render.note(f"wrote {plot_path}")
    if failure is not None:
        raise failure
    if results.interrupted and not results.measurements:
        raise KeyboardInterrupt
    return INTERRUPTED if results.interrupted else 0


@command.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@added(*options("bench_compare"))
def compare(before: Path, after: Path, form: str) -> None:
    """Compare two benchmarks by their --json files.

    Verdicts use speed-ups over plain decoding of the same benchmark, so they do not depend on
    whether the machine itself was faster or slower.
    """
    from ggufspec.bench import difference
    from ggufspec.bench.records import read_results

    render.tolerate_letters()
    render.echo(_shown(difference.compare(read_results(before), read_results(after)), form))


def _results_of(
    jobs: list[PairBenchmark], settings: dict[str, Any], path: Path | None, *, resume: bool
) -> BenchResults:
    """New results, or with --resume the file's. Raises OptionError before models are loaded."""
    from ggufspec.bench.records import BenchResults, read_results
    from ggufspec.bench.run import check_resumed, describe_machine

    results = BenchResults(
        settings=settings,
        contenders=[contender for job in jobs for contender in job.experiment.contenders],
        machine=describe_machine(),
        versions=dict(render.versions()),
    )
    if path is None:
        return results
    if not path.exists():
        check_writable(path)
        return results
    if not resume:
        raise OptionError(
            f"{path} exists already: continue it with --resume, or give another name to --json"
        )
    before = read_results(path)
    check_resumed(before, results)
    before.interrupted = False
    return before


def _perform(
    job: PairBenchmark, results: BenchResults, path: Path | None, llama_bin: Path | None
) -> None:
    """Measure one pair; saves results after a text, unless the last save was too recent."""
    from ggufspec.bench.run import n_left, perform
    from ggufspec.cli.bench_jobs import opened_baselines

    if not n_left(job, results):
        return
    with ExitStack() as stack:
        has_results = bool(results.measurements)
        engine = stack.enter_context(
            load_with_bars(job.target, job.draft, dict(job.load), has_results=has_results)
        )
        bars = stack.enter_context(late_bars())
        bars.update(_STARTING, 0, 1)
        baselines = stack.enter_context(opened_baselines(job, engine, llama_bin, render.note))
        bars.update(_STARTING, 1, 1)
        due = monotonic() + SAVE_SECONDS

        def save() -> None:
            nonlocal due
            if (started := monotonic()) >= due:
                _save(results, path)
                now = monotonic()
                due = now + max(SAVE_SECONDS, (now - started) / SAVE_SHARE)

        def show(done: int, of: int, label: str) -> None:
            bars.update("Measuring", done, of, unit="share", label=label)

        perform(job, engine, results, show, baselines=baselines, warn=render.note, on_text=save)


def _save(results: BenchResults, path: Path | None) -> None:
    from ggufspec.bench.summary import ranked_drafts

    if path is not None:
        ranking = [each.document for each in ranked_drafts(results)]
        document = {**results.to_document(), "ranking": ranking}
        write_file(path, json.dumps(document).encode() + b"\n")


def _print(preset: str | None, title: str, results: BenchResults, form: str, n_left: int) -> None:
    from ggufspec.bench.summary import warnings_of
    from ggufspec.cli.bench_jobs import tables_of

    render.tolerate_letters()
    made, published = tables_of(preset, results)
    machine, memory = results.machine, ""
    gpus = ", ".join(map(str, machine.get("gpus", ()))) or "no GPU"
    if peak := results.memory.get("peak_rss_bytes"):
        memory = f"; peak memory {format_bytes(peak)}"
    packages = f"llama-cpp-python {results.versions.get('llama-cpp-python', '?')}"
    head = f"{title}.\n{machine.get('cpu', '?')}, {gpus}; {packages}{memory}."
    warnings = [f"Warning: {each}." for each in warnings_of(results, n_left)]
    blocks = [head, *(_shown(table, form) for table in [*made, *published])]
    blocks += ["\n".join(warnings)] if warnings else []
    render.echo("\n\n".join(blocks))


def _shown(table: Table, form: str) -> str:
    from ggufspec.bench.tables import to_markdown

    if form == "markdown":
        return to_markdown(table).strip()
    lines = [table.title] if table.title else []
    width = render.width_of_stdout()
    return "\n".join([*lines, *render.table_lines(table.columns, table.rows, width), *table.notes])
