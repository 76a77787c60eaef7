"""`ggufspec bench`: plain against speculative decoding in turns, as tables and pictures."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import bench_jobs, render
from ggufspec.cli.exits import INTERRUPTED
from ggufspec.cli.files import check_writable, write_file
from ggufspec.cli.lists import length, listed, name, temperature
from ggufspec.cli.names import offline_option
from ggufspec.cli.options import (
    cache_dir_option,
    draft_option,
    load_options,
    show_log,
    size_option,
    target_option,
    verbose_option,
)
from ggufspec.cli.progress import late_bars, load_with_bars
from ggufspec.cli.sampling_options import sampling_options_beside_temperature, to_generate
from ggufspec.cli.sections import SectionedGroup
from ggufspec.common import defaults
from ggufspec.errors import GgufspecError, OptionError

if TYPE_CHECKING:
    from ggufspec.bench.records import Results
    from ggufspec.bench.suite import Job
    from ggufspec.bench.tables import Table

_FORMATS = ("table", "markdown", "csv")
_PRESETS = ("notebook", "llama-ssp", "llmss", "gpt2", "staged", "lengths", "temperatures")
_SAVE_EVERY = 2.0  # seconds, at least
_SAVE_REST = 20  # times what saving took: of many texts it takes seconds
_TALK_EVERY = 10.0  # seconds, where there is no terminal


@click.group(cls=SectionedGroup, invoke_without_command=True)
@click.option(
    "--preset",
    type=click.Choice(_PRESETS),
    help="An experiment with models, prompts and table of its own: see below.",
)
@target_option(required=False)
@draft_option()
@size_option
@cache_dir_option
@click.option(
    "--draft-n",
    "lengths",
    metavar="LIST",
    callback=listed(length, "lengths such as auto,3 or 1-8 (at most 64)"),
    help="Tokens drafted in a round: a list such as auto,3 or 1-8.  [default: auto]",
)
@click.option(
    "--drafter",
    "drafters",
    metavar="LIST",
    callback=listed(name, "drafters"),
    help="Who drafts: auto, model, ngram.  [default: auto for auto, model for a number]",
)
@click.option(
    "--verify",
    "rules",
    metavar="LIST",
    callback=listed(name, "rules"),
    help=f"How drafts are judged: block, rejection, match.  [default: {defaults.VERIFY}]",
)
@click.option(
    "--temp",
    "temperatures",
    metavar="LIST",
    callback=listed(temperature, "temperatures"),
    help=f"Temperatures; 0: greedy.  [default: {defaults.TEMPERATURE}]",
)
@click.option("-p", "--prompt", metavar="TEXT", help="The one prompt.")
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Prompts: JSON lines with question_id, category, turns (Spec-Bench, MT-bench) or prompt, "
    "or plain text.  [default: a few of our own]",
)
@click.option(
    "--n-prompts", type=click.IntRange(min=1), help="At most so many, spread over the categories."
)
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Ask through the target's chat template, or not.  [default: for prompts with a category]",
)
@click.option(
    "-n", "--n-predict", "n_tokens", type=click.IntRange(min=1), help="Tokens of a text. "
    "[default: 128]",
)  # fmt: skip
@click.option(
    "--ignore-eos/--eos",
    default=None,
    help="Write on where the model would end.  [default: ignore-eos]",
)
@click.option(
    "--runs", "n_runs", type=click.IntRange(1, 10_000), help="Times each prompt is continued by "
    "each contender.  [default: 3]",
)  # fmt: skip
@click.option(
    "--warm-up",
    "n_warm_up",
    type=click.IntRange(min=0),
    help="Tokens that each contender writes before anything counts.  [default: 32]",
)
@click.option(
    "-s", "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="table",
    show_default=True,
    help="How tables are printed.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Everything raw into this file, written after every text.",
)
@click.option(
    "--resume", is_flag=True, help="Go on with the --json file of a benchmark that was interrupted."
)
@click.option(
    "--against",
    type=click.Choice(["llama.cpp"]),
    help="Others too, in the same turns: llama-speculative-simple, llama-server with and without "
    "the draft, and llama-cpp-python with and without its prompt lookup.",
)
@click.option(
    "--llama-bin",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of llama.cpp's programs.  [default: where PATH has llama-server]",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A picture into this .png or .svg: speed-up and cost by length, acceptance by position, "
    "a text's course. Needs ggufspec[plot].",
)
@sampling_options_beside_temperature
@load_options
@offline_option
@verbose_option
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
    verbose: bool,
    **asked: Any,
) -> int:
    """Measure plain and speculative decoding side by side, in turns, and tell how sure that is.

    Without --target, a stand-in of the embedded pair writes: nothing to download. Every text begins
    with an empty cache; what was measured is kept on Ctrl-C, and --resume goes on with it.

    \b
      ggufspec bench --target large.gguf --draft small.gguf --draft-n auto,1-8 --temp 0,0.8
      ggufspec bench --preset notebook
      ggufspec bench --prompts spec_bench.jsonl --json out.json --format markdown

    Presets measure the models that they name if those are on this machine, else the stand-in, and
    print the table of their source, with what it published:

    \b
      notebook      Llama 3 70B Q3_K_S with 8B Q3_K_L, 45 of 80 layers on the GPU
      llama-ssp     Llama 13B, 30B, 65B with 7B, milliseconds a token
      llmss         Llama 2 70B with 7B, BLOOMZ 7B1 with BLOOM 560M, two papers' variants
      gpt2          GPT-2 XL with itself and with GPT-2, 50 runs of 40 tokens
      staged        who drafts: n-grams, the model, both
      lengths       1 to 16 tokens a draft, and auto
      temperatures  0 to 1.3, by each rule
    """
    if context.invoked_subcommand is not None:
        return 0
    show_log(verbose)
    if plot_path is not None:
        from ggufspec.bench import plot

        plot.check(plot_path)
    asked["sampling"] = to_generate(asked["sampling"])
    jobs, title, settings = bench_jobs.jobs_of(preset, load_settings=load_settings, **asked)
    results = _results_of(jobs, settings, json_path, resume=resume)
    failure: GgufspecError | None = None
    try:
        for job in jobs:
            _perform(job, results, json_path, llama_bin)
    except KeyboardInterrupt:
        results.interrupted = True
    except GgufspecError as error:  # what was measured until then is kept, and told
        results.interrupted, failure = True, error
    try:
        if results.measurements or failure is None:
            _save(results, json_path)
    except GgufspecError as error:
        failure = failure or error
    if results.measurements:
        _print(preset, title, results, form)
        if plot_path is not None:
            plot.draw(results, plot_path)
            click.echo(f"ggufspec: wrote {plot_path}", err=True)
    if failure is not None:
        raise failure
    return INTERRUPTED if results.interrupted else 0


@command.command()
@click.argument("before", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("after", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="table",
    show_default=True,
    help="How the table is printed.",
)
def compare(before: Path, after: Path, form: str) -> None:
    """Tell what has changed between two benchmarks, from their --json files.

    The verdict is on speed-ups over plain decoding, each over its own: so it does not matter if the
    machine itself was faster or slower.
    """
    from ggufspec.bench import difference
    from ggufspec.bench.records import read_results

    render.tolerate_letters()
    table = difference.compare(read_results(before), read_results(after))
    click.echo(_shown(table, form))
    if form == "csv":
        for note in table.notes:
            click.echo(note, err=True)


def _results_of(
    jobs: list[Job], settings: dict[str, Any], path: Path | None, *, resume: bool
) -> Results:
    """Empty results, or those that are gone on with. Raises OptionError before anything is read."""
    from ggufspec.bench.records import Results, read_results
    from ggufspec.bench.suite import check_resumed, machine

    results = Results(
        settings=settings,
        contenders=[contender for job in jobs for contender in job.plan.contenders],
        machine=machine(),
        versions=dict(render.versions()),
    )
    if path is None:
        if resume:
            raise click.UsageError("--resume needs the file to go on with: name it with --json")
        return results
    if not path.exists():
        check_writable(path)
        return results
    if not resume:
        raise OptionError(
            f"{path} is there already: --resume goes on with it, or give another name to --json"
        )
    before = read_results(path)
    check_resumed(before, results)
    before.interrupted = False
    return before


def _perform(job: Job, results: Results, path: Path | None, llama_bin: Path | None) -> None:
    """Measure one pair; what there is, is on the disk after every text."""
    from ggufspec.bench.suite import n_left, perform

    if not n_left(job, results):
        return
    with ExitStack() as stack:
        engine = stack.enter_context(load_with_bars(job.target, job.draft, dict(job.load)))
        others = stack.enter_context(bench_jobs.opened_peers(job, engine, llama_bin, _tell))
        job = bench_jobs.with_peers(job, others)
        shown = _Shown(stack.enter_context(late_bars()))
        due = monotonic() + _SAVE_EVERY

        def kept() -> None:
            nonlocal due
            if (started := monotonic()) >= due:
                _save(results, path)
                now = monotonic()
                due = now + max(_SAVE_EVERY, _SAVE_REST * (now - started))

        perform(job, engine, results, shown.update, peers=others, told=_tell, kept=kept)


def _tell(message: str) -> None:
    click.echo(f"ggufspec: {message}", err=True)


class _Shown:
    """Progress: a bar on a terminal, else a line now and then."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._last = self._started = monotonic()

    def update(self, done: int, total: int, label: str) -> None:
        if sys.stderr.isatty():
            self._bars.update("Measuring", done, total, unit="share", label=label)
        elif monotonic() - self._last > _TALK_EVERY:
            self._last = monotonic()
            left = (self._last - self._started) / max(done, 1) * (total - done)
            click.echo(f"{done / total:4.0%}, about {left:.0f} s left: {label}", err=True)


