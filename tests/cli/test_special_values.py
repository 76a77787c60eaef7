"""Values with a special meaning in llama.cpp mean the same here: `-n 0`, `-n -2`, `--seed -1`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli.conftest import Command

from ggufspec.llama.devices import n_threads_default

N_CTX = 64


def test_a_limit_of_0_only_processes_the_prompt(run: Command, target: Path, tmp_path: Path) -> None:
    """The prompt cache then has all of it, for a later text."""
    prompt, cache = "hello world, " * 8, tmp_path / "cache"
    args = ("-m", target, "-p", prompt, "--prompt-cache", cache)
    result = run(*args, "-n", "0", "--json")
    assert (result.code, result.document["text"], result.document["tokens"]) == (0, "", [])
    assert result.document["finish_reason"] == "length"
    later = run(*args, "-n", "4", "--json").document
    assert later["n_prompt_reused"] == later["n_prompt"] - 1
    assert len(later["tokens"]) == 4
    shown = run("-m", target, "-p", prompt, "-n", "0")
    assert (shown.code, shown.out.strip()) == (0, "")
    assert "0 tokens at" in shown.err


def test_a_limit_of_minus_2_ends_where_the_context_does(run: Command, target: Path) -> None:
    args = ("-m", target, "-p", "hi", "-c", str(N_CTX), "--ignore-eos", "--json")
    plain = run(*args, "-n", "-1").document
    for more in ((), ("--context-shift",)):
        found = run(*args, "-n", "-2", *more).document
        assert found["n_prompt"] + len(found["tokens"]) == N_CTX
        assert found["finish_reason"] == plain["finish_reason"] == "length"


def test_a_seed_of_minus_1_is_a_random_one(run: Command, target: Path) -> None:
    args = ("-m", target, "-p", "hi", "-n", "1", "--seed", "-1", "--json")
    seeds = {run(*args).document["settings"]["seed"] for _ in range(2)}
    assert len(seeds) == 2
    assert min(seeds) >= 0


def test_more_threads_than_cores_are_reported_in_one_line(command: Command, target: Path) -> None:
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args = ("run", "-m", target, "-p", "hi", "-n", "1")
    assert "threads" not in command(*args, "-t", str(n_cores)).err
    note, _ = command(*args, "-t", str((n_cores or 1) + 1)).err.splitlines()
    assert f"{(n_cores or 1) + 1} threads on {n_cores} core" in note
    assert f"use at most {n_cores} (n_threads, " in note


def test_the_number_of_threads_may_be_chosen(command: Command, target: Path) -> None:
    args = ("run", "-m", target, "-p", "hi", "-n", "2", "--json")
    (used,) = json.loads(command(*args, "-t", "-1").out)["threads"].values()
    assert set(used) <= {str(n) for n in range(1, n_threads_default() + 1)}
    assert sum(used.values()) > 0


def test_the_variable_of_openmp_limits_the_threads(
    command: Command, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    args = ("run", "-m", target, "-p", "hi", "-n", "2", "--json")
    assert set(json.loads(command(*args).out)["threads"]["target"]) == {"1"}
