"""What a user can get wrong ends in one clear message on stderr, an exit code, and no text."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora
import numpy as np
import pytest
import tiny
from cli.conftest import ERROR, USAGE, Command
from patience import PATIENCE


def refuses(result: Any, code: int, *named: str) -> None:
    """The message names what was found, what was needed, or what to do."""
    assert "Traceback" not in result.err
    for part in named:
        assert part in " ".join(result.err.split())
    assert (result.code, result.out) == (code, "")


# Models


def projector(path: Path) -> Path:
    weights = {"v.patch_embd.weight": np.zeros((32, 32), np.float32)}
    return tiny.write_gguf(path, "clip", {"general.type": "mmproj"}, None, weights)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda path: path, ["there is no file", "GGUF"]),
        (projector, ["is a projector for images", "name the model that it was made for"]),
        (lora.write_lora, ["is a LoRA adapter, not a model: name it with --lora"]),
        (tiny.write_vocab_only, ["could not be loaded", "token_embd.weight"]),
    ],
)
def test_a_target_that_is_no_language_model(
    write: Callable[[Path], Path], named: list[str], run: Command, target: Path, tmp_path: Path
) -> None:
    model = write(tmp_path / "model.gguf")
    refuses(run("-m", model, "-p", "hi"), ERROR, str(model), *named)
    refuses(run("-m", target, "-md", model, "-p", "hi"), ERROR, str(model))


def test_a_pair_of_two_vocabularies_is_used_with_a_note(
    run: Command, target: Path, tmp_path: Path
) -> None:
    model = tiny.write_llama(tmp_path / "small.gguf", vocab=tiny.BPE)
    result = run("-m", target, "-md", model, "-p", "hi", "-n", "4")
    assert result.code == 0
    assert "the draft has another vocabulary" in result.err
    assert "the target's tokenizer is SPM, the draft's BPE" in result.err


# Prompts


@pytest.mark.parametrize(
    ("args", "stdin", "named"),
    [
        (["-p", ""], b"", "the prompt is empty"),
        ([], b"\r\n", "the prompt is empty"),
        (["-f", "-"], b"", "the prompt is empty"),
        ([], b"caf\xe9", "from stdin is not UTF-8: byte 3 is 0xe9; convert"),
        (["-f", "bad.txt"], b"", "bad.txt is not UTF-8: byte 2 is 0xef"),
        (["-f", "none.txt"], b"", "none.txt cannot be read: No such file"),
        (["-f", "."], b"", "the prompt file . is a folder"),
        (["-p", "hello " * 300], b"", "tokens, the context 256"),
        (["-p", "hello", "-c", "2"], b"", "tokens, the context 2,"),
        (["--chat", "-p", "hi"], b"", "has no chat template"),
        (["--system", "be brief", "-p", "hi"], b"", "has no chat template"),
    ],
)
def test_a_prompt_that_cannot_be_continued(
    args: list[str],
    stdin: bytes,
    named: str,
    run: Command,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_bytes(b"na\xefve")
    refuses(run("-m", target, *args, stdin=stdin), ERROR, named)


def test_a_prompt_on_the_command_line_that_is_no_text(program: Command, target: Path) -> None:
    result = program("run", "-t", "1", "-m", target, "-p", b"caf\xe9")
    refuses(result, ERROR, "from -p is not UTF-8", "character 3", "convert")


def test_a_terminal_instead_of_a_prompt(target: Path) -> None:
    """It is an error at once; the command does not wait for input that no user expects to type."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ggufspec", "run", "-m", target],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert "give a prompt: with -p, with -f, or on stdin" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("LLAMA_ARG_CTX_SIZE", "many", "'-c' / '--ctx-size' (LLAMA_ARG_CTX_SIZE): 'many' is not"),
        ("LLAMA_ARG_REPACK", "maybe", "'--repack' (LLAMA_ARG_REPACK): 'maybe' is not a valid bool"),
        ("GGUFSPEC_KERNELS", "x", "the environment variable GGUFSPEC_KERNELS is 'x'"),
        ("GGUFSPEC_AMX", "x", "the environment variable GGUFSPEC_AMX is 'x'"),
        ("GGUFSPEC_MEASURE", "x", "the environment variable GGUFSPEC_MEASURE is 'x'"),
        ("GGUFSPEC_INSTRUCTIONS", "x", "the environment variable GGUFSPEC_INSTRUCTIONS is 'x'"),
    ],
)
def test_a_variable_that_cannot_be_used(
    variable: str,
    value: str,
    named: str,
    run: Command,
    command: Command,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    if variable == "GGUFSPEC_KERNELS":
        refuses(command("devices"), USAGE, named)
    refuses(run("-m", target, "-p", "hi", "-n", "1"), USAGE, named)
    monkeypatch.setenv(variable, "")
    assert run("-m", target, "-p", "hi", "-n", "1").code == 0
