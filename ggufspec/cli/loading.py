"""Finds and loads the models that a command names; shows the progress of slow work on stderr."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.interrupts import end_if_delayed
from ggufspec.common import defaults
from ggufspec.common.files import default_cache_dir, format_bytes
from ggufspec.errors import ModelError
from ggufspec.models.head_facts import MTP
from ggufspec.models.heads import DraftFile

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ggufspec.engine.engine import Engine
    from ggufspec.models.draft_proposal import DraftProposal

AUTO_DRAFT = "auto"
MOST_DRAFTS = 16  # maximum number that a command ranks
_MOST_OF_MEMORY = 0.8  # for a model; the rest is for contexts and other programs
_EMBEDDED_PARAMS = 7.2  # millions
PATIENCE_SECONDS = 1.0  # of work before a bar is shown, on a terminal
LINE_SECONDS = 5.0  # between two lines, without a terminal
_TOKEN_BYTES = 4  # of usual text, in most languages and vocabularies
_N_NEW = 256  # assumed tokens of an answer without a limit
_WORK = {
    "kernels": "Trying kernels, once on this machine",
    "contexts": "Measuring attention, and making contexts",
    "costs": "Measuring the pair",
    "draft costs": "Measuring the draft",
    "vocabulary": "Reading the vocabulary",
    "images": "Reading the images",
}


@dataclass(frozen=True)
class PairOptions:
    """The models that the command line names; without a target, the embedded pair."""

    target: str | None
    draft: str | None
    offline: bool
    yes: bool = False  # download what is proposed
    size: str = defaults.DEMO_SIZE
    cache_dir: Path | None = None

    def check(self) -> None:
        """Raise UsageError for a draft without a target."""
        if self.target is None and self.draft is not None:
            raise click.UsageError("--draft needs --target: the embedded pair has its own draft")

    def find(self, *, projector: bool = False) -> tuple[Path, DraftFile | None]:
        """The files of target and draft; prints what "auto" chose. Raises GgufspecError.

        `projector`: see `resolve`.
        """
        if self.target is None:
            from ggufspec.standin.embedded import embedded_draft

            return stand_in(self.size, self.cache_dir), embedded_draft()
        target = find_model(self.target, offline=self.offline, projector=projector)
        draft = self.draft
        if draft == AUTO_DRAFT:
            draft = proposed_draft(self.target, offline=self.offline, yes=self.yes)
        return target, None if draft is None else find_draft(draft, offline=self.offline)

    def find_each(self) -> dict[str, tuple[Path, DraftFile | None]]:
        """The files of a pair for each draft of a comma-separated list, by the draft's name.

        A single draft has the name "". Raises GgufspecError, BadParameter.
        """
        from ggufspec.models.header import read_header
        from ggufspec.models.local import local_file

        drafts = [name.strip() for name in (self.draft or "").split(",")]
        if len(drafts) == 1 or local_file(self.draft or "") is not None:  # "a,b.gguf"
            return {"": self.find()}
        if len(drafts) > MOST_DRAFTS:
            raise click.BadParameter(
                f"{len(drafts)} drafts were given; give at most {MOST_DRAFTS}", param_hint="--draft"
            )
        pairs = [replace(self, draft=name).find() for name in drafts]
        found = [draft for _, draft in pairs if draft]
        files = [Path(MTP) if draft == MTP else read_header(draft).paths[0] for draft in found]
        resolved = [file.resolve() for file in files]
        for i, name in enumerate(drafts):
            if resolved[i] in resolved[:i]:
                raise click.BadParameter(
                    f"{name} is given twice ({files[i]}); give each draft once",
                    param_hint="--draft",
                )
        stems = [file.stem for file in files]
        is_unique = len(set(stems)) == len(stems)
        return dict(zip(stems if is_unique else map(str, files), pairs, strict=True))


def find_model(name: str, *, offline: bool, heads: bool = False, projector: bool = False) -> Path:
    """The file of a named model, downloaded if it is missing. Raises GgufspecError.

    heads: it may be a draft head, see `resolve`; projector, too.
    """
    from ggufspec.models.local import is_repository
    from ggufspec.models.pull import resolve

    with late_bars() as bars:
        found = resolve(
            name,
            heads=heads,
            offline=offline,
            progress=bars.download,
            room=room,
            projector=projector,
        )
    if is_repository(name):
        render.note(f"{name}: {found.name}")
    return found


def room() -> float:
    """Bytes that a model may have on this machine: memory, and free memory of GPUs, in part."""
    from ggufspec.llama.devices import gpus, physical_memory

    if (n_memory := physical_memory()) is None:
        return math.inf
    return _MOST_OF_MEMORY * (n_memory + sum(gpu.n_free for gpu in gpus()))


def find_draft(name: str, *, offline: bool) -> DraftFile:
    """The file of a draft; MTP for the head in the target's own file."""
    return MTP if name == MTP else find_model(name, offline=offline, heads=True)


