"""Batches on a real Ray cluster on this machine: the same texts, also after crashes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from threading import Timer
from typing import Any

import pytest
from batch.conftest import BatchSetup, killing, texts, together
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


def until(lines: Iterable[bytes], what: bytes) -> Iterator[bytes]:
    for line in lines:
        yield line
        if what in line:
            return


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def killing_the_actor(index: int) -> Callable[[BatchEvent], None]:
    """Once, kills the actor of the worker that begins this prompt."""
    left = [index]

    def report(event: BatchEvent) -> None:
        if event.what == "begun" and event.index in left:
            left.clear()
            os.kill(parent(event.pid), signal.SIGKILL)

    return report


# What it writes


def test_a_cluster_changes_no_text(
    batch: BatchSetup,
    start: StartWorker,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"n_draft": "auto", "max_tokens": 60}
    there = batch.run(
        texts(6), "there", settings=settings, n_workers=2, report=together(2), start=start
    )
    assert {record["worker"] for record in there} == {1, 2}
    assert {event.node for event in batch.events_of("ready")} == {socket.gethostname()}
    assert are_gone(*(event.pid for event in batch.events_of("ready")))
    monkeypatch.setenv("GGUFSPEC_CACHE", str(memory))
    here = batch.run(texts(6), "here", settings=settings)
    assert list(map(of_text, there)) == list(map(of_text, here))


# Crashes


def test_killed_workers_are_replaced_and_their_prompts_tried_again(
    batch: BatchSetup, start: StartWorker
) -> None:
    """The process of a worker, and the actor above one."""
    calm = batch.run(texts(4), "calm")
    kill_process, kill_actor = killing(1, n_times=1), killing_the_actor(2)

    def report(event: BatchEvent) -> None:
        kill_process(event)
        kill_actor(event)

    records = batch.run(texts(4), "killed", n_workers=2, report=report, start=start)
    assert list(map(of_text, records)) == list(map(of_text, calm))
    assert [record["attempts"] for record in records] == [1, 2, 2, 1]
    deaths = {event.index: event for event in batch.events_of("ended")}
    assert sorted(event.index or 0 for event in batch.events_of("ended")) == [1, 2]
    assert all(death.will_retry for death in deaths.values())
    assert "killed by SIGKILL" in deaths[1].reason
    assert deaths[2].reason.startswith("its worker was lost: ")
    assert all(death.reason.endswith(f"(on node {death.node})") for death in deaths.values())
    assert are_gone(*(event.pid for event in batch.events_of("begun")))


def test_a_prompt_fails_after_its_retries(batch: BatchSetup, start: StartWorker) -> None:
    records = batch.run(texts(3), report=killing(1), n_retries=1, start=start)
    assert records[1]["error"].startswith("its worker process was killed by SIGKILL")
    assert [record["error"] is None for record in records] == [True, False, True]
    assert [event.index for event in batch.events_of("begun")] == [0, 1, 1, 2]


def test_a_model_that_is_not_on_the_node(batch: BatchSetup, start: StartWorker) -> None:
    node = socket.gethostname()
    with pytest.raises(ModelError, match=rf"node {node} cannot read .*nowhere\.gguf"):
        batch.run(texts(2), start=start, target="/nowhere.gguf")


def test_models_have_absolute_paths_on_the_node(
    batch: BatchSetup, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has another working directory."""
    with pytest.raises(ModelError, match=rf"cannot read {re.escape(os.getcwd())}/draft\.gguf"):
        batch.run(texts(2), start=start, draft=batch.draft.name)
    monkeypatch.chdir(batch.draft.parent)
    (record,) = batch.run(texts(1), "found", start=start, draft=batch.draft.name)
    assert record["error"] is None


def test_adapters_are_looked_for_on_the_node(batch: BatchSetup, start: StartWorker) -> None:
    load = {"lora": [["/nowhere.gguf", 0.5]]}
    with pytest.raises(ModelError, match=r"cannot read /nowhere\.gguf; every node"):
        batch.run(texts(1), start=start, load=load)


def test_draft_texts_have_absolute_paths_on_the_node(batch: BatchSetup, start: StartWorker) -> None:
    wanted = re.escape(str(Path("nowhere.txt").absolute()))
    with pytest.raises(PromptError, match=rf"the draft text {wanted} cannot be read"):
        batch.run(texts(1), start=start, load={"draft_texts": ["nowhere.txt"]})


def test_another_model_on_the_node(
    batch: BatchSetup, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "fingerprint", lambda path: "another")
    with pytest.raises(ModelError, match=r"has a different file at .*target\.gguf"):
        batch.run(texts(2), start=start)


def test_another_ggufspec_on_the_node(
    batch: BatchSetup, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "__version__", "99")
    with pytest.raises(ClusterError, match="not 99; install the same everywhere"):
        batch.run(texts(2), start=start)


def test_when_the_command_is_killed_its_workers_go_and_the_cluster_stays(
    ray: Any, batch: BatchSetup, start: StartWorker
) -> None:
    prompts = batch.folder / "prompts.txt"
    prompts.write_text("hello\nhello hello\n")
    address = ray.get_runtime_context().gcs_address
    command = ["batch", prompts, "-m", batch.target, "-o", "/dev/null", "-t", "1", "-n", "4000"]
    command += ["--ignore-eos", "--num-processes", "2", "--cluster", address, "-v"]
    program = [sys.executable, "-m", "ggufspec", *map(str, command)]
    with subprocess.Popen(program, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        at_most = Timer(PATIENCE, process.kill)
        at_most.start()
        said = [line.decode() for line in until(process.stderr, b"begins prompt 2")]
        at_most.cancel()
        process.kill()
    pids = [int(pid) for pid in re.findall(r"\((\d+) on .* begins prompt", "".join(said))]
    assert len(pids) == 2, said
    assert are_gone(*pids)
    assert batch.run(texts(1), start=start)[0]["error"] is None


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


@pytest.mark.parametrize(
    ("n_cpus", "n_workers", "n_each"),
    [
        ([8], 1, 8),
        ([8], 3, 2),
        ([8, 8], 2, 8),
        ([8, 8], 3, 4),
        ([8, 2], 3, 2),
        ([0, 4], 2, 2),
        ([2], 5, 1),
        ([], 1, 1),
    ],
)
def test_workers_divide_the_nodes(n_cpus: list[int], n_workers: int, n_each: int) -> None:
    assert threads_each(n_cpus, n_workers) == n_each


# Addresses


@pytest.mark.parametrize("address", ["prompts.jsonl", "", "host", "http://host:1", "host:port"])
def test_invalid_addresses_are_refused(address: str) -> None:
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
