"""Worker processes on the nodes of a Ray cluster. The only module that imports ray.

On a node, an actor starts the very process that a batch starts on its own machine, and hands on
what is said: who crashes is that process, never Ray's. What they say of prompts is not known here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ggufspec import __version__
from ggufspec.batch.pool import Event, LocalProcess
from ggufspec.batch.run import Start
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.errors import ClusterError, OptionError

LOCAL = "local"
_ADDRESS = re.compile(r"(ray://)?\[?(?P<host>[^/\s]+?)\]?:(?P<port>\d{1,5})/?")
_KNOCK_SECONDS = 5.0
_CONNECT_SECONDS = 30.0
_PATIENCE = 10.0  # seconds after which is said that a worker waits for room
_LAST_WORDS = 10.0  # seconds that a killed worker's end may take to be known here
_STORE_BYTES = 80 * 2**20  # Ray's least: what is said here is small
# Connecting to what is no Ray takes minutes, and cannot be interrupted: a process can.
_TRY = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"


def check(address: str) -> None:
    """Raises OptionError where this cannot be the address of a cluster, or Ray is not installed."""
    if address not in (LOCAL, "auto") and not _ADDRESS.fullmatch(address):
        raise OptionError(
            f"{address!r} is no address of a Ray cluster; give host:port, ray://host:port, auto, "
            "or local (which is what --cluster means at the end of the line)"
        )
    if importlib.util.find_spec("ray") is None:
        raise OptionError(
            "--cluster needs Ray, which is not installed; install it by "
            "`pip install 'ggufspec[ray]'`, or leave --cluster out"
        )


@contextlib.contextmanager
def cluster(
    address: str, *, n_workers: int, n_threads: int | None, n_gpus: float = 0, verbose: bool = False
) -> Iterator[Start]:
    """Within the block, workers can be started on a cluster; afterwards none of them is left.

    address: "local": a Ray of its own on this machine, ended with the block; "auto", "host:port",
    "ray://host:port": one that runs. n_threads: CPUs that each worker reserves; None: as many as
    let so many workers run at once. n_gpus: GPUs that each reserves; others it does not see.
    verbose: let through what workers write to stderr.

    Raises OptionError (see `check`) and ClusterError, the latter within a minute.
    """
    check(address)
    with _quiet(verbose) as ray, contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"log_to_driver": verbose, "logging_level": "CRITICAL"}
        if address == LOCAL:
            n_cpus = max(os.cpu_count() or 1, n_workers * (n_threads or 1))
            settings |= {
                "num_cpus": n_cpus,
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": stack.enter_context(_folder()),
            }
        else:
            address = (address == "auto" and os.environ.get("RAY_ADDRESS")) or address
            _try(address)
        stack.callback(ray.shutdown)
        try:
            ray.init(address, **settings)
        except (OSError, RuntimeError, ValueError) as error:
            raise _unusable(address, str(error)) from error
        yield partial(RemoteProcess, n_threads or threads_each(_cpus(ray), n_workers), n_gpus)


def threads_each(n_cpus: Sequence[int], n_workers: int) -> int:
    """The most CPUs that each of so many workers can have at once on nodes with so many; or 1."""
    most = max(n_cpus, default=1)
    fitting = (n for n in range(most, 0, -1) if sum(cpus // n for cpus in n_cpus) >= n_workers)
    return next(fitting, 1)


class RemoteProcess:
    """A worker's process on whichever node has room for it; `events` hears it."""

    def __init__(
        self,
        n_cpus: int,
        n_gpus: float,
        number: int,
        task: Mapping[str, Any],
        events: SimpleQueue[Event],
    ) -> None:
        import ray

        self.pid = 0
        self.node = ""
        self._why = ""
        self._needed = {"CPU": n_cpus, "GPU": n_gpus}
        self._actor = (
            ray.remote(_Host)
            .options(
                num_cpus=n_cpus,
                num_gpus=n_gpus,
                max_concurrency=3,  # it is spoken to while it listens
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        args = (number, _with_absolute_paths(task), events)
        self._ears = threading.Thread(target=self._listen, args=args, daemon=True)
        self._ears.start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Say something; one that is dead hears nothing, and is known to be dead by its event."""
        self._actor.tell.remote(dict(message))

    def kill(self) -> None:
        """Ray kills the actor's children with it."""
        import ray

        ray.kill(self._actor)

    def bury(self) -> None:
        """Kill it if need be, and give back what it has reserved."""
        self.kill()
        self._ears.join(_LAST_WORDS)

    def why(self) -> str:
        """Of one that is dead: how it died, and where."""
        return f"{self._why} (on node {self.node})" if self.node else self._why

    def _listen(self, number: int, task: dict[str, Any], events: SimpleQueue[Event]) -> None:
        import ray

        models = {task[role]: fingerprint(Path(task[role])) for role in _models(task)}
        try:
            begun = self._actor.begin.remote(number, task, models, self._needed["CPU"], __version__)
            if not ray.wait([begun], timeout=_PATIENCE)[0]:
                events.put(Event(number, {"waiting": _no_room(self._needed)}))
            self.node, self.pid = ray.get(begun)
            while "died" not in (message := ray.get(self._actor.hear.remote())):
                events.put(Event(number, message))
            self._why = message["died"]
        except ray.exceptions.RayError as error:
            what = "was lost" if self.node else "needs this ggufspec on its node, and was lost"
            self._why = f"its worker {what}: {_last_line(str(error))}"
        finally:
            events.put(Event(number, None))


class _Host:
    """What Ray runs on a node: has the process of a worker there, and hands on what is said."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._process: LocalProcess | None = None

    def begin(
        self,
        number: int,
        task: dict[str, Any],
        models: Mapping[str, str | None],
        n_cpus: int,
        version: str,
    ) -> tuple[str, int]:
        """Start it, with a share of the threads where nobody said how many; the node, and its pid.

        models: fingerprints of files, by path. Where something is missing here there is no process
        (pid 0), and the first that is heard of it says so.
        """
        node = socket.gethostname()
        refusal = _missing(node, models, version)
        if refusal is not None:
            self._events.put(Event(number, refusal))
            self._events.put(Event(number, None))
            return node, 0
        task = {**task, "n_workers": max(_cpus_here() // n_cpus, 1)}
        self._process = LocalProcess(number, task, self._events)
        return node, self._process.pid

    def tell(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        self._process.tell(message)

    def hear(self) -> dict[str, Any]:
        """Wait for what it says next; at last, why it `died`."""
        message = self._events.get().message
        if message is not None:
            return message
        return {
            "died": "its worker could not be started" if not self._process else self._process.why()
        }


def _missing(node: str, models: Mapping[str, str | None], version: str) -> dict[str, str] | None:
    """What keeps a worker from doing on this node what it would do elsewhere: a refusal."""
    if version != __version__:
        said = f"node {node} has ggufspec {__version__}, not {version}; install the same on all"
        return {"refused": said, "kind": "ClusterError"}
    for path, expected in models.items():
        found = fingerprint(Path(path))
        if found is None or found != expected:
            what = "cannot read" if found is None else "has another file as"
            said = f"node {node} {what} {path}; every node needs the same files by the same paths"
            return {"refused": said, "kind": "ModelError"}
    return None


def _models(task: Mapping[str, Any]) -> list[str]:
    return [role for role in ("target", "draft") if task[role]]


def _with_absolute_paths(task: Mapping[str, Any]) -> dict[str, Any]:
    """An actor has another working directory."""
    return {**task, **{role: os.path.abspath(task[role]) for role in _models(task)}}


def _cpus(ray: Any) -> list[int]:
    """Of each node that is alive."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def _cpus_here() -> int:
    import ray

    here = ray.get_runtime_context().get_node_id()
    return sum(int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["NodeID"] == here)


def _no_room(needed: Mapping[str, float]) -> str:
    """Of a worker that waits: what for."""
    import ray

    needed = {name: n for name, n in needed.items() if n}
    free = ray.available_resources()
    parts = [f"{n:g} {name}{'s' if n != 1 else ''}" for name, n in needed.items()]
    said = ", ".join(f"{free.get(name, 0):g} {name}s are free in all" for name in needed)
    text = f"waits for a node with {' and '.join(parts)} to spare; {said}"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= n for name, n in needed.items()) for node in nodes):
        return text
    return f"{text}, and no node has so many: give a smaller -t, or enlarge the cluster"


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[Any]:
    """The module ray, which within the block tells nobody who uses it, and prints on no stdout.

    What Ray itself has to say of a death is said better by the batch.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # what is told to the dead
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stderr if verbose else nowhere),
    ):
        import ray

        yield ray


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Of a Ray of our own: others do not find it, and nothing of it is left.

    Sockets lie in it, whose paths must be short.
    """
    folder = tempfile.mkdtemp(prefix="ggufspec-", dir="/tmp" if os.name == "posix" else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _try(address: str) -> None:
    """Raises ClusterError where there is no Ray that would have us."""
    place = _ADDRESS.fullmatch(address)
    if place is not None:
        try:
            at = (place["host"], int(place["port"]))
            socket.create_connection(at, timeout=_KNOCK_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _unusable(address, str(error)) from error
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRY, address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_CONNECT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise _unusable(address, f"no answer within {_CONNECT_SECONDS:g} seconds") from None
    if tried.returncode:
        raise _unusable(address, tried.stderr.decode(errors="replace"))


def _unusable(address: str, said: str) -> ClusterError:
    where = "on this machine" if address in (LOCAL, "auto") else f"at {address}"
    what = "could be started" if address == LOCAL else "answers"
    hint = "" if address == LOCAL else "one with tokens needs RAY_AUTH_MODE=token; "
    return ClusterError(
        f"no Ray that can be used {what} {where}: {_last_line(said)}; {hint}"
        "leave --cluster out to stay on this machine"
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return textwrap.shorten(lines[-1], 200, placeholder=" ...") if lines else "it does not say why"
