"""Worker processes on the nodes of a Ray cluster; the only module that imports ray."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ggufspec import __version__
from ggufspec.batch.run import LocalProcess, StartWorker, WorkerEvent, last_line
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.errors import ClusterError, OptionError
from ggufspec.models.head_facts import MTP

LOCAL = "local"
_ADDRESS = re.compile(r"(ray://)?\[?(?P<host>[^/\s]+?)\]?:(?P<port>\d{1,5})/?")
_SOCKET_SECONDS = 5.0
_CONNECT_SECONDS = 30.0
_WAITING_SECONDS = 10.0  # time until a worker that waits for a node is reported
_END_SECONDS = 10.0  # time to wait for the last event of a killed worker
_NO_REASON = "no reason was given"
_SHORT_FOLDER = "/tmp" if os.name == "posix" else None  # paths of Ray's sockets must be short
_STORE_BYTES = 80 * 2**20  # Ray's minimum; messages are small
# Connecting to a server other than Ray takes minutes and can only be stopped in a child process.
_CONNECT = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"


def check(address: str) -> None:
    """Raise OptionError if `address` is not the address of a cluster, or Ray is not installed."""
    if address not in (LOCAL, "auto") and not _ADDRESS.fullmatch(address):
        raise OptionError(
            f"{address!r} is not an address of a Ray cluster; give host:port, ray://host:port, "
            "auto or local (--cluster without a value means local; put it last)"
        )
    if importlib.util.find_spec("ray") is None:
        raise OptionError(
            "--cluster needs Ray, which is not installed; run `pip install 'ggufspec[ray]'`, or "
            "leave --cluster out"
        )


@contextlib.contextmanager
def cluster(
    address: str,
    *,
    n_workers: int,
    n_threads: int | None,
    n_gpus: float = 0,
    verbose: bool = False,
    connect_seconds: float = _CONNECT_SECONDS,
    waiting_seconds: float = _WAITING_SECONDS,
) -> Iterator[StartWorker]:
    """A function that starts workers on a cluster; they end with the block.

    `address`: "local" starts Ray on this machine and ends it with the block; "auto", "host:port"
    and "ray://host:port" connect to a cluster. `n_threads`, `n_gpus`: CPUs and GPUs that each
    worker reserves; it can use no other GPUs. None: the most CPUs with which all run at once.
    `verbose`: show stderr of workers. Raises OptionError, and ClusterError within a minute.
    """
    check(address)
    with _quiet(verbose) as ray, contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"log_to_driver": verbose, "logging_level": "CRITICAL"}
        if address == LOCAL:
            n_cpus = max(os.cpu_count() or 1, n_workers * (n_threads or 1))
            folder = tempfile.TemporaryDirectory(
                prefix="ggufspec-", dir=_SHORT_FOLDER, ignore_cleanup_errors=True
            )
            settings |= {
                "num_cpus": n_cpus,
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": stack.enter_context(folder),
            }
        else:
            address = (address == "auto" and os.environ.get("RAY_ADDRESS")) or address
            _check_connection(address, connect_seconds)
        stack.callback(ray.shutdown)
        try:
            ray.init(address, **settings)
        except (OSError, RuntimeError, ValueError) as error:
            raise _cluster_error(address, str(error)) from error
        n_each = [int(node.get("CPU", 0)) for node in _nodes(ray).values()]
        n_cpus = n_threads or threads_each(n_each, n_workers)
        yield partial(RemoteProcess, n_cpus, n_gpus, waiting_seconds)


def threads_each(n_cpus: Sequence[int], n_workers: int) -> int:
    """The most CPUs, at least 1, with which all workers can run at once on nodes with `n_cpus`."""
    most = max(n_cpus, default=1)
    fitting = (n for n in range(most, 0, -1) if sum(cpus // n for cpus in n_cpus) >= n_workers)
    return next(fitting, 1)


class RemoteProcess:
    def __init__(
        self,
        n_cpus: int,
        n_gpus: float,
        waiting_seconds: float,
        number: int,
        task: Mapping[str, Any],
        events: SimpleQueue[WorkerEvent],
    ) -> None:
        import ray

        self.pid = 0
        self.node = ""
        self._end_reason = ""
        self._needed = {"CPU": n_cpus, "GPU": n_gpus}
        self._waiting_seconds = waiting_seconds
        needs: dict[str, Any] = {"num_cpus": n_cpus, "num_gpus": n_gpus}
        # Three calls at once: `send` runs while `receive` waits.
        actor = ray.remote(max_concurrency=3, scheduling_strategy="SPREAD", **needs)(_WorkerActor)
        self._actor = actor.remote()
        task = {**_absolute(task), "load": _absolute(task["load"])}
        args = (number, task, events)
        self._reader = threading.Thread(target=self._read, args=args, daemon=True)
        self._reader.start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._actor.send.remote(dict(message))

    def kill(self) -> None:
        """End the actor at once; Ray ends its child process too."""
        import ray

        ray.kill(self._actor)

    def close(self) -> None:
        self.kill()
        self._reader.join(_END_SECONDS)

    def end_reason(self) -> str:
        return f"{self._end_reason} (on node {self.node})" if self.node else self._end_reason

    def _read(self, number: int, task: dict[str, Any], events: SimpleQueue[WorkerEvent]) -> None:
        import ray

        models = {path: fingerprint(Path(path)) for path in _models(task)}
        try:
            started = self._actor.start.remote(
                number, task, models, self._needed["CPU"], __version__
            )
            if not ray.wait([started], timeout=self._waiting_seconds)[0]:
                events.put(WorkerEvent(number, {"waiting": _waiting_reason(self._needed)}))
            self.node, self.pid = ray.get(started)
            while "ended" not in (message := ray.get(self._actor.receive.remote())):
                events.put(WorkerEvent(number, message))
            self._end_reason = message["ended"]
        except ray.exceptions.RayError as error:
            hint = "" if self.node else f" (is ggufspec {__version__} installed on its node?)"
            self._end_reason = f"its worker was lost{hint}: {last_line(str(error)) or _NO_REASON}"
        finally:
            events.put(WorkerEvent(number, None))


class _WorkerActor:
    """Starts a worker's process on a node. If it crashes, Ray's own process does not."""

    def __init__(self) -> None:
        self._events: SimpleQueue[WorkerEvent] = SimpleQueue()
        self._process: LocalProcess | None = None

    def start(
        self, number: int, task: dict[str, Any], models: dict[str, str], n_cpus: int, version: str
    ) -> tuple[str, int]:
        """Start the process, with its share of the node's CPUs as threads; returns (node, pid).

        `models`: fingerprints of the files, by path. If this node lacks a file or has another
        version, no process starts: pid is 0, and the first message is the refusal.
        """
        import ray

        node = socket.gethostname()
        if (refusal := _missing(node, models, version)) is not None:
            self._events.put(WorkerEvent(number, refusal))
            self._events.put(WorkerEvent(number, None))
            return node, 0
        here = _nodes(ray)[ray.get_runtime_context().get_node_id()]
        task = {**task, "n_workers": max(int(here.get("CPU", 0)) // n_cpus, 1)}
        self._process = LocalProcess(number, task, self._events)
        return node, self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        self._process.send(message)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message; the last one is {"ended": reason}."""
        if (message := self._events.get().message) is not None:
            return message
        if self._process is None:
            return {"ended": "its worker could not be started"}
        return {"ended": self._process.end_reason()}


