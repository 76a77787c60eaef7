"""Runs prompts in worker processes: starts and feeds them, collects records, replaces them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import IO, Any, NamedTuple, Protocol

from ggufspec import errors
from ggufspec.batch.results import BatchRecord, BatchResults
from ggufspec.common.prompts import Prompt
from ggufspec.errors import ModelError

GRACE_SECONDS = 10.0  # a worker that has not answered this long after its timeout is killed
_N_STARTS = 2  # a worker is not started again after this many failed starts in a row
# Ctrl-C is handled by the parent. On POSIX the worker has a separate session, so that Ctrl-C in a
# terminal does not reach it even while its interpreter starts; elsewhere it ignores the signal. It
# gets the parent's sys.path, which does not depend on its working directory.
_CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[1:]; "
    "from ggufspec.batch.worker import main; main()"
)
_N_LAST_BYTES = 4096
_LINE_WIDTH = 300


class WorkerEvent(NamedTuple):
    number: int | None  # None: a request to stop the batch
    message: dict[str, Any] | None  # None: the worker's process has ended; no event follows


class WorkerProcess(Protocol):
    """`pid` and `node` (its machine; empty: this one) are valid once the worker is ready."""

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str: ...

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; does nothing once the process has ended."""

    def kill(self) -> None:
        """End the process at once; its last event follows."""

    def close(self) -> None:
        """Kill the process if it runs, and release its resources."""

    def end_reason(self) -> str:
        """How the process ended; call it only after its last event."""


StartWorker = Callable[[int, Mapping[str, Any], "SimpleQueue[WorkerEvent]"], WorkerProcess]
"""Starts a worker with (number, task, event queue). The task: a BatchPlan and a profile as JSON."""


@dataclass(frozen=True)
class BatchPlan:
    """What a batch runs; all values have JSON types."""

    target: str
    draft: str | None
    load: Mapping[str, Any]  # options of `ggufspec.load`
    settings: Mapping[str, Any]  # options of `Engine.stream`
    chat: bool | None = None  # None: the chat template for "turns" and "messages" only
    system: str | None = None
    seed: int = 0
    n_workers: int = 1
    n_retries: int = 2
    timeout: float | None = None  # seconds for each prompt
    verbose: bool = False


@dataclass(frozen=True)
class BatchEvent:
    """An event for a progress display.

    `what`: "waiting" (a cluster has no room for the worker yet), "loading" (`reason`: the step),
    "ready", "begun", "finished", "ended" (the worker's process ended), "lost" (it cannot be started
    again; others continue).
    """

    what: str
    worker: int
    pid: int
    node: str
    index: int | None = None  # of the prompt
    reason: str = ""
    share: float = 0.0  # of the step that is done
    will_retry: bool = False  # whether the prompt of an ended process is tried again
    record: BatchRecord | None = None


@dataclass(eq=False)
class BatchWorker:
    number: int
    process: WorkerProcess
    is_ready: bool = False
    refusal: tuple[str, str] | None = None  # kind of error, message
    index: int | None = None  # index of its prompt
    deadline: float | None = None
    was_killed: bool = False  # because it missed its deadline

    def event(self, what: str, index: int | None = None, **details: Any) -> BatchEvent:
        return BatchEvent(what, self.number, self.process.pid, self.process.node, index, **details)


