"""`ggufspec trim` writes a draft with a part of a model, and says what each cut costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from greedy import assert_same
from patience import PATIENCE, comes_true

import ggufspec
from ggufspec.models.header import read_header
from ggufspec.standin.embedded import embedded_draft, embedded_target

Command = Callable[..., Any]

ERROR, USAGE, INTERRUPTED = 1, 2, 130
TEXT = ("-n", "24", "-t", "1", "--temp", "0", "-p", "Once upon a time", "--json")


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggufspec.bench.trim.MIN_SECONDS", 0.0)


@pytest.fixture
def trim(command: Command) -> Command:
    return lambda *args, **how: command("trim", *args, "-t", "1", **how)


def test_a_model_becomes_its_own_draft(trim: Command, command: Command, tmp_path: Path) -> None:
    path, target = tmp_path / "draft.gguf", embedded_target()
    result = trim(target, "--vocab", "1024", "--layers", "4", "-o", path)
    assert result.code == 0, result.err
    assert f"use it with `ggufspec run --target {target} --draft {path}`" in result.err
    lines = [line for line in result.out.splitlines() if " / " in line and "%" in line]
    kept = [line.split("  ")[0] for line in lines]
    assert kept[:2] == ["all", "1,024 tokens"]
    assert kept[2].startswith("1,024 tokens, layers 0")
    assert [line.endswith("chosen") for line in lines] == [False, False, True]
    header = read_header(path)
    assert (header.n_vocab, header.n_layers) == (1024, 4)
    plain = command("run", "-m", target, "--drafter", "none", *TEXT).document
    drafted = command("run", "-m", target, "-md", path, "--draft-n", "2", *TEXT).document
    with ggufspec.load(target, n_threads=1) as engine:
        prompt, *texts = (
            engine.tokenize(each) for each in (TEXT[7], drafted["text"], plain["text"])
        )
        assert_same(engine, prompt, *texts)
    assert drafted["n_accepted"] > 0


def test_the_document(trim: Command, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    document = trim(
        embedded_draft(), "-m", embedded_target(), "--vocab", "2048", "-o", path, "--json"
    ).document
    whole, cut = document["cuts"]
    assert (whole["n_tokens"], cut["n_tokens"]) == (4096, 2048)
    assert whole["cut"] == {"n_tokens": None, "layers": [0, 1], "type": None}
    assert cut["n_bytes"] < whole["n_bytes"]
    for each in (whole, cut):
        assert each["step"] > 0
        for kind in ("code", "prose"):
            assert 0 < each["agreement"][kind] < 1
            assert 0 < each["overlap"][kind] < 1
            assert len(each["speedups"][kind]) == 2
    assert cut["overlap"]["prose"] <= whole["overlap"]["prose"] + 0.05
    assert document["chosen"] == 1
    assert document["output"] == str(path)
    assert document["settings"]["n_tokens"] == 2048
    assert path.exists()


def test_a_table_alone(trim: Command, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night, and the rain fell in torrents. " * 40)
    result = trim(embedded_draft(), "-m", embedded_target(), "--text", text, "--vocab", "auto")
    assert result.code == 0, result.err
    kept = [line.split("  ")[0] for line in result.out.splitlines() if " / " in line]
    assert kept[:3] == ["all", "2,048 tokens", "1,024 tokens"]
    assert "text: agrees" in result.out
    assert "wrote" not in result.err


def test_another_type(trim: Command, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    arguments = ("--vocab", "all", "--type", "q4_0", "-o", path)
    result = trim(embedded_draft(), "-m", embedded_target(), *arguments)
    assert result.code == 0, result.err
    assert read_header(path).matrix_type == "Q4_0"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--vocab", "all"), "nothing would be cut"),
        (("--vocab", "10"), "always kept"),
        (("--vocab", "1000000000"), "keep fewer, or all"),
        (("--vocab", "many"), "neither a number, auto nor all"),
        (("--layers", "3"), "keep 2 to 2"),
        (("--layers", "0-"), "neither a number, a list such as"),
        (("--layers", "1-0"), "neither a number, a list such as"),
        (("--layers", "0,7"), "has no layers 7"),
        (("--type", "q9"), "not a quantization"),
        (("--text", "no-such.txt"), "cannot be read"),
    ],
)
def test_cuts_that_cannot_be(arguments: tuple[str, ...], told: str, trim: Command) -> None:
    result = trim(embedded_draft(), *arguments)
    assert result.code in (ERROR, USAGE)
    assert told in result.err


def test_another_vocabulary(trim: Command, target: Path) -> None:
    result = trim(embedded_draft(), "-m", target)
    assert result.code == ERROR
    assert "another vocabulary" in result.err


def test_paths_that_are_not_to_be_written(trim: Command, tmp_path: Path) -> None:
    there = tmp_path / "there.gguf"
    there.write_bytes(b"precious")
    own = tmp_path / "own.gguf"
    own.write_bytes(embedded_draft().read_bytes())
    for path, told in (
        (there, "exists: name another"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "model.gguf", "does not exist"),
        (own, "is the source model itself"),
    ):
        result = trim(own, "--vocab", "1024", "-o", path)
        assert result.code == USAGE
        assert told in result.err
    assert there.read_bytes() == b"precious"
    assert trim(own, "--vocab", "1024", "-o", there, "--force").code == 0
    assert read_header(there).n_vocab == 1024


def test_a_target_that_writes_nothing(trim: Command, tmp_path: Path) -> None:
    script = tiny.SPM.spell(" hello the model")
    model = tiny.write_scripted(
        tmp_path / "chat.gguf", script, then=tiny.SPM.eos, chat_template=tiny.CHATML
    )
    result = trim(model, "--vocab", "all", "--type", "q8_0")
    assert result.code == USAGE
    assert "the target generates almost no text by itself; give text" in result.err


def test_a_trimmed_model_is_not_trimmed_again_for_its_target(trim: Command, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    assert trim(embedded_draft(), "--vocab", "1024", "-o", path).code == 0
    result = trim(path, "-m", embedded_target(), "--vocab", "512")
    assert result.code == ERROR
    assert "trimmed already: trim the model that it was made of" in result.err


def test_a_draft_that_will_not_pay_is_announced(trim: Command) -> None:
    result = trim(embedded_target(), "-m", embedded_draft(), "--vocab", "4000")
    assert result.code == 0
    assert "predicted to be slower than plain decoding" in result.err


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of Unix")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    folder, path = tmp_path / "temporary", tmp_path / "small.gguf"
    folder.mkdir()
    process = subprocess.Popen(
        [*(sys.executable, "-m", "ggufspec", "trim", embedded_target(), "-t", "1"), "-o", path],
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert comes_true(lambda: list(folder.iterdir()))
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == b"ggufspec: interrupted"
    assert b"Traceback" not in err
    assert not path.exists()
    assert not list(folder.iterdir())
