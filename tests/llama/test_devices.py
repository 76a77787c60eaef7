"""The number of threads heeds what the operating system allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ggufspec.llama import devices
from ggufspec.llama.devices import cpu_quota, fast_cores, free_memory, n_threads_default

STAT = "anon 7\nfile 900\ninactive_file 200\nactive_file 100\nslab 4\n"  # shared memory is in file


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "own", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 2.5),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 50000"}, "0::/a/b\n", 1.0),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/", None),
        ({"cpu.max": "odd"}, "0::/\n", None),
    ],
)
def test_the_quota_is_the_least_of_all_groups(
    files: dict[str, str], own: str, quota: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert cpu_quota(tmp_path / "groups", write(tmp_path / "own", own)) == quota


@pytest.mark.parametrize(
    ("files", "n_free"),
    [
        ({"a/memory.max": "max", "a/memory.current": "1"}, None),
        ({"a/b/memory.max": "900\n", "a/b/memory.current": "500\n"}, 400),
        ({"a/memory.max": "900", "a/memory.current": "700", "a/b/memory.max": "max"}, 200),
        ({"a/memory.max": "900", "a/memory.current": "901"}, 0),
        ({"a/b/memory.max": "900", "a/b/memory.current": "800", "a/b/memory.stat": STAT}, 400),
    ],
)
def test_free_memory_is_the_least_of_all_groups(
    files: dict[str, str], n_free: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    found = free_memory(tmp_path / "groups", write(tmp_path / "own", "0::/a/b\n"))
    assert found is not None
    assert found == n_free or (n_free is None and found > 2**20)


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3\n", {0, 1, 2, 3}), ("0,2,4-5\n", {0, 2, 4, 5}), ("", set())]
)
def test_performance_cores_are_listed(text: str, cores: set[int], tmp_path: Path) -> None:
    assert fast_cores(write(tmp_path / "cpus", text)) == cores
    assert fast_cores(tmp_path / "none") == set()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="has no affinity")
@pytest.mark.parametrize(
    ("quota", "fast", "n_threads"),
    [
        (None, set(), 8),
        (2.5, set(), 2),
        (0.3, set(), 1),
        (None, {0, 1, 2}, 3),
        (2.0, {0, 1, 2}, 2),
        (None, {90, 91}, 8),
    ],
)
def test_threads_are_no_more_than_the_quota_and_the_performance_cores(
    quota: float | None, fast: set[int], n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.setattr(Path, "read_text", lambda path, **_: f"{path}\n")  # each has its own core
    monkeypatch.setattr(devices, "cpu_quota", lambda: quota)
    monkeypatch.setattr(devices, "fast_cores", lambda: fast)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert n_threads_default() == n_threads


def test_macos_tells_its_fast_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    printed = {"hw.perflevel0.physicalcpu": "", "hw.physicalcpu": "6\n"}
    answer = lambda command, **_: subprocess.CompletedProcess(command, 0, printed[command[-1]])  # noqa: E731
    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert n_threads_default() == 6