def _missing(node: str, models: Mapping[str, str | None], version: str) -> dict[str, str] | None:
    """The refusal message if this node has another ggufspec version or other model files."""
    if version != __version__:
        said = f"node {node} has ggufspec {__version__}, not {version}; install the same everywhere"
        return {"refused": said, "kind": "ClusterError"}
    for path, expected in models.items():
        found = fingerprint(Path(path))
        if found is None or found != expected:
            what = "cannot read" if found is None else "has a different file at"
            said = f"node {node} {what} {path}; every node needs the same files at the same paths"
            return {"refused": said, "kind": "ModelError"}
    return None


def _absolute(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with absolute paths, as an actor has another working directory."""
    made = {**settings, **{role: os.path.abspath(at) for role, at in _given(settings).items()}}
    if texts := settings.get("draft_texts"):
        made["draft_texts"] = [os.path.abspath(path) for path in texts]
    return made


def _models(task: Mapping[str, Any]) -> list[str]:
    paths = [path for settings in (task, task["load"]) for path in _given(settings).values()]
    adapters = (task["load"].get(name) or () for name in ("lora", "lora_draft"))
    return [*paths, *(path for each in adapters for path, _ in each)]


def _given(settings: Mapping[str, Any]) -> dict[str, str]:
    roles = ("target", "draft", "mmproj", "mmproj_draft")
    return {role: settings[role] for role in roles if settings.get(role) not in (None, MTP)}


def _nodes(ray: Any) -> dict[str, Mapping[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _waiting_reason(needed: Mapping[str, float]) -> str:
    import ray

    needed = {name: n for name, n in needed.items() if n}
    free = ray.available_resources()
    wanted = " and ".join(f"{n:g} {name}{'s' if n != 1 else ''}" for name, n in needed.items())
    found = ", ".join(f"{free.get(name, 0):g} {name}s" for name in needed)
    text = f"waits for a node with {wanted} free; the whole cluster has {found} free"
    for node in _nodes(ray).values():
        if all(node.get(name, 0) >= n for name, n in needed.items()):
            return text
    return f"{text}, and no node is large enough: give a smaller -t, or add a larger node"


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[Any]:
    """The module ray, without usage statistics; in the block it prints nothing to stdout."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # messages to ended actors
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stderr if verbose else nowhere),
    ):
        import ray

        yield ray


def _check_connection(address: str, seconds: float) -> None:
    """Raise ClusterError if no Ray cluster accepts a connection at `address`."""
    if (match := _ADDRESS.fullmatch(address)) is not None:
        try:
            endpoint = (match["host"], int(match["port"]))
            socket.create_connection(endpoint, timeout=_SOCKET_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _cluster_error(address, str(error)) from error
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _CONNECT, address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise _cluster_error(address, f"no answer within {seconds:g} seconds") from None
    if tried.returncode:
        raise _cluster_error(address, tried.stderr.decode(errors="replace"))


def _cluster_error(address: str, said: str) -> ClusterError:
    reason = last_line(said) or _NO_REASON
    if address == LOCAL:
        return ClusterError(
            f"cannot start Ray on this machine: {reason}; leave --cluster out to run without it"
        )
    where = "on this machine" if address == "auto" else f"at {address}"
    return ClusterError(
        f"cannot use a Ray cluster {where}: {reason}; if it requires tokens, set "
        "RAY_AUTH_MODE=token; leave --cluster out to run on this machine"
    )
