"""The pairs of one address: which are loaded, which has to go for another, and when they end."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from ggufspec.common.files import format_bytes
from ggufspec.server.dialects.ollama import ModelFacts
from ggufspec.server.errors import LOG, ApiError, server_stopping
from ggufspec.server.pair_process import BROKEN, JSON_TYPE, PairProcess

_N_RESTARTS = 3  # in a row


class Memory(NamedTuple):
    """Bytes on GPUs and on the host."""

    gpu: int
    host: int


@dataclass(frozen=True)
class PairPlan:
    """A pair that can be loaded: the command line of its process, and the memory that it takes.

    `described`: its fields in the list of models.
    """

    name: str
    command_line: Sequence[str]
    memory: Memory
    facts: ModelFacts
    described: Mapping[str, Any]
    n_slots: int = 1
    slot_folder: Path | None = None  # for the slots of a pair that is unloaded


class Pair:
    """The state of a pair. `n_users`: requests that use it, or wait until it is loaded."""

    def __init__(self, plan: PairPlan, keep_alive: float) -> None:
        self.plan, self.name, self.keep_alive = plan, plan.name, keep_alive
        self.process: PairProcess | None = None  # once it is loaded
        self.loading: asyncio.Task[None] | None = None
        self.progress = ""
        self.n_users, self.n_failures = 0, 0  # failures in a row
        self.reason = ""  # of the latest failure
        self.is_leaving = False  # new requests wait until it has ended
        self.used_at, self.expires_at = 0.0, math.inf
        self.timer: asyncio.TimerHandle | None = None

    @property
    def status(self) -> str:
        return "loaded" if self.process else "loading" if self.loading else "unloaded"


class Pairs:
    """Loads pairs one after the other, and ends the process of those that are not used.

    `room`: memory for all of them. `n_most`: how many may be loaded; 0: any number. `folder`: for
    sockets. `tell` is called with the name of a pair and a line of its stderr.
    """

    def __init__(
        self,
        plans: Sequence[PairPlan],
        room: Memory,
        *,
        n_most: int,
        keep_alive: float,
        folder: Path,
        tell: Callable[[str, str], None],
    ) -> None:
        self.by_name = {plan.name: Pair(plan, keep_alive) for plan in plans}
        self.n_loads: Counter[str] = Counter()
        self._room, self._n_most, self._folder, self._tell = room, n_most, folder, tell
        self._processes: set[PairProcess] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds no references
        self._one_load = asyncio.Lock()
        self._news = asyncio.Event()
        self.is_stopping = False

    @asynccontextmanager
    async def used(self, pair: Pair, keep_alive: float | None) -> AsyncIterator[PairProcess]:
        """The process of a pair, which is loaded first; it stays within the block.

        keep_alive: seconds that it stays afterwards, from now on. Raises ApiError.
        """
        await self._until(lambda: not pair.is_leaving)
        pair.n_users += 1
        pair.keep_alive = pair.keep_alive if keep_alive is None else keep_alive
        try:
            while pair.process is None:
                self._check_open()
                if pair.n_failures > _N_RESTARTS:
                    raise _failed(pair, "POST /models/load tries again")
                if pair.loading is None:
                    pair.loading = self._start(self._load(pair))
                await asyncio.shield(pair.loading)  # it goes on for other requests
            yield pair.process
        finally:
            pair.n_users -= 1
            self._rest(pair)

    async def load(self, pair: Pair) -> None:
        """Load a pair, also one that has failed too often; returns at once. Raises ApiError."""
        self._check_open()
        if pair.process is None and pair.loading is None:
            pair.n_failures = 0
            pair.loading = self._start(self._load(pair))

    async def unload(self, pair: Pair) -> None:
        """End the process of a pair, once its requests have ended."""
        if pair.is_leaving:
            await self._until(lambda: not pair.is_leaving)
            return
        pair.is_leaving = True
        try:
            await self._until(lambda: not (pair.n_users or pair.loading))
            if (process := pair.process) is not None:
                await self._slots(pair, process, "save")
                pair.process = None
                self._processes.discard(process)  # so its end is no failure
                await asyncio.to_thread(process.end)
        finally:
            pair.is_leaving = False
            self._tell_waiting()

    async def broken(self, pair: Pair, process: PairProcess) -> ApiError:
        """The error of a request whose connection broke. Raises ApiError if the server stops."""
        if await process.has_ended():
            self._note_end(pair, process)
        else:
            pair.reason = "its connection broke"
        self._check_open()
        return _failed(pair, "the next request starts it again")

    def finish(self) -> None:
        """Refuse new requests, and those that wait; running ones continue."""
        self.is_stopping = True
        loaded = {pair.process for pair in self.by_name.values()}
        for process in self._processes - loaded:
            process.close()

    def abort(self) -> None:
        """Do the same, and end running requests, too."""
        self.is_stopping = True
        for process in self._processes:
            process.close()

    def close(self) -> None:
        """End all processes; called after the event loop has ended."""
        self.abort()
        for process in self._processes:
            process.end()

    def _check_open(self) -> None:
        if self.is_stopping:
            raise server_stopping()

    async def _load(self, pair: Pair) -> None:
        try:
            async with self._one_load:
                await self._make_room(pair)
                self._check_open()
                pair.progress = ""
                process = self._started(pair)
                self._processes.add(process)
                self._start(self._watch(pair, process))
                if not await process.answered:
                    raise await self.broken(pair, process)
                await self._slots(pair, process, "restore")
                if process not in self._processes:
                    raise _failed(pair, "the next request starts it again")
                pair.process = process
                self.n_loads[pair.name] += 1
        finally:
            pair.loading = None
            self._rest(pair)

    def _started(self, pair: Pair) -> PairProcess:
        try:
            return PairProcess(pair.plan.command_line, self._folder, partial(self._hear, pair))
        except OSError as error:
            pair.reason = f"no process could be started ({error.strerror})"
            raise _failed(pair, "try again later") from error

    async def _make_room(self, pair: Pair) -> None:
        """End other pairs until this one fits: idle ones first, of these the least recently used.

        A pair with texts under way gets no new ones until these have ended. Raises ApiError.
        """
        need, room = pair.plan.memory, self._room
        for what, n_needed, n_there in zip(("GPU memory", "memory"), need, room, strict=True):
            if n_needed > n_there:
                raise ApiError(
                    503,
                    f"{pair.name} needs {format_bytes(n_needed)} of {what}, as predicted, and "
                    f"there are {format_bytes(n_there)}: start the server with a smaller context "
                    "(-c), fewer --slots, or more memory (--models-ram)",
                    "server_error",
                    code="no_memory",
                )
        while True:
            loaded = [each for each in self.by_name.values() if each.process]
            rest = [room[i] - sum(each.plan.memory[i] for each in loaded) for i in range(2)]
            is_one_more = not self._n_most or len(loaded) < self._n_most
            if is_one_more and all(n <= left for n, left in zip(need, rest, strict=True)):
                return
            await self.unload(min(loaded, key=lambda each: (each.n_users > 0, each.used_at)))

    async def _watch(self, pair: Pair, process: PairProcess) -> None:
        await process.ended.wait()
        self._note_end(pair, process)

    def _note_end(self, pair: Pair, process: PairProcess) -> None:
        """A process has ended that nothing has asked to end, unless the server stops."""
        if process not in self._processes:
            return
        self._processes.discard(process)
        process.end()  # removes its socket
        if pair.process is process:
            pair.process = None
        if not self.is_stopping:
            pair.n_failures, pair.reason = pair.n_failures + 1, process.reason
            LOG.error("%s has ended: %s", pair.name, pair.reason)
        self._tell_waiting()

    async def _slots(self, pair: Pair, process: PairProcess, action: str) -> None:
        """Save the slots to files, or restore them; what cannot be saved is read again later."""
        if pair.plan.slot_folder is None:
            return
        name = re.sub(r"[^\w-]", "-", pair.name, flags=re.ASCII)[:100]
        for i in range(pair.plan.n_slots):
            body = json.dumps({"filename": f"{name}.{i}.slot"}).encode()
            target = f"/slots/{i}?action={action}".encode()
            with suppress(BROKEN):
                async with process.ask("POST", target, JSON_TYPE, body) as response:
                    await response.aread()

    def _rest(self, pair: Pair) -> None:
        """After a use: let a pair that is not used end in time."""
        pair.used_at = monotonic()
        self._tell_waiting()
        if pair.timer is not None:
            pair.timer.cancel()
        if pair.process and not pair.n_users and pair.keep_alive < math.inf:
            pair.expires_at = time.time() + pair.keep_alive
            loop = asyncio.get_running_loop()
            pair.timer = loop.call_later(pair.keep_alive, self._expire, pair)

    def _expire(self, pair: Pair) -> None:
        if not (pair.n_users or pair.loading):
            self._start(self.unload(pair))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it is read, although no request may wait any more

    def _hear(self, pair: Pair, line: str) -> None:
        pair.progress = line
        self._tell(pair.name, line)

    def _tell_waiting(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            await self._news.wait()


def _failed(pair: Pair, then: str) -> ApiError:
    times = f" {pair.n_failures} times in a row" if pair.n_failures > 1 else ""
    message = f"{pair.name} has ended{times}: {pair.reason}; {then}"
    return ApiError(503, message, "server_error", code="model_failed")
