"""`ggufspec standin` writes a file that the other commands take, or says why not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.conftest import ERROR, INTERRUPTED, USAGE, Command
from patience import PATIENCE, comes_true
from small import small

from ggufspec import standin
from ggufspec.models.header import read_header
from ggufspec.models.named_shape import header_of_name
from ggufspec.models.quantization import header_of

LARGE = "70B-Q3_K_S"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on this machine, to stand in for."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    standin.write(standin.plan(header_of("model", small(), "Q4_K_M")), path)
    return path


def test_a_pair_of_stand_ins_is_run(command: Command, model: Path, tmp_path: Path) -> None:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    result = command("standin", "--like", model, target)
    assert (result.code, result.out) == (0, "")
    size = f"{target.stat().st_size / 1e6:.1f} MB"
    assert f"wrote {size} in" in result.err
    assert f"`ggufspec run --target {target}" in result.err
    result = command("standin", "--like", model, "--agreement", "0.5", draft)
    assert f"--draft {draft}" in result.err
    result = command(
        *("run", "-t", "1", "-m", target, "-md", draft, "--temp", "0", "-n", "150", "--json"),
        *("-c", "512", "--draft-n", "1", "-p", "Once"),
    )
    assert result.code == 0
    assert result.document["acceptance"] == pytest.approx(0.5, abs=0.06)


def test_a_registered_model_need_not_be_there(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert command("standin", "--like", "gpt-2:Q4_0", path).code == 0
    header = read_header(path)
    assert (header.architecture, header.n_vocab, header.n_layers) == ("gpt2", 50257, 12)
    assert header.n_tensor_bytes == header_of_name("gpt-2:Q4_0").n_tensor_bytes


def test_paths_that_are_not_to_be_written(command: Command, model: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.gguf"
    there.write_bytes(b"precious")
    for path, told in (
        (there, "exists: name another"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "model.gguf", "does not exist: create it first"),
        (model, "is the source model itself"),
        (Path("/dev/null"), "not a regular file"),
    ):
        result = command("standin", "--like", model, path)
        assert result.code == USAGE
        assert told in result.err
    assert there.read_bytes() == b"precious"
    assert command("standin", "--like", model, "--force", model).code == USAGE
    assert command("standin", "--like", model, "--force", there).code == 0
    assert read_header(there).n_layers == 3


def test_room_is_asked_for_first(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2_000_000_000))
    result = command("standin", "--like", LARGE, tmp_path / "model.gguf")
    assert result.code == ERROR
    assert "not enough space. It needs 31 GB, 2.0 GB are free there" in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of Unix")
def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    process = subprocess.Popen(
        [sys.executable, "-m", "ggufspec", "standin", "--like", LARGE, path],
        stderr=subprocess.PIPE,
    )
    assert comes_true(lambda: any(part.stat().st_size for part in tmp_path.iterdir()))
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == INTERRUPTED
    assert err.strip() == b"ggufspec: interrupted"
    assert not list(tmp_path.iterdir())


def test_a_mixture_is_shown_with_its_experts(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "target.gguf"
    standin.write(standin.plan(header_of("m", small("glm4moe"), "Q4_K_M")), path)
    shown = command("models", "show", path).out
    assert "3 of 16 for each token: passes over 2, 4 and 8 tokens read" in shown