def _save(results: Results, path: Path | None) -> None:
    """The whole document, or the one before."""
    if path is None:
        return
    write_file(path, json.dumps(results.to_document()).encode() + b"\n")


def _print(preset: str | None, title: str, results: Results, form: str) -> None:
    """Tables on stdout; what speaks against them too, but for programs."""
    from ggufspec.bench.table import doubts

    render.tolerate_letters()
    made, published = bench_jobs.tables_of(preset, results)
    told = [f"{title}.\n{_circumstances(results)}"]
    told += [f"Doubt: {doubt}." for doubt in doubts(results)]
    shown = [_shown(table, form) for table in ([*made, *published] if form != "csv" else made)]
    blocks = [told[0], *shown, *(["\n".join(told[1:])] if told[1:] else [])]
    if form == "csv":
        blocks = shown
        for line in told:
            click.echo(line, err=True)
    click.echo("\n\n".join(blocks))


def _circumstances(results: Results) -> str:
    """A line on what the seconds depend on."""
    from ggufspec.common.files import format_bytes

    machine = results.machine
    gpus = ", ".join(map(str, machine.get("gpus", ()))) or "no GPU"
    peak = results.memory.get("peak_rss_bytes")
    memory = f"; {format_bytes(peak)} of memory at most" if peak else ""
    packages = f"llama-cpp-python {results.versions.get('llama-cpp-python', '?')}"
    return f"{machine.get('cpu', '?')}, {gpus}; {packages}{memory}."


def _shown(table: Table, form: str) -> str:
    """A table as it was asked for."""
    from ggufspec.bench.tables import to_csv, to_markdown

    if form != "table":
        return {"csv": to_csv, "markdown": to_markdown}[form](table).strip()
    lines = [table.title] if table.title else []
    width = render.width_of_stdout()
    return "\n".join([*lines, *render.table_lines(table.columns, table.rows, width), *table.notes])
