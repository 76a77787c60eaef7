"""The thread that computes all passes of an engine; other threads submit texts, and wait."""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, TypeVar, Union
from weakref import WeakSet, ref

from ggufspec.common.failures import LOG
from ggufspec.engine.handle import Handle, Signal
from ggufspec.engine.pair import Pair
from ggufspec.engine.passes import Passes
from ggufspec.errors import ClosedError, OptionError
from ggufspec.llama.hidden_states import PassStopped
from ggufspec.llama.threadpool import end_threads

_SECONDS_WARM = 0.05  # after the last text, until the threads of OpenMP end
# Between two wakes of a consumer. With a model of 1,600 tokens/s on two cores, a wake for each
# chunk cost 8 %: it takes a core from the pass.
_SECONDS_UNTOLD = 0.002
_SECONDS_AT_EXIT = 10.0  # for a pass on a GPU, which cannot be stopped

T = TypeVar("T")


class _Job:
    def __init__(
        self,
        work: Callable[[], Any],
        may_begin: Callable[[], bool] | None,
        on_end: Callable[[_Job], object],
    ) -> None:
        self.work, self.may_begin, self.on_end = work, may_begin or (lambda: True), on_end
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_ended = self.is_cancelled = False

    def end(self, error: BaseException | None = None) -> None:
        self.error, self.has_ended = error, True
        self.on_end(self)


# A text or work; or nothing, or a dead reference: the thread looks at what has changed.
_Command = Union[Handle, _Job, "ref[Any]", None]