def proposed_draft(target: str, *, offline: bool, yes: bool) -> str | None:
    """The name of a draft for a target, also printed on stderr; None: the user declined them.

    What is not on this machine is proposed on a terminal, or with `yes`. Raises ModelError.
    """
    from ggufspec.models.draft_proposal import no_draft, proposals

    may_load = not offline and (yes or (sys.stdin.isatty() and sys.stderr.isatty()))
    is_declined = False
    for each in proposals(target, offline=not may_load):
        is_here = each.n_bytes == 0
        if is_here or (
            may_load and (yes or click.confirm(f"Download {_shown(each)}?", True, err=True))
        ):
            render.note(f"drafting with {each.name}: {each.why}")
            return each.name
        is_declined = may_load
    if is_declined:
        return None
    if not (offline or may_load) and (first := next(proposals(target), None)):
        raise ModelError(
            f"no draft for {target} is on this machine; --yes downloads {_shown(first)}"
        )
    raise no_draft(target)


def _shown(proposal: DraftProposal) -> str:
    size = "" if proposal.n_bytes is None else f", {format_bytes(proposal.n_bytes)}"
    return f"{proposal.name} ({proposal.why}{size})"


def stand_in(size: str, cache_dir: Path | None) -> Path:
    """The path of the padded target, which is written if it does not exist yet."""
    from ggufspec.standin import padded

    n_params, folder = padded.parse_size(size), cache_dir or default_cache_dir()
    dimensions, file = padded.plan_dimensions(n_params), padded.padded_file(n_params)
    render.echo(
        f"The large model is a stand-in: a model of {_EMBEDDED_PARAMS} M parameters, trained on "
        f"old novels, padded with zeros\nto the cost of {file.n_params / 1e6:,.0f} M "
        f"({dimensions.n_layers} layers, width {dimensions.n_embd}). It writes what the small one "
        "would, only slower.\n",
        err=True,
    )
    if (found := padded.cached_target(n_params, folder)) is not None:
        return found
    render.echo(f"Writing it once: {file.n_bytes / 1e6:,.0f} MB in {folder} ...", err=True)
    with late_bars() as bars:
        return padded.padded_target(
            n_params, folder, lambda done, of: bars.update("Writing", done, of, unit="bytes")
        )


def load_with_bars(
    target: Path,
    draft: DraftFile | None,
    load_settings: dict[str, Any],
    *,
    has_results: bool = False,
) -> Engine:
    """ggufspec.load with a bar for each slow step; prints its notes on stderr.

    has_results: the command has results to print at Ctrl-C, which then waits for llama.cpp.
    """
    from ggufspec.engine.load import load

    settings = {"n_remembered": 0, "cache_ram": 0, "mmproj_auto": False, **load_settings}
    with nullcontext() if has_results else end_if_delayed(), late_bars() as bars:
        engine = load(target, draft, progress=bars.load, **settings)
    for line in engine.notes:
        render.note(line)
    return engine


def wants_projector(load_settings: dict[str, Any]) -> bool:
    """Whether a target's projector is downloaded with it."""
    return bool(load_settings["mmproj_auto"] and load_settings["mmproj"] is None)


def room_for_drafts(n_draft: int | str) -> dict[str, int]:
    """The argument of `load` for drafts of this length."""
    return {} if isinstance(n_draft, str) else {"n_draft_max": n_draft}


