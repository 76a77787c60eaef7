"""Batches over a real Ray on this machine: the same texts, whoever dies."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from batch.conftest import Setting, killing, texts, together

from ggufspec.batch import cluster as cluster_module
from ggufspec.batch.cluster import RemoteProcess, check, cluster, threads_each
from ggufspec.batch.pool import Event
from ggufspec.batch.run import News, Start
from ggufspec.errors import ClusterError, ModelError, OptionError

N_CPUS = 2


@pytest.fixture(scope="module")
def ray() -> Any:
    return pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the nodes remember what they measured."""
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def start(ray: Any, memory: Path) -> Iterator[Start]:
    """One Ray for all, with room for two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: N_CPUS)
        patch.setenv("GGUFSPEC_CACHE", str(memory))
        with cluster("local", n_workers=N_CPUS, n_threads=1) as start:
            yield start


def of_text(record: dict[str, Any]) -> list[Any]:
    """What no number of workers may change, nor where they are."""
    names = ("index", "text", "seed", "n_rounds", "n_drafted", "n_accepted", "finish_reason")
    return [record[name] for name in names]


def wait_until_gone(*pids: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "somebody was left behind"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """And no zombie that nobody has buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(lines: Iterable[bytes], what: bytes) -> Iterator[bytes]:
    for line in lines:
        yield line
        if what in line:
            return


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def killing_the_actor(index: int) -> Callable[[News], None]:
    """Once, whoever has begun this prompt loses the actor above it."""
    left = [index]

    def hear(news: News) -> None:
        if news.what == "begun" and news.index in left:
            left.clear()
            os.kill(parent(news.pid), signal.SIGKILL)

    return hear


# What it writes


def test_a_cluster_changes_no_text(
    batch: Setting,
    start: Start,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"n_draft": "auto", "max_tokens": 60}
    there = batch.run(
        texts(6), "there", settings=settings, n_workers=2, heard=together(2), start=start
    )
    assert {record["worker"] for record in there} == {1, 2}
    assert {news.node for news in batch.told("ready")} == {socket.gethostname()}
    wait_until_gone(*(news.pid for news in batch.told("ready")))
    monkeypatch.setenv("GGUFSPEC_CACHE", str(memory))
    here = batch.run(texts(6), "here", settings=settings)
    assert list(map(of_text, there)) == list(map(of_text, here))


# Who dies


def test_who_is_killed_is_replaced_and_its_prompt_tried_again(batch: Setting, start: Start) -> None:
    """The process of a worker, and the actor above one."""
    calm = batch.run(texts(4), "calm")
    kill_process, kill_actor = killing(1, n_times=1), killing_the_actor(2)

    def hear(news: News) -> None:
        kill_process(news)
        kill_actor(news)

    records = batch.run(texts(4), "killed", n_workers=2, heard=hear, start=start)
    assert list(map(of_text, records)) == list(map(of_text, calm))
    assert [record["attempts"] for record in records] == [1, 2, 2, 1]
    deaths = {news.index: news for news in batch.told("died")}
    assert sorted(news.index or 0 for news in batch.told("died")) == [1, 2]
    assert all(death.again for death in deaths.values())
    assert "killed by SIGKILL" in deaths[1].why
    assert deaths[2].why.startswith("its worker was lost: ")
    assert all(death.why.endswith(f"(on node {death.node})") for death in deaths.values())
    wait_until_gone(*(news.pid for news in batch.told("begun")))


def test_a_prompt_that_keeps_killing_is_recorded(batch: Setting, start: Start) -> None:
    records = batch.run(texts(3), heard=killing(1), n_retries=1, start=start)
    assert records[1]["error"].startswith("its worker was killed by SIGKILL")
    assert [record["error"] is None for record in records] == [True, False, True]
    assert [news.index for news in batch.told("begun")] == [0, 1, 1, 2]


def test_a_model_that_is_not_on_the_node(batch: Setting, start: Start) -> None:
    node = socket.gethostname()
    with pytest.raises(ModelError, match=rf"node {node} cannot read .*nowhere\.gguf"):
        batch.run(texts(2), start=start, target="/nowhere.gguf")


