"""`ggufspec batch`: a file of prompts over worker processes; records to a file, talk to stderr."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli.exits import ERROR, INTERRUPTED
from ggufspec.cli.files import read_prompt_file
from ggufspec.cli.names import find_models, offline_option
from ggufspec.cli.options import (
    draft_n_option,
    draft_option,
    draft_temperature_option,
    drafter_option,
    ignore_eos_option,
    load_options,
    max_tokens_option,
    room_for,
    stop_option,
    target_option,
    verify_option,
)
from ggufspec.cli.progress import LateBars, late_bars
from ggufspec.cli.run import check_needs_no_draft, check_rule
from ggufspec.cli.sampling_options import sampling_options, to_generate
from ggufspec.cli.sections import SectionedCommand

if TYPE_CHECKING:
    from ggufspec.batch.process import StartWorker
    from ggufspec.batch.results import BatchResults
    from ggufspec.batch.run import BatchEvent, BatchPlan
    from ggufspec.common.prompts import Prompt

_TALK_EVERY = 10.0  # seconds, where there is no terminal
_NOT_OF_THE_TEXT = ("n_threads", "n_threads_draft", "mmap")  # how fast, and where from


@click.command(name="batch", cls=SectionedCommand)
@click.argument("prompt_file", metavar="PROMPTS", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Records as JSON lines, in the order of the prompts; -: stdout.",
)
@target_option()
@draft_option("without one, only the text so far drafts")
@offline_option
@click.option(
    "--num-processes",
    "n_workers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Worker processes; without -t they divide the cores.",
)
@click.option(
    "--cluster",
    "address",
    is_flag=False,
    flag_value="local",
    metavar="[ADDRESS]",
    help="Run the processes on a Ray cluster: host:port, ray://host:port, or auto (one that runs "
    "here); without a value a Ray of its own on this machine, ended with the batch. Every node "
    "needs this ggufspec, and the models by the same paths. A process reserves -t CPUs, else as "
    "many as let all run at once.",
)
@click.option(
    "--cluster-gpus",
    "n_gpus",
    type=click.FloatRange(min=0),
    default=0,
    show_default=True,
    help="GPUs that each process reserves on the cluster; it sees no others.",
)
@click.option(
    "--resume", is_flag=True, help="Go on where this batch was stopped; what is finished stays."
)
@click.option("--retry-failed", is_flag=True, help="With --resume: try again what has an error.")
@click.option(
    "--retries",
    "n_retries",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Times that a prompt is tried again when its process dies.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time of a prompt, after which it has failed. [default: none]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many prompts.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Ask through the target's chat template, or not.  [default: for messages, and for turns "
    "where it has one]",
)
@click.option(
    "-sys", "--system", help="System message where a conversation has none; implies --chat."
)
@draft_n_option
@drafter_option
@verify_option
@draft_temperature_option
@max_tokens_option
@stop_option
@ignore_eos_option
@sampling_options
@click.option(
    "-s",
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed; each text has one of its own, made of it and of the prompt's place in the file.",
)
@load_options
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show on stderr which process takes which prompt, and llama.cpp's log.",
)
def command(
    prompt_file: Path,
    output: Path,
    target: str,
    draft: str | None,
    offline: bool,
    n_workers: int,
    address: str | None,
    n_gpus: float,
    resume: bool,
    retry_failed: bool,
    n_retries: int,
    timeout: float | None,
    limit: int | None,
    chat: bool | None,
    system: str | None,
    n_draft: int | str,
    drafter: str | None,
    verify: str,
    draft_temperature: float | str,
    max_tokens: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    sampling: dict[str, Any],
    seed: int,
    load_settings: dict[str, Any],
    verbose: bool,
) -> int:
    """Answer a file of prompts by several processes, and lose nothing.

    PROMPTS has JSON lines with "prompt", "messages" or "turns" (Spec-Bench), and "id" or
    "question_id"; or plain text, a prompt a paragraph (where there are empty lines) or a line.

    Beside the output, OUTPUT.part keeps whatever is finished: after Ctrl-C, kill -9 or a power cut,
    the same command with --resume goes on. A process that dies is replaced and its prompt tried
    again; what fails is recorded with its error. Exit code 1: some prompt failed.

    \b
      ggufspec batch prompts.jsonl -o results.jsonl -m large.gguf -md small.gguf --num-processes 4
      ggufspec batch prompts.jsonl -o results.jsonl -m large.gguf -md small.gguf --resume
      ggufspec batch prompts.jsonl -o results.jsonl -m large.gguf --num-processes 16 --cluster auto
    """
    if chat is False and system is not None:
        raise click.UsageError("--system needs a chat; leave --no-chat or it out")
    if retry_failed and not resume:
        raise click.UsageError("--retry-failed goes with --resume")
    if n_gpus and address is None:
        raise click.UsageError("--cluster-gpus goes with --cluster")
    if load_settings["rpc"] and n_workers > 1:
        raise click.UsageError(
            "an RPC server serves one process at a time; with --rpc, leave --num-processes at 1"
        )
    check_rule(verify)
    load_settings.update(room_for(n_draft))
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "n_draft": n_draft,
        "drafter": drafter,
        "verify": verify,
        "draft_temperature": draft_temperature,
        **to_generate(sampling),
        "stop": list(stop),
        "ignore_eos": ignore_eos,
    }
    from ggufspec.batch.run import BatchPlan
    from ggufspec.batch.settings import as_json
    from ggufspec.common.prompts import parse_prompts
    from ggufspec.engine.options import CheckedOptions

    CheckedOptions.of(settings)  # type: ignore[arg-type]  # what is wrong with them is known at once
    if draft is None:
        check_needs_no_draft(drafter or ("auto" if n_draft == "auto" else "none"), compare=False)
    if address is not None:
        from ggufspec.batch.cluster import check

        check(address)
    prompts = parse_prompts(read_prompt_file(prompt_file), str(prompt_file))[:limit]
    target_path, draft_path = find_models(target, draft, offline=offline)
    plan = BatchPlan(
        target=str(target_path),
        draft=None if draft_path is None else str(draft_path),
        load=as_json(load_settings),
        settings=as_json(settings),
        chat=chat,
        system=system,
        seed=seed,
        n_workers=n_workers,
        n_retries=n_retries,
        timeout=timeout,
        verbose=verbose,
    )
    with (
        closing(
            _results(plan, prompts, output, resume=resume, retry_failed=retry_failed)
        ) as results,
        _processes(plan, address, n_gpus) as start,
    ):
        is_finished = _write(prompts, plan, results, start)
    return _end(prompts, results, output, is_finished=is_finished)


def _results(
    plan: BatchPlan, prompts: Sequence[Prompt], output: Path, *, resume: bool, retry_failed: bool
) -> BatchResults:
    """Where records go. Raises GgufspecError before anything is loaded."""
    from ggufspec.batch.results import FileResults, StreamResults
    from ggufspec.batch.settings import model_identity
    from ggufspec.common.files import is_stream
    from ggufspec.common.prompts import digest

    load = {name: each for name, each in plan.load.items() if name not in _NOT_OF_THE_TEXT}
    settings = {
        "target": model_identity(Path(plan.target)),
        "draft": None if plan.draft is None else model_identity(Path(plan.draft)),
        "n_prompts": len(prompts),
        "prompts": digest(prompts),
        "seed": plan.seed,
        "chat": plan.chat,
        "system": plan.system,
        **plan.settings,
        **load,
    }
    if str(output) != "-" and not is_stream(output):
        return FileResults(output, settings, len(prompts), resume=resume, retry_failed=retry_failed)
    if resume:
        raise click.UsageError("--resume needs a file to go on with: name it with -o")
    stream = sys.stdout.buffer if str(output) == "-" else output.open("wb")
    return StreamResults(stream, settings)


@contextmanager
def _processes(plan: BatchPlan, address: str | None, n_gpus: float) -> Iterator[StartWorker]:
    """How those of workers are started: on this machine, or on the cluster of that address."""
    if address is None:
        from ggufspec.batch.process import LocalProcess

        yield LocalProcess
        return
    from ggufspec.batch.cluster import cluster

    threads = plan.load["n_threads"]
    with cluster(
        address, n_workers=plan.n_workers, n_threads=threads, n_gpus=n_gpus, verbose=plan.verbose
    ) as start:
        yield start


def _write(
    prompts: Sequence[Prompt], plan: BatchPlan, results: BatchResults, start: StartWorker
) -> bool:
    """Have all prompts answered that are not yet; False where somebody stopped it."""
    from ggufspec.batch.run import Batch

    n_before = len(results.records)
    if n_before:
        click.echo(f"ggufspec: {n_before:,} of {len(prompts):,} prompts are done already", err=True)
    with late_bars() as bars:
        shown = _Shown(bars, n_before, len(prompts), verbose=plan.verbose)
        batch = Batch(prompts, plan, results, shown.show, start)
        with _stopped_by_signals(batch.stop):
            is_finished = batch.run()
    shown.tell_speed()
    return is_finished


def _end(
    prompts: Sequence[Prompt], results: BatchResults, output: Path, *, is_finished: bool
) -> int:
    """Totals, and what to do about what is missing; the exit code."""
    from ggufspec.batch.results import BatchTotals

    done = BatchTotals.of(results.records.values())
    parts = [f"{done.n_prompts:,} of {len(prompts):,} prompts", f"{done.n_failed:,} failed"]
    if done.n_retried:
        parts.append(f"{done.n_retried:,} tried again")
    parts.append(f"{done.n_generated:,} tokens")
    if done.n_drafted:
        parts.append(
            f"{done.acceptance:.1%} of {done.n_drafted:,} drafted accepted, "
            f"{done.mean_length:.2f} tokens a round"
        )
    click.echo(f"ggufspec: {'; '.join(parts)}", err=True)
    for record in [each for each in results.records.values() if each["error"]][:3]:
        click.echo(f"ggufspec: prompt {record['index'] + 1} failed: {record['error']}", err=True)
    if not is_finished:
        kept = "" if str(output) == "-" else "; the same command with --resume goes on"
        click.echo(f"ggufspec: interrupted{kept}", err=True)
        return INTERRUPTED
    return ERROR if done.n_failed else 0


class _Shown:
    """What happens, as people want to see it: a bar on a terminal, else a line now and then."""

    def __init__(self, bars: LateBars, n_done: int, n_all: int, *, verbose: bool) -> None:
        self._bars = bars
        self._n_done, self._n_all = n_done, n_all
        self._n_here = self._n_tokens = 0
        self._verbose = verbose
        self._placements: set[str] = set()
        self._started = self._talked = monotonic()

    def show(self, event: BatchEvent) -> None:
        """Show an event."""
        where = f"{event.pid} on {event.node}" if event.node else f"{event.pid}"
        who = f"process {event.worker} ({where})" if event.pid else f"process {event.worker}"
        which = "" if event.index is None else f" prompt {event.index + 1}"
        if event.what == "ready":
            if not self._n_here:
                self._started = monotonic()  # loading is not writing
            self._tell_placement(event.reason)
            self._say(f"{who} is ready", only_if_verbose=True)
        elif event.what == "waiting":
            self._say(f"{who} {event.reason}")
        elif event.what == "begun":
            self._say(f"{who} begins{which}", only_if_verbose=True)
        elif event.what == "ended":
            end = "; trying again" if event.will_retry else "; giving it up" if which else ""
            self._say(f"{which.strip() or who}: {event.reason}{end}")
        elif event.what == "lost":
            self._say(f"{who} cannot be started again: {event.reason}; going on without it")
        elif event.record is not None:
            self._count(event.record)

    def tell_speed(self) -> None:
        """How fast it went, all processes together."""
        seconds = monotonic() - self._started
        if self._n_here:
            click.echo(
                f"ggufspec: wrote {self._n_tokens:,} tokens for {self._n_here:,} prompts in "
                f"{seconds:.1f} s: {self._n_tokens / seconds:.1f} tokens/s",
                err=True,
            )

    def _count(self, record: dict[str, Any]) -> None:
        self._n_done += 1
        self._n_here += 1
        self._n_tokens += record.get("n_generated", 0)
        seconds = max(monotonic() - self._started, 1e-9)
        speed = f"{self._n_tokens / seconds:.1f} tokens/s"
        if sys.stderr.isatty():
            self._bars.update("Writing", self._n_done, self._n_all, label=speed)
        elif monotonic() - self._talked > _TALK_EVERY:
            self._talked = monotonic()
            left = seconds / self._n_here * (self._n_all - self._n_done)
            self._say(f"{self._n_done:,} of {self._n_all:,}, {speed}, about {left:.0f} s left")

    def _tell_placement(self, placement: str) -> None:
        if placement and placement not in self._placements:
            self._placements.add(placement)
            self._say(placement)

    def _say(self, text: str, *, only_if_verbose: bool = False) -> None:
        if self._verbose or not only_if_verbose:
            click.echo(f"ggufspec: {text}", err=True)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block, Ctrl-C and SIGTERM call `stop`, so that no record is cut in two.

    A signal that was switched off (`nohup`, a job in the background) stays so.
    """
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