def usual_text(texts: Sequence[str], n_new: int | None) -> tuple[int, int]:
    """The argument of `load` for these prompts: their mean length in tokens, and `n_new`."""
    n_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return n_bytes // max(len(texts), 1) // _TOKEN_BYTES, _N_NEW if n_new is None else n_new


@dataclass
class _Work:
    started: float
    n_first: float  # done at that time
    unit: str
    updated: float = 0.0
    done: float = 0.0
    total: float = 1.0
    label: str = ""
    bar: TaskID | None = None

    def line(self, now: float) -> str:
        """How far it is, and how long it will still take."""
        if (n_new := self.done - self.n_first) <= 0:
            return f"{self.label} ({now - self.started:.0f} s so far)"
        left = (self.updated - self.started) / n_new * (self.total - self.done)
        return f"{self.done / self.total:4.0%}, about {left:.0f} s left: {self.label}"


class LateBars:
    """Named bars, shown once there was work for a second; without a terminal, a line now and then.

    A thread shows them where the work reports nothing for a while.
    """

    def __init__(self) -> None:
        self._works: dict[str, _Work] = {}
        self._latest: _Work | None = None
        self._progress: Progress | None = None
        self._shown = 0.0  # time of the last line; before it, of the first work
        self._lock = threading.Lock()
        self._end: threading.Event | None = None  # of the thread

    def update(
        self, name: str, done: float, total: float, *, unit: str = "count", label: str = ""
    ) -> None:
        """Show the progress of the work `name`. `unit`: "bytes", "share", or anything countable.

        `label`: shown instead of the name. Work that blocks begins with `done` 0.
        """
        now = monotonic()
        with self._lock:
            work = self._works.get(name)
            if work is None or done < work.done:
                work = self._works[name] = _Work(now, done, unit, bar=work.bar if work else None)
            work.updated, work.label = now, label or name
            work.done, work.total = done, total
            self._latest = work
            if self._end is None:
                self._shown, self._end = now, threading.Event()
                threading.Thread(target=self._watch, args=(self._end,), daemon=True).start()
            self._show(work, now)

    def load(self, whose: str, share: float) -> None:
        self.update(_WORK.get(whose, f"Loading the {whose}"), share, 1, unit="share")

    def download(self, name: str, done: int, total: int) -> None:
        """Show the progress of a download; a callback for `ggufspec.models`."""
        self.update(name, done, total, unit="bytes")

    def prompt(self, whose: str, done: int, total: int) -> None:
        """Show the progress of work before a text; a callback for `Engine.stream`."""
        self.update(_WORK.get(whose, f"Processing the prompt ({whose})"), done, total)

    def close(self) -> None:
        with self._lock:
            if self._end is not None:
                self._end.set()
            if self._progress is not None:
                self._progress.stop()
            self._progress = self._latest = self._end = None
            self._works.clear()

    def _watch(self, end: threading.Event) -> None:
        while not end.wait(PATIENCE_SECONDS):
            with self._lock, suppress(OSError, ValueError):  # stderr may be closed
                if self._latest is not None and not end.is_set():
                    self._show(self._latest, monotonic())

    def _show(self, work: _Work, now: float) -> None:
        is_done = work.done >= work.total
        if not sys.stderr.isatty():
            if not is_done and now - self._shown >= LINE_SECONDS:
                self._shown = now
                render.echo(work.line(now), err=True)
            return
        if work.bar is None:
            if is_done or now - self._shown < PATIENCE_SECONDS:
                return
            if self._progress is None:
                self._progress = make_progress(work.unit)
                self._progress.start()
            work.bar = self._progress.add_task(work.label)
        if self._progress is not None:
            # Without a total, the bar moves.
            total = work.total if work.done else None
            self._progress.update(
                work.bar, completed=work.done, total=total, description=work.label
            )


def late_bars() -> closing[LateBars]:
    """A context whose bars are removed at the end of the block, also after an error."""
    return closing(LateBars())


def make_progress(unit: str) -> Progress:
    from rich import progress
    from rich.console import Console

    amount = {
        "bytes": (progress.DownloadColumn(), progress.TransferSpeedColumn()),
        "share": (progress.TaskProgressColumn(),),
    }.get(unit, (progress.MofNCompleteColumn(),))
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),  # names may have brackets
        progress.BarColumn(),
        *amount,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
