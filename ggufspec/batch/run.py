"""Hands prompts to workers one at a time, and collects: whoever dies is replaced.

Knows processes and what they say; neither where they run, nor models, nor what is in a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol

from ggufspec import errors
from ggufspec.batch.pool import Event, LocalProcess
from ggufspec.batch.results import Record, Results
from ggufspec.batch.schedule import Schedule
from ggufspec.batch.settings import prompt_seed
from ggufspec.common.prompts import Prompt
from ggufspec.errors import GgufspecError, ModelError

_GRACE = 10.0  # seconds after which a worker that does not see that its time is over is killed
_N_STARTS = 2  # of a worker in a row that fail, after which it is given up


@dataclass(frozen=True)
class Plan:
    """What the workers are told: models, how to load them, and what `Engine.stream` is given.

    `chat`: None: for turns and messages. All of it is of JSON's types.
    """

    target: str
    draft: str | None
    load: Mapping[str, Any]
    settings: Mapping[str, Any]
    chat: bool | None = None
    system: str | None = None
    seed: int = 0
    n_workers: int = 1
    n_retries: int = 2
    timeout: float | None = None  # seconds of a prompt
    verbose: bool = False

    def task(self, known: Mapping[str, object] | None, n_workers: int) -> dict[str, Any]:
        """What a worker is told first."""
        return {
            "target": self.target,
            "draft": self.draft,
            "load": dict(self.load),
            "settings": dict(self.settings),
            "chat": self.chat,
            "system": self.system,
            "seed": self.seed,
            "timeout": self.timeout,
            "verbose": self.verbose,
            "n_workers": n_workers,
            "known": known,
        }


class Process(Protocol):
    """A worker's process, wherever it runs. `pid` and `node` are known when it is ready.

    `node` is the machine that it runs on; empty: this one.
    """

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str: ...

    def tell(self, message: Mapping[str, Any]) -> None:
        """Say something; one that is dead hears nothing, and is known to be dead by its event."""

    def kill(self) -> None:
        """Have it end at once; the event that tells so follows."""

    def bury(self) -> None:
        """Kill it if need be, and give back whatever is held for it."""

    def why(self) -> str:
        """Of one that is dead: how it died."""


Start = Callable[[int, Mapping[str, Any], "SimpleQueue[Event]"], Process]
"""Starts the process of a worker: its number, its task, and where its events go."""


@dataclass(eq=False)
class Worker:
    """One of those who answer, and what it has to do."""

    number: int
    process: Process
    is_ready: bool = False
    refusal: tuple[str, str] | None = None  # kind of error, and what it says
    index: int | None = None  # of the prompt that it has
    attempt: int = 0
    deadline: float | None = None  # by which it must have answered
    was_too_slow: bool = False


@dataclass(frozen=True)
class News:
    """Something happened. `what`: "waiting" (there is no room for it yet), "ready", "begun",
    "finished", "died" (again: to be tried again), "lost" (one worker less)."""

    what: str
    worker: int
    pid: int
    node: str
    index: int | None = None
    why: str = ""
    again: bool = False
    record: Record | None = None


class Batch:
    """One run over the prompts that have no record yet."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        plan: Plan,
        results: Results,
        heard: Callable[[News], None] = lambda news: None,
        start: Start = LocalProcess,
    ) -> None:
        self._prompts = {prompt.index: prompt for prompt in prompts}
        self._plan = plan
        self._results = results
        self._heard = heard
        self._start_process = start
        left = [index for index in self._prompts if index not in results.records]
        self._schedule = Schedule(left, plan.n_retries)
        self._n_workers = min(plan.n_workers, len(left))
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._workers: dict[int, Worker] = {}
        self._n_failed_starts: dict[int, int] = {}
        self._was_ready = False

    def stop(self) -> None:
        """Have `run` end; may be called from a signal handler."""
        self._events.put(Event(None, None))

    def run(self) -> bool:
        """Until every prompt has its record, or somebody calls `stop`: then False.

        Raises GgufspecError where no worker can load the models, or records cannot be written;
        what is finished is kept. No process is left behind.
        """
        try:
            if not self._schedule.is_over:
                self._start(1)  # the others when that went well
            while not self._schedule.is_over:
                event = self._next()
                if event is not None and event.number is None:
                    self._collect_last()
                    return self._schedule.is_over
                if event is not None and event.number is not None:
                    self._hear(self._workers[event.number], event.message)
            return True
        finally:
            for worker in self._workers.values():
                worker.process.kill()
            for worker in self._workers.values():
                worker.process.bury()

    def _next(self) -> Event | None:
        """What happens next; None where something had to be done about time."""
        deadlines = [each.deadline for each in self._workers.values() if each.deadline]
        try:
            wait = max(min(deadlines) - monotonic(), 0.0) if deadlines else None
            return self._events.get(timeout=wait)
        except Empty:
            for worker in self._workers.values():
                if worker.deadline and worker.deadline <= monotonic():
                    worker.was_too_slow, worker.deadline = True, None
                    worker.process.kill()
            return None

    def _hear(self, worker: Worker, message: dict[str, Any] | None) -> None:
        if message is None:
            self._mourn(worker)
        elif "refused" in message:
            worker.refusal = (message["kind"], message["refused"])
        elif "waiting" in message:
            self._tell("waiting", worker, why=message["waiting"])
        elif "ready" in message:
            self._welcome(worker, message)
        else:
            self._finish(worker, message["record"])
            self._give()

    def _welcome(self, worker: Worker, message: Mapping[str, Any]) -> None:
        worker.is_ready = True
        self._n_failed_starts[worker.number] = 0
        if message["known"] is not None and self._results.known is None:
            self._results.know(message["known"])
        self._tell("ready", worker, why=message["placement"] or "")
        self._give()
        if not self._was_ready:
            self._was_ready = True
            for number in range(2, self._n_workers + 1):
                self._start(number)

    def _mourn(self, worker: Worker) -> None:
        """It is dead: its prompt goes to another, or has failed; another takes its place."""
        del self._workers[worker.number]
        why = worker.process.why()
        worker.process.bury()
        index = worker.index
        if index is not None:
            again = not worker.was_too_slow and self._schedule.give_back(index)
            self._tell("died", worker, index, why, again)
            if not again:
                self._fail(worker, why)
        elif worker.is_ready:
            self._tell("died", worker, None, why, True)
        else:
            self._count_failed_start(worker, why)
        self._give()
        if self._schedule.has_next and self._n_failed_starts.get(worker.number, 0) < _N_STARTS:
            self._start(worker.number)

    def _count_failed_start(self, worker: Worker, why: str) -> None:
        """Raises GgufspecError where there is nobody else."""
        n_failed = self._n_failed_starts.get(worker.number, 0) + 1
        self._n_failed_starts[worker.number] = n_failed
        kind, said = worker.refusal or ("ModelError", f"no worker became ready: {why}")
        if not self._was_ready or (n_failed >= _N_STARTS and not self._workers):
            error = getattr(errors, kind, ModelError)
            raise (error if issubclass(error, GgufspecError) else ModelError)(said)
        if n_failed >= _N_STARTS:
            self._tell("lost", worker, None, said)

    def _give(self) -> None:
        """Something to do for whoever has nothing."""
        for worker in self._workers.values():
            if not worker.is_ready or worker.index is not None or not self._schedule.has_next:
                continue
            worker.index, worker.attempt = self._schedule.take()
            if self._plan.timeout is not None:
                worker.deadline = monotonic() + self._plan.timeout + _GRACE
            worker.process.tell({"prompt": self._prompts[worker.index].to_document()})
            self._tell("begun", worker, worker.index)

    def _finish(self, worker: Worker, record: Record) -> None:
        index = worker.index
        assert index is not None
        worker.index = worker.deadline = None
        record = {"index": index, **record, "worker": worker.number, "attempts": worker.attempt}
        self._results.add(record)
        self._schedule.finish(index)
        self._tell("finished", worker, index, record=record)

    def _fail(self, worker: Worker, why: str) -> None:
        """The record of a prompt whose workers die."""
        assert worker.index is not None
        prompt = self._prompts[worker.index]
        if worker.was_too_slow:
            why = f"it took longer than {self._plan.timeout:g} seconds (--timeout)"
        record: Record = {prompt.id_name: prompt.id} if prompt.id is not None else {}
        seed = prompt_seed(self._plan.seed, prompt.index)
        self._finish(worker, {**record, "seed": seed, "error": why})

    def _start(self, number: int) -> None:
        task = self._plan.task(self._results.known, self._plan.n_workers)
        self._workers[number] = Worker(number, self._start_process(number, task, self._events))

    def _collect_last(self) -> None:
        """What was finished before the end, and not heard yet, counts too."""
        while not self._events.empty():
            number, message = self._events.get()
            if number is not None and message is not None and "record" in message:
                self._finish(self._workers[number], message["record"])

    def _tell(
        self,
        what: str,
        worker: Worker,
        index: int | None = None,
        why: str = "",
        again: bool = False,
        record: Record | None = None,
    ) -> None:
        process = worker.process
        self._heard(News(what, worker.number, process.pid, process.node, index, why, again, record))