class Scheduler:
    """Writes texts of a pair in a thread of its own, as many at a time as there are slots.

    Other texts wait in a queue. The next to begin is of the group with the fewest texts under way;
    among these, the one that arrived first, or a shorter one just after it. The thread starts with
    the first text, and ends with `close`, once nothing refers to this object, and at exit.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair, self._passes = pair, Passes(pair)
        # While the thread waits for commands, it refers to nothing else. Putting one takes no lock,
        # since a stream may be dropped anywhere.
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.Lock()  # of the next four, which other threads read
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # why the thread has ended, or is to end
        self._running: list[Handle] = []
        self._job: _Job | None = None  # under way
        self._waiting: list[Handle] = []
        self._jobs: list[_Job] = []
        self.round_began_at: float | None = None  # by `perf_counter`; None: between rounds
        _all.add(self)

    def submit(self, handle: Handle, owner: object = None) -> None:
        """Queue a text, which ends once `owner` is dropped, if there is one.

        Raises ClosedError; OptionError in a callback of the thread.
        """
        if owner is not None:  # the callback runs no code of Python, where Ctrl-C would get lost
            handle.owner = ref(owner, self._commands.put)
        self._put(handle)

    def cancel(self, handle: Handle) -> None:
        """End a text within one round; if no other text shares it, within the pass (on CPUs)."""
        handle.is_cancelled = True
        self._commands.put(None)
        with self._lock:
            if not self._job and self._running and all(each.is_unwanted for each in self._running):
                self._stop_pass(True)

    def call(self, work: Callable[[], T], may_begin: Callable[[], bool] | None = None) -> Future[T]:
        """Have the thread call `work` between two rounds, once `may_begin` returns True.

        Not for the main thread, where Ctrl-C could leave a Future locked. Raises ClosedError,
        OptionError.
        """
        done = Future[T]()

        def tell(job: _Job) -> None:
            if not done.set_running_or_notify_cancel():
                return
            if job.error is None:
                done.set_result(job.result)
            else:
                done.set_exception(job.error)

        job = _Job(work, may_begin, tell)
        done.add_done_callback(lambda done: setattr(job, "is_cancelled", done.cancelled()))
        self._put(job)
        return done

    def run(self, work: Callable[[], T], may_begin: Callable[[], bool] | None = None) -> T:
        """The result of `work`, called as by `call`. Ctrl-C ends its passes."""
        ended = Signal()
        job = _Job(work, may_begin, lambda _: ended.set())
        self._put(job)
        try:
            ended.wait()
        except BaseException:
            job.is_cancelled = True
            with self._lock:
                if self._job is job:
                    self._stop_pass(True)
            self._commands.put(None)
            while not job.has_ended:
                ended.wait()
            raise
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def check(self) -> None:
        """Raise ClosedError where no text can be written, and what `check_wait` raises."""
        self._pair.check_open()
        self.check_wait()
        if self._error is not None:
            raise self._closed()

    def check_wait(self) -> None:
        """Raise an error where waiting for the thread would take forever.

        ClosedError in a fork, which does not have it; OptionError in a callback of the thread.
        """
        if self._pair.is_forked:
            self._pair.check_open()
        if threading.current_thread() is self._thread:
            raise OptionError(
                "a progress callback cannot use the engine that calls it: generate, stream and "
                "close wait until the prompt is processed. Call them after the callback returns"
            )

    @property
    def has_failed(self) -> bool:
        """Whether the thread has ended by an error of its own."""
        return self._error is not None and not isinstance(self._error, ClosedError)

    def close(self, seconds: float | None = None) -> None:
        """End all texts and the thread, with ClosedError. Twice is fine.

        Waits at most `seconds`; None: as long as it takes. Does nothing in a fork. Raises
        OptionError in a callback.
        """
        if self._pair.is_forked:
            return
        self.check_wait()
        with self._lock:
            if self._error is None:
                self._error = ClosedError("this engine is closed; load it again")
            self._stop_pass(True)
            self._commands.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _closed(self) -> ClosedError:
        if isinstance(self._error, ClosedError):
            return ClosedError(str(self._error))
        return ClosedError("the engine's thread has failed; load the engine again")

    def _put(self, command: _Command) -> None:
        self.check()
        with self._lock:
            if self._error is not None:
                raise self._closed()
            self._commands.put(command)
            if self._thread is None:
                mine = self._commands, ref(self, self._commands.put)
                self._thread = threading.Thread(
                    target=_work, args=mine, name="ggufspec", daemon=True
                )
                self._thread.start()

    def _stop_pass(self, is_stopped: bool) -> None:
        for context in self._pair.contexts:
            context.stop(is_stopped)

    def _do(self, command: _Command) -> bool:
        """Take a command, and run rounds until there is nothing to do; False: the thread ends."""
        try:
            self._take(command)
            while self._error is None:
                self._take_commands()
                self._end_cancelled()
                self._tell_news()
                self._do_job()
                self._begin_texts()
                if self._running:
                    self.round_began_at = perf_counter()
                    self._round()
                    self.round_began_at = None
                elif not (self._waiting or self._jobs):
                    return True
        except BaseException as error:
            LOG.error("the engine's thread has failed: %s", type(error).__name__)
            LOG.debug("traceback", exc_info=error)  # it may quote a text
            with self._lock:
                self._error = self._error or error
        self._end_all()
        return False

    def _take_commands(self) -> None:
        while True:
            try:
                self._take(self._commands.get_nowait())
            except Empty:
                return

    def _take(self, command: _Command) -> None:
        if isinstance(command, Handle):
            self._waiting.append(command)
        elif isinstance(command, _Job):
            self._jobs.append(command)

    def _end_cancelled(self) -> None:
        with self._lock:
            cancelled = [each for each in self._running if each.is_unwanted]
            self._running = [each for each in self._running if each not in cancelled]
            self._stop_pass(self._error is not None)
        for handle in cancelled:
            self._finish(handle)
        for handle in [each for each in self._waiting if each.is_unwanted]:
            self._waiting.remove(handle)
            handle.end(None)

    def _do_job(self) -> None:
        job = next((each for each in self._jobs if each.is_cancelled or each.may_begin()), None)
        if job is None:
            return
        self._jobs.remove(job)
        if job.is_cancelled:
            job.end()
            return
        with self._lock:
            self._job = job
            self._stop_pass(self._error is not None)
        found: BaseException | None = None
        try:
            job.result = job.work()
        except PassStopped:
            found = self._closed()
        except BaseException as error:
            found = error
        with self._lock:
            self._job = None
        job.end(found)

    def _begin_texts(self) -> None:
        while self._waiting and self._pair.slots.free:
            n_running = Counter(id(each.group) for each in self._running if each.group)
            handle = min(
                self._waiting, key=lambda each: (n_running[id(each.group)], each.text.turn)
            )
            self._waiting.remove(handle)
            with self._lock:
                self._running.append(handle)
                self._stop_pass(self._error is not None)
            try:
                handle.begin(self._pair)
            except BaseException as error:
                self._end(handle, error)

    def _round(self) -> None:
        handles = {each.generation: each for each in self._running if each.generation}
        try:
            failures = self._passes.run(list(handles))
        except BaseException as error:
            failures = [(generation, error) for generation in handles]
        for generation, failure in failures:
            self._end(handles[generation], failure)
        for generation, handle in handles.items():
            if generation.is_over:
                self._end(handle)

    def _tell_news(self) -> None:
        """Wake the consumers of new chunks: not after each short pass, which that would slow down.

        At once if what comes next may take long.
        """
        begins = bool(self._jobs or (self._waiting and self._pair.slots.free))
        is_long = begins or any(each.is_reading for each in self._running)
        now = perf_counter()
        for handle in self._running:
            if handle.has_news and (is_long or now - handle.told_at >= _SECONDS_UNTOLD):
                handle.told_at = now
                handle.tell()

    def _end(self, handle: Handle, error: BaseException | None = None) -> None:
        with self._lock:
            if handle not in self._running:
                return  # it has failed
            self._running.remove(handle)
        self._finish(handle, error)

    def _finish(self, handle: Handle, error: BaseException | None = None) -> None:
        if (generation := handle.generation) is not None:
            try:
                generation.end()
            except BaseException as failure:
                error = error or failure
                self._pair.slots.leave(generation.slot, None)
        handle.end(self._closed() if isinstance(error, PassStopped) else error)

    def _end_all(self) -> None:
        """End what is under way or queued. Nothing can be queued any more."""
        self._take_commands()
        for handle in list(self._running):
            self._end(handle, self._closed())
        for handle in self._waiting:
            handle.end(self._closed())
        for job in self._jobs:
            job.end(self._closed())
        self._waiting, self._jobs = [], []


def _work(commands: SimpleQueue[_Command], of: ref[Scheduler]) -> None:
    while True:
        try:
            command = commands.get(timeout=_SECONDS_WARM)
        except Empty:
            end_threads()
            command = commands.get()
        scheduler = of()
        if scheduler is None or not scheduler._do(command):
            return
        del scheduler, command


_all: WeakSet[Scheduler] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Before llama.cpp's statics are destroyed, and Python ends threads that run."""
    for scheduler in list(_all):
        scheduler.close(_SECONDS_AT_EXIT)
