"""`ggufspec bench`: measures plain and speculative decoding; prints tables, draws plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import INTERRUPTED, render, shared
from ggufspec.cli.load_options import load_options
from ggufspec.cli.loading import late_bars, load_with_bars
from ggufspec.cli.parameters import AT_LEAST_1, COUNT, FILE, NOT_NEGATIVE, option
from ggufspec.cli.shared import DRAFT_LENGTH, TREE
from ggufspec.cli.text_settings import sampling_options_beside_temperature
from ggufspec.common import defaults
from ggufspec.common.files import check_writable, format_bytes, write_file
from ggufspec.decoding.sampling_options import Sampling
from ggufspec.errors import GgufspecError, OptionError

if TYPE_CHECKING:
    from ggufspec.bench.records import BenchResults
    from ggufspec.bench.run import PairBenchmark
    from ggufspec.bench.tables import Table

PRESETS = ("notebook", "llama-ssp", "llmss", "gpt2")
_STARTING = "Starting what to compare with"
SAVE_SECONDS = 2.0  # minimum time between two writes of the file
SAVE_SHARE = 0.05  # maximum share of the time spent on writes: one takes seconds with many texts


def _listed(kind: click.ParamType[Any], what: str) -> Callable[..., tuple[Any, ...]]:
    """A callback that parses a comma-separated list of values and of ranges like 1-8."""

    def read(context: click.Context, option: click.Parameter, text: str | None) -> tuple[Any, ...]:
        if text is None:
            return ()
        parts = [part.strip() for part in text.split(",")]
        values = [value for part in parts for value in _expanded(part)]
        try:
            found = [kind.convert(value, option, context) for value in values]
        except click.BadParameter:
            found = []
        if not (found and all(parts)):
            raise click.BadParameter(f"{text!r} is not a list of {what}")
        return tuple(dict.fromkeys(found))

    return read


def _expanded(part: str) -> Sequence[str]:
    first, _, last = part.partition("-")
    if first.isdecimal() and last.isdecimal() and len(part) <= 6:
        return [str(n) for n in range(int(first), int(last) + 1)] or [part]
    return [part]


_format_option = option(
    "--format form",
    "Format of the tables.",
    type=click.Choice(("table", "markdown")),
    default="table",
)


@click.group(cls=shared.SectionedGroup, invoke_without_command=True)
@option(
    "--preset",
    f"A known experiment: {', '.join(PRESETS)}. Its models are measured if they are on this "
    "machine, else the stand-in; its source's results stand beside them. notebook: "
    "Llama 3 70B Q3_K_S with 8B Q3_K_L, 45 of 80 layers on the GPU; llama-ssp: Llama 13B, 30B, 65B "
    "with 7B, milliseconds per token; llmss: Llama 2 70B with 7B, BLOOMZ 7B1 with BLOOM 560M, two "
    "papers' variants; gpt2: GPT-2 XL with itself and with GPT-2, 50 runs of 40 tokens.",
    type=click.Choice(PRESETS),
    metavar="NAME",
)
@shared.pair_or_embedded_options(shared.SEVERAL)
@option(
    "--draft-n lengths",
    "Draft lengths: a list such as auto,3 or 1-8.  [default: auto]",
    metavar="LIST",
    callback=_listed(DRAFT_LENGTH, "lengths such as auto,3 or 1-8 (at most 64)"),
)
@option(
    "--tree trees",
    "Branches in drafts: a list of auto, on, off; see run.  [default: auto]",
    metavar="LIST",
    callback=_listed(TREE, "auto, on, off"),
)
@option(
    "--drafter drafters",
    "Drafting strategies: auto, model, staged, ngram, forced.  [default: auto with --draft-n "
    "auto, else model]",
    metavar="LIST",
    callback=_listed(click.STRING, "drafters"),
)
@option(
    "--verify rules",
    f"Verification rules: traversal, rejection, match.  [default: {defaults.VERIFY}]",
    metavar="LIST",
    callback=_listed(click.STRING, "rules"),
)
@option(
    "--temp temperatures | --temperature $LLAMA_ARG_TEMPERATURE",
    f"Temperatures; 0 is greedy.  [default: the target file's, or {Sampling.temperature}]",
    metavar="LIST",
    callback=_listed(NOT_NEGATIVE, "temperatures"),
)
@option("-p --prompt", "A single prompt.")
@option(
    "--prompts prompt_file",
    "Prompts: JSON lines (Spec-Bench, MT-bench), or plain text. Lines have turns or prompt, and "
    "question_id and category.  [default: built-in prompts]",
    type=FILE,
)
@option(
    "--n-prompts", "Use at most this many prompts, spread over the categories.", type=AT_LEAST_1
)
@option(
    "--chat/--no-chat",
    "Whether to use the target's chat template.  [default: for prompts with a category]",
    default=None,
)
@option(
    "-n --n-predict n_tokens | --predict $LLAMA_ARG_N_PREDICT",
    "Tokens to generate for each prompt.  [default: 128]",
    type=AT_LEAST_1,
)
@option(
    "--ignore-eos/--eos",
    "Continue after the end-of-text token.  [default: ignore-eos]",
    default=None,
)
@option(
    "--runs n_runs",
    "Times that each contender continues each prompt.  [default: 3]",
    type=click.IntRange(1, 10_000),
)
@option(
    "--warm-up n_warm_up",
    "Tokens that each contender generates before the measurement.",
    type=COUNT,
    default=32,
)
@option("-s --seed", "Seed.", type=COUNT, default=0)
@_format_option
@option(
    "--json json_path",
    "Write all raw data into this file. It is written after each text.",
    type=FILE,
)
@option("--resume", "Continue an interrupted benchmark from its --json file.", is_flag=True)
@option(
    "--against",
    "Measure other programs in alternation. They are llama-server with and without the draft, and "
    "llama-cpp-python. The latter has no flash attention: its greedy texts equal ours only with "
    "-fa off.",
    type=click.Choice(["llama.cpp"]),
)
@option(
    "--llama-bin",
    "Folder of llama.cpp's programs.  [default: that of llama-server on PATH]",
    type=click.Path(path_type=Path, file_okay=False),
)
@option(
    "--plot plot_path",
    "Draw a plot into this .png or .svg file. It shows speed-up and cost by draft length, "
    "acceptance by position, and one text over time. Needs ggufspec[plot].",
    type=FILE,
)
@sampling_options_beside_temperature
@load_options()
@shared.log_option
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
@_format_option
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