def test_another_model_on_the_node(
    batch: Setting, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "fingerprint", lambda path: "another")
    with pytest.raises(ModelError, match=r"has another file as .*target\.gguf"):
        batch.run(texts(2), start=start)


def test_another_ggufspec_on_the_node(
    batch: Setting, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "__version__", "99")
    with pytest.raises(ClusterError, match="not 99; install the same on all"):
        batch.run(texts(2), start=start)


def test_when_the_command_is_killed_its_workers_go_and_the_cluster_stays(
    ray: Any, batch: Setting, start: Start
) -> None:
    prompts = batch.folder / "prompts.txt"
    prompts.write_text("hello\nhello hello\n")
    address = ray.get_runtime_context().gcs_address
    command = ["batch", prompts, "-m", batch.target, "-o", "/dev/null", "-t", "1", "-n", "4000"]
    command += ["--ignore-eos", "--num-processes", "2", "--cluster", address, "-v"]
    program = [sys.executable, "-m", "ggufspec", *map(str, command)]
    with subprocess.Popen(program, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = [line.decode() for line in until(process.stderr, b"begins prompt 2")]
        process.kill()
    pids = [int(pid) for pid in re.findall(r"\((\d+) on .* begins prompt", "".join(said))]
    assert len(pids) == 2, said
    wait_until_gone(*pids)
    assert batch.run(texts(1), start=start)[0]["error"] is None


# Room


def test_who_finds_no_room_waits_and_the_others_write(
    batch: Setting, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes before the third has said that it waits."""
    monkeypatch.setattr(cluster_module, "_PATIENCE", 0.1)
    held: list[int] = []

    def hear(news: News) -> None:
        waiting = {news.worker for news in batch.told("waiting")}
        waiting -= {news.worker for news in batch.told("ready")}
        if news.what == "begun" and len(batch.told("ready")) < 2:
            held.append(news.pid)
            os.kill(news.pid, signal.SIGSTOP)
        while held and len(batch.told("ready")) == 2 and 3 in waiting:
            os.kill(held.pop(), signal.SIGCONT)

    records = batch.run(texts(4), n_workers=3, heard=hear, start=start, timeout=20)
    assert {record["worker"] for record in records} == {1, 2}
    (said,) = {news.why for news in batch.told("waiting") if news.worker == 3}
    assert said == "waits for a node with 1 CPU to spare; 0 CPUs are free in all"


@pytest.mark.usefixtures("start")
def test_what_no_node_has_is_said(batch: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who waits in vain can be stopped."""
    monkeypatch.setattr(cluster_module, "_PATIENCE", 0.1)
    events: SimpleQueue[Event] = SimpleQueue()
    task = {"target": str(batch.target), "draft": None}
    process = RemoteProcess(64, 0.5, 3, task, events)
    number, message = events.get(timeout=20)
    assert number == 3
    assert message is not None
    assert message["waiting"].startswith("waits for a node with 64 CPUs and 0.5 GPUs to spare; ")
    assert "no node has so many: give a smaller -t" in message["waiting"]
    process.bury()
    assert events.get(timeout=20) == (3, None)


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
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(OptionError, match="is no address of a Ray cluster"):
        check(address)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'ggufspec\[ray\]'"):
        check("local")


@pytest.mark.usefixtures("ray")
def test_where_nobody_answers() -> None:
    """At once where nothing listens, else when it has had its time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster_module, "_CONNECT_SECONDS", 0.5)
            wanted = f"at 127.0.0.1:{port}: no answer within 0.5 seconds; "
            with pytest.raises(ClusterError, match=wanted), _cluster(f"127.0.0.1:{port}"):
                pass
    with (
        pytest.raises(ClusterError, match=r"refused; .* leave --cluster out"),
        _cluster(f"127.0.0.1:{port}"),
    ):
        pass


def _cluster(address: str) -> AbstractContextManager[Start]:
    return cluster(address, n_workers=1, n_threads=1)
