"""`ggufspec audit`: a report on stdout, the verdict in the exit code, help for bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench.audit.conftest import lossy
from cli.conftest import USAGE, Command, check_interrupted

SAME, DIFFERENT = 0, 1
QUICK = ("--runs", "6", "-n", "10", "--seed", "0", "--tree", "off")


@pytest.fixture
def audit(command: Command, target: Path, draft: Path) -> Command:
    pair = ("-m", target, "-md", draft, "-t", "1")
    return lambda *args, **how: command("audit", *pair, *QUICK, *args, **how)


def test_no_difference_is_exit_code_0_and_a_report(audit: Command) -> None:
    result = audit()
    assert (result.code, result.err) == (SAME, "")
    for part in (
        "target: batches vs. single tokens",
        "rule traversal vs. target",
        "mean shift, by draft/target ratio",
        "energy distance of whole texts",
        "99 % interval",
        "6 texts of each kind, 60 and 60 tokens;",
        "Temperature 0: 8 of 8 texts are identical.",
    ):
        assert part in result.out
    assert result.out.splitlines()[-1].startswith("No difference was found; a mean shift of 0.2")


def test_a_difference_is_exit_code_1_and_says_which(
    audit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.decoding.verify.rejection.verify", lossy(1.3))
    result = audit("--verify", "rejection")
    assert (result.code, result.err) == (DIFFERENT, "")
    assert result.out.splitlines()[-1].startswith(
        "A difference was found: the next-token distribution of rule rejection is off by "
    )


def test_at_temperature_0(audit: Command) -> None:
    result = audit("--temp", "0")
    assert result.code == SAME
    assert result.out.splitlines()[-1].endswith(
        "6 of 6 greedy texts are identical, 0 diverge at near-ties."
    )
    assert "Sampled texts" not in result.out


def test_the_document(audit: Command, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"turns": ["world", "again"]}\n')
    result = audit("--json", "--prompts", prompts, "--alpha", "0.05")
    document = result.document
    assert (result.code, result.err) == (SAME, "")
    assert document["n_prompts"] == 2
    assert document["differences"] == []
    assert document["verdict"].startswith("No difference was found")
    assert len(document["sequences"]["tests"]) == 5
    assert {"name", "effect", "low", "high", "p", "p_holm"} == set(
        document["sequences"]["tests"][0]
    )
    assert document["settings"]["seed"] == 0
    assert document["settings"]["prompts"] == str(prompts)
    assert document["settings"]["alpha"] == document["sequences"]["alpha"] == 0.05
    assert document["greedy"] == {"n_texts": 2, "near_tie": 0.05, "divergences": []}
    assert "ggufspec" in document["versions"]


def test_without_scipy_it_says_how_to_install_it(target: Path, draft: Path) -> None:
    script = "import sys; sys.modules['scipy'] = None\nfrom ggufspec.__main__ import main; main()"
    command = [sys.executable, "-c", script, "audit", "-m", str(target), "-md", str(draft)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert "pip install 'ggufspec[audit]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_it_without_a_traceback(target: Path, draft: Path) -> None:
    arguments = ["audit", "-m", target, "-md", draft, "-t", "1", "-v", "--runs", "100000"]
    check_interrupted(arguments)
