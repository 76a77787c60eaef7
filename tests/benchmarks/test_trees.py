"""The benchmarks of trees write texts with a real pair, and print a row for each cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import stated_costs, tokens_per_pass, when_trees_pay

SHORT = ["--runs", "2", "--tokens", "16", "--temp", "0.7"]


def test_tokens_per_pass_of_chains_and_trees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cells.jsonl"
    tokens_per_pass.main([*SHORT, "--draft-n", "4", "-o", str(output)])
    head, row = capsys.readouterr().out.splitlines()
    assert "tree, traversal" in head
    assert row.split()[:2] == ["0.70", "4"]
    cells = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(cells) == 2 * len(tokens_per_pass.RULES)
    assert all(1 <= each <= 5 for cell in cells for each in cell["tokens_per_pass"])


def test_speed_at_stated_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cells.jsonl"
    stated_costs.main([*SHORT, "--costs", "flat-0.1", "-o", str(output)])
    _, row = capsys.readouterr().out.splitlines()
    assert row.startswith("flat-0.1")
    cells = [json.loads(line) for line in output.read_text().splitlines()]
    assert [cell["contender"] for cell in cells] == ["chains", "trees"]
    # A token takes a pass at most, and no draft step is free.
    assert all(0.9 < cell["speed"] < 1 / 0.1 for cell in cells)


def test_when_trees_pay(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--first", "0.5", "--second", "0.5", "--eight", "1.05", "--tokens", "100"]
    when_trees_pay.main(short)
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("50% ")
    assert row.endswith("%")
