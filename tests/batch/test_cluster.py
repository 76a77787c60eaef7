"""Batches on a real Ray cluster on this machine: the same texts, also after crashes."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from batch.conftest import BatchSetup, texts, together
from patience import PATIENCE, comes_true, is_alive

from ggufspec.batch import cluster as cluster_module
from ggufspec.batch.cluster import RemoteProcess, check, cluster, threads_each
from ggufspec.batch.run import BatchEvent, StartWorker, WorkerEvent
from ggufspec.errors import ClusterError, ModelError, OptionError, PromptError

N_CPUS = 2


@pytest.fixture(scope="module")
def ray() -> Any:
    return pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of the nodes."""
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def start(ray: Any, memory: Path) -> Iterator[StartWorker]:
    """One Ray for all tests, with room for two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: N_CPUS)
        patch.setenv("GGUFSPEC_CACHE", str(memory))
        with cluster("local", n_workers=N_CPUS, n_threads=1, waiting_seconds=0.1) as start:
            yield start


def of_text(record: dict[str, Any]) -> list[Any]:
    """The fields that must not depend on workers and nodes."""
    names = ("index", "text", "seed", "n_rounds", "n_drafted", "n_accepted", "finish_reason")
    return [record[name] for name in names]


def are_gone(*pids: int) -> bool:
    return comes_true(lambda: not any(map(is_alive, pids)))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


# What it writes


def test_a_cluster_changes_no_text(
    batch: BatchSetup,
    start: StartWorker,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"n_draft": "auto", "max_tokens": 60}
    with monkeypatch.context() as patch:
        patch.chdir(batch.draft.parent)  # workers have another working directory
        there = batch.run(
            texts(6),
            "there",
            draft=batch.draft.name,
            settings=settings,
            n_workers=2,
            report=together(2),
            start=start,
        )
    assert {record["worker"] for record in there} == {1, 2}
    assert {event.node for event in batch.events_of("ready")} == {socket.gethostname()}
    assert are_gone(*(event.pid for event in batch.events_of("ready")))
    monkeypatch.setenv("GGUFSPEC_CACHE", str(memory))
    here = batch.run(texts(6), "here", settings=settings)
    assert list(map(of_text, there)) == list(map(of_text, here))


# Crashes


def test_a_lost_worker_is_replaced_and_its_prompt_tried_again(
    batch: BatchSetup, start: StartWorker
) -> None:
    """Its actor is killed, which ends its process."""
    left = [1]

    def report(event: BatchEvent) -> None:
        if event.what == "begun" and event.index in left:
            left.clear()
            os.kill(parent(event.pid), signal.SIGKILL)

    records = batch.run(texts(3), report=report, start=start)
    assert [(record["attempts"], record["error"]) for record in records] == [
        (1, None),
        (2, None),
        (1, None),
    ]
    (death,) = batch.events_of("ended")
    assert (death.index, death.will_retry) == (1, True)
    assert death.reason.startswith("its worker was lost: ")
    assert death.reason.endswith(f"(on node {death.node})")
    assert are_gone(*(event.pid for event in batch.events_of("begun")))


def test_files_that_are_not_on_the_node(batch: BatchSetup, start: StartWorker) -> None:
    """They have absolute paths there, since the worker has another working directory."""
    at = re.escape(str(Path("nowhere").absolute()))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"draft": "nowhere"}, ModelError, rf"node {socket.gethostname()} cannot read {at}"),
        ({"load": {"lora": [["/nowhere", 0.5]]}}, ModelError, "cannot read /nowhere; every node"),
        ({"load": {"draft_texts": ["nowhere"]}}, PromptError, rf"the draft text {at} cannot be"),
    ]
    for how, error, said in cases:
        with pytest.raises(error, match=said):
            batch.run(texts(1), start=start, **how)


def test_other_files_or_another_version_on_the_node(
    batch: BatchSetup, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module, "fingerprint", lambda path: "another")
        with pytest.raises(ModelError, match=r"has a different file at .*target\.gguf"):
            batch.run(texts(1), start=start)
    monkeypatch.setattr(cluster_module, "__version__", "99")
    with pytest.raises(ClusterError, match="not 99; install the same everywhere"):
        batch.run(texts(1), start=start)


# Room


def test_a_worker_without_room_waits_and_the_others_write(
    batch: BatchSetup, start: StartWorker
) -> None:
    """The two others are stopped until the third has reported that it waits."""
    held: list[int] = []

    def report(event: BatchEvent) -> None:
        waiting = {event.worker for event in batch.events_of("waiting")}
        waiting -= {event.worker for event in batch.events_of("ready")}
        if event.what == "begun" and len(batch.events_of("ready")) < 2:
            held.append(event.pid)
            os.kill(event.pid, signal.SIGSTOP)
        while held and len(batch.events_of("ready")) == 2 and 3 in waiting:
            os.kill(held.pop(), signal.SIGCONT)

    records = batch.run(texts(4), n_workers=3, report=report, start=start, timeout=PATIENCE)
    assert {record["worker"] for record in records} == {1, 2}
    (said,) = {event.reason for event in batch.events_of("waiting") if event.worker == 3}
    assert said == "waits for a node with 1 CPU free; the whole cluster has 0 CPUs free"


@pytest.mark.usefixtures("start")
def test_a_worker_too_large_for_any_node_is_reported_and_can_be_closed(batch: BatchSetup) -> None:
    events: SimpleQueue[WorkerEvent] = SimpleQueue()
    task = {"target": str(batch.target), "draft": None, "load": {}}
    process = RemoteProcess(64, 0.5, 0.1, 3, task, events)
    number, message = events.get(timeout=PATIENCE)
    assert number == 3
    assert message is not None
    assert message["waiting"].startswith("waits for a node with 64 CPUs and 0.5 GPUs free; ")
    assert "no node is large enough: give a smaller -t" in message["waiting"]
    process.close()
    assert events.get(timeout=PATIENCE) == (3, None)


def test_workers_divide_the_nodes() -> None:
    cases = [([8], 3, 2), ([8, 8], 2, 8), ([8, 8], 3, 4), ([8, 2], 3, 2), ([2], 5, 1), ([], 1, 1)]
    for n_cpus, n_workers, n_each in cases:
        assert threads_each(n_cpus, n_workers) == n_each


# Addresses


def test_invalid_addresses_are_refused() -> None:
    for address in ("prompts.jsonl", "", "http://host:1", "host:port"):
        with pytest.raises(OptionError, match="is not an address of a Ray cluster"):
            check(address)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'ggufspec\[ray\]'"):
        check("local")


@pytest.mark.usefixtures("ray")
def test_an_address_without_an_answer_is_refused() -> None:
    """At once where nothing listens, else after the time limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        wanted = f"at 127.0.0.1:{port}: no answer within 0.5 seconds; "
        with pytest.raises(ClusterError, match=wanted), _cluster(f"127.0.0.1:{port}"):
            pass
    with (
        pytest.raises(ClusterError, match=r"refused; .* leave --cluster out"),
        _cluster(f"127.0.0.1:{port}"),
    ):
        pass


def _cluster(address: str) -> AbstractContextManager[StartWorker]:
    return cluster(address, n_workers=1, n_threads=1, connect_seconds=0.5)
