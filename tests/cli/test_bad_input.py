"""What a user can get wrong ends in one clear message on stderr, an exit code, and no text."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from patience import PATIENCE

Command = Callable[..., Any]

ERROR, USAGE = 1, 2


def refuses(result: Any, code: int, *named: str) -> None:
    """The message names what was found, what was needed, or what to do."""
    assert "Traceback" not in result.err
    for part in named:
        assert part in result.err
    assert (result.code, result.out) == (code, "")


# Models


def missing(path: Path) -> Path:
    return path


def empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def a_folder(path: Path) -> Path:
    path.mkdir()
    return path


def no_gguf(path: Path) -> Path:
    path.write_text("Once upon a time")
    return path


def projector(path: Path) -> Path:
    weights = {"v.patch_embd.weight": np.zeros((32, 32), np.float32)}
    return tiny.write_gguf(path, "clip", {"general.type": "mmproj"}, None, weights)


def half(path: Path) -> Path:
    return tiny.truncate(tiny.write_llama(path), 0.5)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (missing, ["there is no file", "GGUF"]),
        (empty, ["is empty", "download"]),
        (a_folder, ["is a folder", "name a GGUF file in it"]),
        (no_gguf, ["is not a GGUF file", "b'Once'"]),
        (half, ["is truncated", "Download it again"]),
        (projector, ["is a projector for images", "name the model that it was made for"]),
        (tiny.write_vocab_only, ["could not be loaded", "token_embd.weight"]),
        (tiny.write_without_tokenizer, ["could not be loaded", "tokenizer"]),
        (tiny.write_bert, ["embeddings", "a model that writes text"]),
        (tiny.write_t5_encoder_decoder, ["is an encoder", "a model that only decodes"]),
    ],
)
def test_a_target_that_is_no_language_model(
    write: Callable[[Path], Path], named: list[str], run: Command, tmp_path: Path
) -> None:
    model = write(tmp_path / "model.gguf")
    refuses(run("-m", model, "-p", "hi"), ERROR, str(model), *named)


@pytest.mark.parametrize("write", [missing, empty, no_gguf, half, projector, tiny.write_vocab_only])
def test_a_draft_that_is_no_language_model(
    write: Callable[[Path], Path], run: Command, target: Path, tmp_path: Path
) -> None:
    model = write(tmp_path / "small.gguf")
    refuses(run("-m", target, "-md", model, "-p", "hi"), ERROR, str(model))


@pytest.mark.parametrize(
    ("vocab", "named"),
    [
        (tiny.BPE, ["the target's tokenizer is SPM, the draft's BPE"]),
        (tiny.SPM.with_size(len(tiny.SPM) + 129), [f"{len(tiny.SPM)} tokens"]),
        (tiny.SPM.with_text(300, "other"), ["token 300", "'other' in the draft"]),
        (tiny.spm_vocab(eos="<s>"), ["end-of-text"]),
    ],
    ids=["kind", "size", "token", "end"],
)
def test_a_pair_of_two_vocabularies_is_used_with_a_note(
    vocab: tiny.Vocab, named: list[str], run: Command, target: Path, tmp_path: Path
) -> None:
    model = tiny.write_llama(tmp_path / "small.gguf", vocab=vocab)
    result = run("-m", target, "-md", model, "-p", "hi", "-n", "4")
    assert result.code == 0
    for part in ("the draft has another vocabulary", "tokens that both have", *named):
        assert part in result.err


def test_a_pair_without_a_common_token(run: Command, target: Path, tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "small.gguf", vocab=tiny.SILENT)
    result = run("-m", target, "-md", model, "-p", "hi")
    refuses(result, ERROR, "no token in common", "the target's model family")


# Prompts


@pytest.mark.parametrize(
    ("args", "stdin", "named"),
    [
        (["-p", ""], b"", ["the prompt is empty"]),
        ([], b"", ["the prompt is empty"]),
        ([], b"\n", ["the prompt is empty"]),
        (["-f", "-"], b"", ["the prompt is empty"]),
        ([], b"caf\xe9", ["from stdin is not UTF-8", "byte 3 is 0xe9", "convert"]),
        (["-f", "-"], b"\xff\xfeh\x00i\x00", ["stdin", "not UTF-8", "byte 0 is 0xff"]),
        (["-p", "hello " * 300], b"", ["tokens, the context 256", "shorten the prompt", "-c"]),
        (["-p", "hello", "-c", "2"], b"", ["tokens, the context 2,", "shorten the prompt"]),
        (["--chat", "-p", "hi"], b"", ["has no chat template"]),
        (["--system", "be brief", "-p", "hi"], b"", ["has no chat template"]),
    ],
)
def test_a_prompt_that_cannot_be_continued(
    args: list[str], stdin: bytes, named: list[str], run: Command, target: Path
) -> None:
    refuses(run("-m", target, *args, stdin=stdin), ERROR, *named)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", ["the prompt is empty"]),
        (b"\r\n", ["the prompt is empty"]),
        (b"na\xefve", ["prompt.txt is not UTF-8", "byte 2 is 0xef"]),
    ],
)
def test_a_file_without_a_prompt(
    content: bytes, named: list[str], run: Command, target: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    refuses(run("-m", target, "-f", file), ERROR, *named)


def test_a_prompt_file_that_is_not_there(run: Command, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "nothing.txt"
    refuses(run("-m", target, "-f", file), ERROR, "No such file", str(file))


def test_a_folder_as_a_prompt_file(run: Command, target: Path, tmp_path: Path) -> None:
    refuses(run("-m", target, "-f", tmp_path), ERROR, "is a folder", str(tmp_path))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_prompt_file_that_may_not_be_read(run: Command, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("hello")
    file.chmod(0)
    refuses(run("-m", target, "-f", file), ERROR, "Permission denied", str(file))


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


# Options


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--nope"], ["--nope"]),
        (["--draft-n", "3"], ["--draft-n needs a draft", "--draft"]),
        (["--compare", "--drafter", "none"], ["--compare needs a draft", "--draft"]),
        (["--drafter", "model"], ["'model' needs a draft", "--draft"]),
        (["--drafter", "oracle"], ["'oracle'", "choose from", "model", "none"]),
        (["--verify", "maybe"], ["'maybe'", "choose from", "match", "rejection"]),
        (["--verify", "_lossy"], ["'_lossy'", "choose from"]),
        (["-ctk", "q3"], ["'q3'", "--cache-type-k", "'q8_0'"]),
        (["-ctv", "f64"], ["'f64'", "--cache-type-v", "'f16'"]),
        (["-fa", "maybe"], ["'maybe'", "--flash-attn", "'auto'"]),
        (["--color", "green"], ["'green'", "--color", "'off'"]),
        (["--temp", "-1"], ["--temp", "-1.0"]),
        (["--temp", "abc"], ["--temp", "'abc'"]),
        (["--temp", "nan"], ["--temp", "is not a number"]),
        (["--temp", "inf"], ["temperature is inf"]),
        (["--top-p", "0"], ["--top-p", "0<x<=1"]),
        (["--top-p", "2"], ["--top-p", "0<x<=1"]),
        (["--top-p", "nan"], ["--top-p", "is not a number"]),
        (["--min-p", "2"], ["--min-p", "0<=x<=1"]),
        (["--min-p", "nan"], ["--min-p", "is not a number"]),
        (["--top-k", "-1"], ["--top-k", "-1"]),
        (["-n", "-3"], ["--n-predict", "-3 is not in the range x>=-2"]),
        (["-s", "-2"], ["--seed", "-2 is not in the range x>=-1"]),
        (["-n", "many"], ["-n", "'many'"]),
        (["-c", "-1"], ["--ctx-size", "-1"]),
        (["-c", "99999999999999"], ["n_ctx is 99999999999999", "2,147,483,647"]),
        (["-b", "0"], ["--batch-size", "0"]),
        (["-t", "0"], ["--threads", "0"]),
        (["-t", "100000"], ["n_threads is 100000", "512"]),
        (["-td", "-3"], ["--threads-draft", "-3"]),
        (["-ngl", "most"], ["--gpu-layers", "neither a number nor auto"]),
        (["-ngl", "9999999999"], ["n_gpu_layers is 9999999999", "-1: all"]),
        (["-ts", "3,x"], ["--tensor-split", "not a list of proportions"]),
        (["-ts", "0,0"], ["--tensor-split", "not a list of proportions"]),
        (["-mg", "7"], ["no GPU 7; llama.cpp found none: leave it out"]),
        (["--rpc", ""], ["--rpc: an entry is empty", "192.168.1.20:50052"]),
        (["--rpc", "host:1,host"], ["--rpc: 'host' has no port"]),
        (["--rpc", "[::1]:50052"], ["--rpc: '[::1]:50052' is an IPv6 address"]),
        (["-s", "1.5"], ["--seed", "'1.5'"]),
        (["--stop", ""], ["stop string is empty"]),
        (["-f", "prompt.txt"], ["with -p or with -f, not both"]),
        (["stray"], ["unexpected extra argument", "stray"]),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_used(
    args: list[str], named: list[str], run: Command, target: Path
) -> None:
    refuses(run("-m", target, "-p", "hi", *args), USAGE, *named)


@pytest.mark.parametrize("n", ["0", "-1", "65", "10000", "abc"])
def test_a_draft_length_that_cannot_be_used(
    n: str, run: Command, target: Path, draft: Path
) -> None:
    result = run("-m", target, "-md", draft, "-p", "hi", "--draft-n", n)
    refuses(result, USAGE, "--draft-n", n)


def test_a_run_without_a_target(run: Command) -> None:
    refuses(run("-p", "hi"), USAGE, "Missing option", "--target")


def test_a_command_that_there_is_not(command: Command) -> None:
    refuses(command("walk"), USAGE, "No such command 'walk'")


def test_a_context_that_the_positions_do_not_reach(run: Command, tmp_path: Path) -> None:
    model = tiny.write_timed(tmp_path / "model.gguf", tiny.SPM.spell("ab"), n_ctx_train=32)
    result = run("-m", model, "-p", "hi", "-c", "64")
    refuses(result, USAGE, "64 tokens is too long", str(model), "has 32 positions")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit may not hold")
def test_a_context_that_does_not_fit_into_memory(target: Path) -> None:
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from ggufspec.cli.main import main; main()"
    )
    args = ("run", "-t", "1", "-m", target, "-p", "hi", "-c", "10000000")  # 1.3 GB of caches
    done = subprocess.run(
        [sys.executable, "-c", limited, *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (ERROR, "")
    assert "context of 10,000,000 tokens" in done.stderr
    assert "-c" in done.stderr
    assert "Traceback" not in done.stderr


def test_cache_types_that_cannot_be_used(run: Command, target: Path) -> None:
    result = run("-m", target, "-p", "hi", "-ctv", "q8_0", "-fa", "off")
    refuses(result, USAGE, "q8_0", "need flash attention")


@pytest.mark.parametrize("seed", ["4294967296", "123456789012345678901234567890"])
def test_a_seed_may_be_gigantic(seed: str, run: Command, target: Path) -> None:
    args = ("-m", target, "-p", "hi", "-n", "8", "--seed", seed, "--json")
    document = run(*args).document
    assert document["settings"]["seed"] == int(seed)
    assert document["tokens"] == run(*args).document["tokens"]


@pytest.mark.parametrize(
    "args",
    [["--nope"], ["-n", "-3"], ["-p", ""], ["--stop", ""], ["--verify", "maybe"]],
    ids=" ".join,
)
def test_with_json_an_error_leaves_stdout_empty_too(
    args: list[str], run: Command, target: Path
) -> None:
    result = run("-m", target, "-p", "hi", "--json", *args)
    assert result.code in (ERROR, USAGE)
    assert result.out == ""
    assert result.err
