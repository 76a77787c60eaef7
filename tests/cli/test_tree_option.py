"""--tree reaches every command that generates text, and is refused before the first prompt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
from cli.conftest import USAGE, Command

REASON = "it has recurrent layers, which read no trees"


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_mamba(tmp_path_factory.mktemp("models") / "recurrent.gguf")


@pytest.mark.parametrize(
    "args",
    [
        ("run", "-p", "hello"),
        ("compare", "-p", "hello"),
        ("bench", "-p", "hello", "--runs", "1", "-n", "4"),
        ("audit", "--draft-n", "2"),
        ("batch", "-o", "-"),
    ],
    ids=lambda args: args[0],
)
def test_a_target_that_reads_no_trees_is_refused_once(
    args: tuple[str, ...], command: Command, recurrent: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    name, *rest = args
    files = [prompts] if name == "batch" else []
    pair = ("-m", recurrent, "-md", recurrent, "-t", "1", "-c", "256", "--tree", "on")
    result = command(name, *files, *pair, *rest)
    assert result.code == USAGE
    assert result.err.count(REASON) == 1
    assert "use 'auto' or 'off' (--tree)" in result.err


def test_verbose_says_why_drafts_are_chains(program: Command, recurrent: Path) -> None:
    args = ("run", "-m", recurrent, "-md", recurrent, "-t", "1", "-p", "hello", "-n", "4", "-v")
    assert REASON in program(*args).err
    assert REASON not in program(*args, "--tree", "off").err


def test_a_benchmark_measures_several(command: Command, target: Path, draft: Path) -> None:
    args = ("bench", "-m", target, "-md", draft, "-t", "1", "-p", "hello", "-n", "4", "--runs", "1")
    result = command(*args, "--draft-n", "2", "--tree", "off,on", "--ignore-eos")
    assert result.code == 0
    assert "draft 2, tree off" in result.out
    assert "draft 2, tree on" in result.out


def test_branches_are_shown_and_counted(
    command: Command, program: Command, target: Path, draft: Path
) -> None:
    args = ("run", "-m", target, "-md", draft, "-t", "1", "-p", "hello", "-n", "24", "--seed", "1")
    tree = ("--draft-n", "6", "--tree", "on", "--ignore-eos")
    shown = program(*args, *tree, "-v").err
    assert re.search(r"^round \d+: drafted \d in \d branches, accepted \d", shown, re.MULTILINE)
    assert " -> accepted '" in shown
    document = command(*args, *tree, "--json").document
    assert document["settings"]["tree"] == "on"
    n_along = sum(document["drafted_by_position"])
    assert document["n_accepted"] <= n_along < document["n_drafted"]
    assert document["mean_depth"] == pytest.approx(n_along / document["drafted_by_position"][0])
