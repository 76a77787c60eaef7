"""`ggufspec batch`: runs a file of prompts in worker processes; records go to a file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import click

from ggufspec.batch.cluster import check, cluster
from ggufspec.batch.results import BatchResults, FileResults, StreamResults
from ggufspec.batch.run import Batch, BatchEvent, BatchPlan, LocalProcess, StartWorker
from ggufspec.cli import ERROR, INTERRUPTED, render, shared, text_settings
from ggufspec.cli.loading import (
    LateBars,
    PairOptions,
    late_bars,
    room_for_drafts,
    usual_text,
    wants_projector,
)
from ggufspec.cli.option_values import PATH
from ggufspec.cli.options import added, gathered, load_options, options
from ggufspec.common.facts import counted, plain
from ggufspec.common.files import is_stream
from ggufspec.common.prompts import Prompt, digest, read_prompts
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.engine.options import file_sampling
from ggufspec.errors import PromptError
from ggufspec.models.head_facts import MTP
from ggufspec.models.header import read_header
from ggufspec.models.projectors import projector_beside

_GENERATING = "Generating"
# Options that do not change texts, and what follows from the prompts.
_WITHOUT_EFFECT = ("n_threads", "n_threads_draft", "mmap", "usual_text")


@click.command(name="batch", cls=shared.SectionedCommand)
@click.argument("prompt_file", metavar="PROMPTS", type=PATH)
@shared.pair_options("target", "draft", "offline", "yes", draft={"more": shared.LOOKUP})
@gathered("planned", *options("planned"))
@text_settings.text_options(*options("text", "temperature", "max_tokens", "stop", "ignore_eos"))
@load_options("texts", "images")
@added(*options("batch"))
def command(
    prompt_file: Path,
    output: Path,
    pair: PairOptions,
    planned: dict[str, Any],
    address: str | None,
    n_gpus: float,
    resume: bool,
    retry_failed: bool,
    limit: int | None,
    settings: dict[str, Any],
    load_settings: dict[str, Any],
    verbose: bool,
) -> int:
    """Run a file of prompts in several processes, and continue after a crash.

    PROMPTS has JSON lines with "prompt", "messages" or "turns" (Spec-Bench), and "id" or
    "question_id"; or plain text, one prompt per paragraph (if there are empty lines) or per line.

    Finished prompts are kept in OUTPUT.part until the end: after Ctrl-C, SIGKILL or a power cut,
    the same command with --resume continues. A process that crashes is replaced and its prompt
    tried again; a prompt that fails is recorded with its error. Exit code 1: a prompt failed.

    \b
      ggufspec batch prompts.jsonl -o results.jsonl -m large.gguf -md small.gguf --num-processes 4
      ggufspec batch prompts.jsonl -o results.jsonl -m large.gguf -md small.gguf --resume
      ggufspec batch prompts.jsonl -o results.jsonl -m large.gguf --num-processes 16 --cluster auto
    """
    if planned["chat"] is False and planned["system"] is not None:
        raise click.UsageError("--system needs the chat template; leave --no-chat or --system out")
    if retry_failed and not resume:
        raise click.UsageError("--retry-failed needs --resume")
    if n_gpus and address is None:
        raise click.UsageError("--cluster-gpus needs --cluster")
    if load_settings["rpc"] and planned["n_workers"] > 1:
        raise click.UsageError(
            "an RPC server serves one process at a time; with --rpc, leave --num-processes at 1"
        )
    load_settings |= room_for_drafts(settings["n_draft"])
    text_settings.check(pair, settings)
    if address is not None:
        check(address)
    prompts = read_prompts(prompt_file)[:limit]
    texts = [prompt.text for prompt in prompts]
    load_settings["usual_text"] = usual_text(texts, settings["max_tokens"])
    has_images = any(prompt.has_images for prompt in prompts)
    load_settings["mmproj_auto"] &= has_images
    target, draft = pair.find(projector=wants_projector(load_settings))
    if has_images:
        prompts = _with_images(prompts, target, load_settings)
    found = file_sampling(read_header(target).values)
    settings = text_settings.with_file_sampling(settings, found, verbose=verbose)
    plan = BatchPlan(
        target=str(target),
        draft=None if draft is None else str(draft),
        load=plain(load_settings),
        settings=plain(settings),
        verbose=verbose,
        **planned,
    )
    processes: AbstractContextManager[StartWorker] = nullcontext(LocalProcess)
    if address is not None:
        size = {"n_workers": plan.n_workers, "n_threads": plan.load["n_threads"]}
        processes = cluster(address, **size, n_gpus=n_gpus, verbose=verbose)
    with (
        closing(
            _results(plan, prompts, output, resume=resume, retry_failed=retry_failed)
        ) as results,
        processes as start,
    ):
        is_finished = _write(prompts, plan, results, start)
    return _end(prompts, results, output, is_finished=is_finished)


def _with_images(
    prompts: Sequence[Prompt], target: Path, load_settings: dict[str, Any]
) -> list[Prompt]:
    """Check the images of the prompts, which are returned with what `checked` adds.

    Adds the projector of the target to `load_settings`. Raises PromptError, also without one.
    """
    from ggufspec.engine.images import NO_PROJECTOR, checked

    found = []
    for prompt in prompts:
        try:
            found.append(replace(prompt, messages=checked(prompt.messages)))
        except PromptError as error:
            raise PromptError(f"prompt {prompt.name}: {error}") from error
    if load_settings["mmproj"] is None and load_settings["mmproj_auto"]:
        load_settings["mmproj"] = projector_beside(target)
    if load_settings["mmproj"] is None:
        raise PromptError(NO_PROJECTOR)
    return found


def _results(
    plan: BatchPlan, prompts: Sequence[Prompt], output: Path, *, resume: bool, retry_failed: bool
) -> BatchResults:
    """The output, with the records that are finished. Loads no model. Raises GgufspecError."""
    load = {name: each for name, each in plan.load.items() if name not in _WITHOUT_EFFECT}
    for name in ("lora", "lora_draft"):
        load[name] = [[_identity(path), scale] for path, scale in plan.load[name]]
    for name in ("mmproj", "mmproj_draft"):
        load[name] = plan.load[name] and _identity(plan.load[name])
    settings = {
        "target": _identity(plan.target),
        "draft": plan.draft if plan.draft in (None, MTP) else _identity(plan.draft),
        "n_prompts": len(prompts),
        "prompts": digest(prompts),
        **{name: getattr(plan, name) for name in ("seed", "chat", "system")},
        **plan.settings,
        **load,
    }
    if str(output) != "-" and not is_stream(output):
        return FileResults(output, settings, len(prompts), resume=resume, retry_failed=retry_failed)
    if resume:
        raise click.UsageError("--resume needs the output file to continue: name it with -o")
    stream = sys.stdout.buffer if str(output) == "-" else output.open("wb")
    return StreamResults(stream, settings)


def _identity(path: str) -> dict[str, Any]:
    return {"file": Path(path).name, "fingerprint": fingerprint(Path(path))}


def _write(
    prompts: Sequence[Prompt], plan: BatchPlan, results: BatchResults, start: StartWorker
) -> bool:
    """Run all prompts that are not finished; returns False if a signal stopped the run."""
    n_before = len(results.records)
    if n_before:
        render.note(f"{n_before:,} of {len(prompts):,} prompts are finished already")
    with late_bars() as bars:
        shown = _Shown(bars, n_before, len(prompts), verbose=plan.verbose)
        batch = Batch(prompts, plan, results, shown.show, start)
        with _stopped_by_signals(batch.stop):
            is_finished = batch.run()
    shown.print_speed()
    return is_finished


def _end(
    prompts: Sequence[Prompt], results: BatchResults, output: Path, *, is_finished: bool
) -> int:
    records = list(results.records.values())
    failed = [record for record in records if record["error"]]
    hint = " (--resume --retry-failed tries them again)" if failed else ""
    of_all = f"{len(records):,} of {counted(len(prompts), 'prompt')}"
    parts = [of_all, f"{len(failed):,} failed{hint}"]
    if n_retried := sum(record.get("attempts", 1) - 1 for record in records):
        parts.append(f"{n_retried:,} tried again")
    names = ("n_generated", "n_rounds", "n_drafted", "n_accepted")  # failed prompts may lack them
    total = {name: sum(record.get(name, 0) for record in records) for name in names}
    parts.append(counted(total["n_generated"], "token"))
    if n_drafted := total["n_drafted"]:
        parts.append(
            f"{total['n_accepted'] / n_drafted:.1%} of {n_drafted:,} drafted accepted, "
            f"{total['n_generated'] / total['n_rounds']:.2f} tokens/round"
        )
    render.note("; ".join(parts))
    for record in failed[:3]:
        render.note(f"prompt {record['index'] + 1} failed: {record['error']}")
    if not is_finished:
        kept = "" if str(output) == "-" else "; the same command with --resume continues"
        render.note(f"interrupted{kept}")
        return INTERRUPTED
    return ERROR if failed else 0


class _Shown:
    def __init__(self, bars: LateBars, n_done: int, n_all: int, *, verbose: bool) -> None:
        self._bars = bars
        self._n_done, self._n_all = n_done, n_all
        self._n_here = self._n_tokens = 0
        self._verbose = verbose
        self._was_ready = False  # whether any process was
        self._notes: set[str] = set()
        self._started = monotonic()

    def show(self, event: BatchEvent) -> None:
        where = f"{event.pid} on {event.node}" if event.node else f"{event.pid}"
        worker = f"process {event.worker}" + (f" ({where})" if event.pid else "")
        which = "" if event.index is None else f" prompt {event.index + 1}"
        if event.what == "loading":
            if not self._was_ready:  # else the progress of texts is shown
                self._bars.load(event.reason, event.share)
        elif event.what == "ready":
            if not self._was_ready:
                self._was_ready = True
                self._bars.close()
                self._bars.update(_GENERATING, self._n_done, self._n_all)
            if not self._n_here:
                self._started = monotonic()  # leaves out the time of loading
            if event.reason not in {"", *self._notes}:
                self._notes.add(event.reason)
                self._say(event.reason)
            self._say(f"{worker} is ready", only_if_verbose=True)
        elif event.what == "waiting":
            self._say(f"{worker} {event.reason}")
        elif event.what == "begun":
            self._say(f"{worker} begins{which}", only_if_verbose=True)
        elif event.what == "ended":
            end = "; trying again" if event.will_retry else "; giving up" if which else ""
            self._say(f"{which.strip() or worker}: {event.reason}{end}")
        elif event.what == "lost":
            self._say(f"{worker} cannot be restarted: {event.reason}; continuing without it")
        elif event.record is not None:
            self._count(event.record)

    def print_speed(self) -> None:
        seconds = monotonic() - self._started
        if self._n_here:
            render.note(
                f"generated {counted(self._n_tokens, 'token')} for "
                f"{counted(self._n_here, 'prompt')} in {seconds:.1f} s: "
                f"{self._n_tokens / seconds:.1f} tokens/s"
            )

    def _count(self, record: dict[str, Any]) -> None:
        self._n_done += 1
        self._n_here += 1
        self._n_tokens += record.get("n_generated", 0)
        speed = self._n_tokens / max(monotonic() - self._started, 1e-9)
        label = f"{speed:.1f} tokens/s"
        self._bars.update(_GENERATING, self._n_done, self._n_all, label=label)

    def _say(self, text: str, *, only_if_verbose: bool = False) -> None:
        if self._verbose or not only_if_verbose:
            render.note(text)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block, Ctrl-C and SIGTERM call `stop`, so that no record is cut off.

    A signal that is ignored (`nohup`, a background job) stays ignored.
    """
    before: dict[signal.Signals, Any] = {}
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            before[each] = signal.signal(each, lambda *_: stop())
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