class LocalProcess:
    node = ""

    def __init__(
        self, number: int, task: Mapping[str, Any], events: SimpleQueue[WorkerEvent]
    ) -> None:
        self._errors: IO[bytes] | None = None
        if not task["verbose"]:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # ignored on Windows
        )
        self._reader = threading.Thread(target=self._read, args=(number, events), daemon=True)
        self._reader.start()
        self.send(task)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):  # stdin may hold an unread message
                    pipe.close()

    def end_reason(self) -> str:
        """The exit code or signal, and the last line of stderr."""
        code = self._process.wait()
        how = f"exited with code {code}"
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        if code == -9:
            how += " (out of memory?)"
        said = ""
        if self._errors is not None:
            size = self._errors.seek(0, 2)
            self._errors.seek(max(size - _N_LAST_BYTES, 0))
            said = last_line(self._errors.read().decode(errors="replace"))
        return f"its worker process {how}{f': {said}' if said else ''}"

    def _read(self, number: int, events: SimpleQueue[WorkerEvent]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                events.put(WorkerEvent(number, json.loads(line)))
            except ValueError:
                break  # the process ended while it wrote this line
        events.put(WorkerEvent(number, None))


def last_line(text: str) -> str:
    """The last line that is not blank, shortened; "" if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return textwrap.shorten(lines[-1], _LINE_WIDTH, placeholder=" ...") if lines else ""


def prompt_seed(seed: int, index: int, turn: int = 0) -> int:
    """The seed of one text, derived from the batch's seed and the text's place in the file."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def timeout_error(seconds: float) -> str:
    return f"it took longer than {seconds:g} seconds (--timeout)"


class Batch:
    """One run over the prompts that have no record yet."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        plan: BatchPlan,
        results: BatchResults,
        report: Callable[[BatchEvent], None] = lambda event: None,
        start: StartWorker = LocalProcess,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self._prompts = {prompt.index: prompt for prompt in prompts}
        self._plan = plan
        self._results = results
        self._report = report
        self._start_process = start
        self._grace = grace
        # Indices of prompts that have no record and no worker.
        self._waiting = deque(index for index in self._prompts if index not in results.records)
        self._n_attempts: Counter[int] = Counter()  # by index of the prompt
        self._n_workers = min(plan.n_workers, len(self._waiting))
        self._events: SimpleQueue[WorkerEvent] = SimpleQueue()
        self._workers: dict[int, BatchWorker] = {}
        self._n_failed_starts: Counter[int] = Counter()  # by number of the worker
        self._was_ready = False  # whether any worker has been ready

    def stop(self) -> None:
        """Make `run` return; may be called from a signal handler."""
        self._events.put(WorkerEvent(None, None))

    def run(self) -> bool:
        """Run until every prompt has a record (returns True) or `stop` is called (returns False).

        Raises GgufspecError if no worker can load the models, or records cannot be written;
        finished records are kept. Ends all processes that it started.
        """
        try:
            if self._waiting:
                self._start(1)  # the others start when this one is ready
            while self._waiting or any(each.index is not None for each in self._workers.values()):
                number, message = self._next_event()
                if number is None:
                    self._collect_last_records()
                    return False
                self._handle(self._workers[number], message)
            return True
        finally:
            for worker in self._workers.values():
                worker.process.kill()
            for worker in self._workers.values():
                worker.process.close()

    def _next_event(self) -> WorkerEvent:
        while True:
            deadlines = [each.deadline for each in self._workers.values() if each.deadline]
            try:
                wait = max(min(deadlines) - monotonic(), 0.0) if deadlines else None
                return self._events.get(timeout=wait)
            except Empty:
                for worker in self._workers.values():
                    if worker.deadline and worker.deadline <= monotonic():
                        worker.was_killed, worker.deadline = True, None
                        worker.process.kill()

    def _handle(self, worker: BatchWorker, message: dict[str, Any] | None) -> None:
        if message is None:
            self._replace(worker)
        elif "refused" in message:
            worker.refusal = (message["kind"], message["refused"])
        elif "waiting" in message:
            self._report(worker.event("waiting", reason=message["waiting"]))
        elif "loading" in message:
            self._report(worker.event("loading", reason=message["loading"], share=message["share"]))
        elif "ready" in message:
            self._accept(worker, message)
        else:
            self._finish(worker, message["record"])
            self._assign()

    def _accept(self, worker: BatchWorker, message: Mapping[str, Any]) -> None:
        """Give a prompt to a worker that became ready; the first one also starts the others."""
        worker.is_ready = True
        self._n_failed_starts[worker.number] = 0
        if message["profile"] is not None and self._results.profile is None:
            self._results.keep_profile(message["profile"])
        self._report(worker.event("ready", reason=message["note"]))
        self._assign()
        if not self._was_ready:
            self._was_ready = True
            for number in range(2, self._n_workers + 1):
                self._start(number)

    def _replace(self, worker: BatchWorker) -> None:
        """Start a new process for one that ended; its prompt is tried again or marked as failed."""
        del self._workers[worker.number]
        reason = worker.process.end_reason()
        worker.process.close()
        if (index := worker.index) is not None:
            will_retry = not worker.was_killed and self._n_attempts[index] <= self._plan.n_retries
            self._report(worker.event("ended", index, reason=reason, will_retry=will_retry))
            if will_retry:
                self._waiting.appendleft(index)
            else:
                self._fail(worker, self._prompts[index], reason)
        elif worker.is_ready:
            self._report(worker.event("ended", reason=reason, will_retry=True))
        else:
            self._count_failed_start(worker, reason)
        self._assign()
        if self._waiting and self._n_failed_starts[worker.number] < _N_STARTS:
            self._start(worker.number)

    def _count_failed_start(self, worker: BatchWorker, reason: str) -> None:
        """Count a failed start. Raises GgufspecError if no worker is left."""
        self._n_failed_starts[worker.number] += 1
        n_failed = self._n_failed_starts[worker.number]
        kind, said = worker.refusal or ("ModelError", f"no worker became ready: {reason}")
        if not self._was_ready or (n_failed >= _N_STARTS and not self._workers):
            raise getattr(errors, kind, ModelError)(said)  # of an OSError: ModelError
        if n_failed >= _N_STARTS:
            self._report(worker.event("lost", reason=said))

    def _assign(self) -> None:
        for worker in self._workers.values():
            is_free = worker.is_ready and worker.index is None and not worker.was_killed
            if not is_free or not self._waiting:
                continue
            worker.index = self._waiting.popleft()
            self._n_attempts[worker.index] += 1
            if self._plan.timeout is not None:
                worker.deadline = monotonic() + self._plan.timeout + self._grace
            # Report before sending: else "finished" could come before "begun".
            self._report(worker.event("begun", worker.index))
            worker.process.send({"prompt": asdict(self._prompts[worker.index])})

    def _finish(self, worker: BatchWorker, record: BatchRecord) -> None:
        index = worker.index
        assert index is not None
        worker.index = worker.deadline = None
        record = {"index": index, **record, "worker": worker.number}
        record["attempts"] = self._n_attempts[index]
        self._results.add(record)
        self._report(worker.event("finished", index, record=record))

    def _fail(self, worker: BatchWorker, prompt: Prompt, reason: str) -> None:
        if worker.was_killed and self._plan.timeout is not None:
            reason = timeout_error(self._plan.timeout)
        seed = prompt_seed(self._plan.seed, prompt.index)
        self._finish(worker, {**prompt.label, "seed": seed, "error": reason})

    def _start(self, number: int) -> None:
        task = {**vars(self._plan), "profile": self._results.profile}
        self._workers[number] = BatchWorker(number, self._start_process(number, task, self._events))

    def _collect_last_records(self) -> None:
        while not self._events.empty():
            number, message = self._events.get()
            if number is not None and message is not None and "record" in message:
                self._finish(self._workers[number], message["record"])
