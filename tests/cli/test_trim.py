"""`ggufspec trim` writes a draft with a part of a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import USAGE, Command
from patience import PATIENCE, comes_true

from ggufspec.models.header import read_header
from ggufspec.models.trim_facts import trim_of
from ggufspec.standin.embedded import embedded_draft, embedded_target


@pytest.fixture
def trim(command: Command) -> Command:
    return lambda *args, **how: command("trim", *args, **how)


def test_a_model_becomes_its_own_draft(trim: Command, command: Command, tmp_path: Path) -> None:
    path, target = tmp_path / "draft.gguf", embedded_target()
    result = trim(target, "--vocab", "1024", "--layers", "0,2-3,5", "-o", path)
    assert (result.code, result.out) == (0, ""), result.err
    assert f"use it with `ggufspec run --target MODEL --draft {path}`" in result.err
    header = read_header(path)
    assert (header.n_vocab, header.n_layers) == (1024, 4)
    text = ("-n", "24", "-t", "1", "--temp", "0", "-p", "Once upon a time", "--json")
    assert command("run", "-m", target, "-md", path, "--draft-n", "2", *text).document["n_accepted"]


def test_tokens_of_the_users_text_are_kept_first(trim: Command, tmp_path: Path) -> None:
    paths = [tmp_path / "usual.gguf", tmp_path / "own.gguf"]
    text = tmp_path / "text.txt"
    text.write_text("Holmes, Watson and the countess went to Whitehall. " * 9)
    for path, own in zip(paths, ((), ("--text", text)), strict=True):
        assert trim(embedded_draft(), "--vocab", "512", "-o", path, *own).code == 0
    usual, own = ({*read_header(path).tokens} for path in paths)
    assert len(usual) == len(own) == 512
    assert any(b"Holmes" in token for token in own - usual)


def test_another_type(trim: Command, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    assert trim(embedded_draft(), "--type", "q4_0", "-o", path).code == 0
    assert read_header(path).matrix_type == "Q4_0"
    both = ("--vocab", "1024", "--type", "q4_0", "--force")
    assert trim(embedded_draft(), *both, "-o", path).code == 0
    header = read_header(path)
    assert (header.matrix_type, (trim_of(header) or {})["tokens"]) == ("Q4_0", 1024)


def test_paths_that_are_not_to_be_written(trim: Command, tmp_path: Path) -> None:
    there = tmp_path / "there.gguf"
    there.write_bytes(b"precious")
    own = tmp_path / "own.gguf"
    own.write_bytes(embedded_draft().read_bytes())
    for path, told in ((there, "exists: name another"), (own, "is the source model itself")):
        result = trim(own, "--vocab", "1024", "-o", path)
        assert result.code == USAGE
        assert told in result.err
    assert there.read_bytes() == b"precious"
    assert trim(own, "--vocab", "1024", "-o", there, "--force").code == 0
    assert read_header(there).n_vocab == 1024


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of Unix")
def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    folder, path = tmp_path / "temporary", tmp_path / "small.gguf"
    folder.mkdir()
    cut = ("--vocab", "1024", "--type", "q8_0", "-o", path)
    process = subprocess.Popen(
        [sys.executable, "-m", "ggufspec", "trim", embedded_target(), *cut],
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert comes_true(lambda: [each for each in folder.iterdir() if each.is_dir()])
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not path.exists()
    assert not list(folder.iterdir())
