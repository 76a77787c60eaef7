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
from patience import PATIENCE

Command = Callable[..., Any]

ERROR, USAGE = 1, 2


def refuses(result: Any, code: int, *named: str) -> None:
    """The message names what was found, what was needed, or what to do."""
    assert "Traceback" not in result.err
    for part in named:
        assert part in " ".join(result.err.split())
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
        (lora.write_lora, ["is a LoRA adapter, not a model: name it with --lora"]),
        (tiny.write_vocab_only, ["could not be loaded", "token_embd.weight"]),
        (tiny.write_without_tokenizer, ["could not be loaded", "tokenizer"]),
        (tiny.write_bert, ["embeddings", "a model that writes text"]),
        (tiny.write_t5_encoder_decoder, ["is an encoder", "a model that only decodes"]),
    ],
)
def test_a_target_that_is_no_language_model(
    write: Callable[[Path], Path], named: list[str], run: Command, target: Path, tmp_path: Path
) -> None:
    model = write(tmp_path / "model.gguf")
    refuses(run("-m", model, "-p", "hi"), ERROR, str(model), *named)
    refuses(run("-m", target, "-md", model, "-p", "hi"), ERROR, str(model))


@pytest.mark.parametrize(
    ("vocab", "named"),
    [
        (tiny.BPE, "the target's tokenizer is SPM, the draft's BPE"),
        (tiny.SPM.with_size(len(tiny.SPM) + 129), f"{len(tiny.SPM)} tokens"),
        (tiny.SPM.with_text(300, "other"), "'other' in the draft"),
        (tiny.spm_vocab(eos="<s>"), "end-of-text"),
    ],
    ids=["kind", "size", "token", "end"],
)
def test_a_pair_of_two_vocabularies_is_used_with_a_note(
    vocab: tiny.Vocab, named: str, run: Command, target: Path, tmp_path: Path
) -> None:
    model = tiny.write_llama(tmp_path / "small.gguf", vocab=vocab)
    result = run("-m", target, "-md", model, "-p", "hi", "-n", "4")
    assert result.code == 0
    for part in ("the draft has another vocabulary", "tokens that both have", named):
        assert part in result.err


def test_a_pair_without_a_common_token(run: Command, target: Path, tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "small.gguf", vocab=tiny.SILENT)
    result = run("-m", target, "-md", model, "-p", "hi")
    refuses(result, ERROR, "no token in common", "the target's model family")


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


# Options: one for each check, before or after the target is loaded


@pytest.mark.parametrize(
    ("args", "named"),
    [
        # Names and numbers
        ("--nope", "--nope"),
        ("stray", "unexpected extra argument (stray)"),
        ("-n many", "'-n' / '--n-predict': 'many'"),
        ("-n -3", "-3 is not in the range x>=-2"),
        ("-s -2", "-2 is not in the range x>=-1"),
        ("-ctk q3", "'-ctk' / '--cache-type-k': 'q3' is not one of 'f32'"),
        ("--tree oak", "'oak' is not one of 'auto', 'on', 'off'"),
        ("--temp nan", "--temp': 'nan' is not a number"),
        ("--temp inf", "temperature is inf"),
        ("--top-p 0", "0.0 is not in the range 0<x<=1"),
        ("-c 99999999999999", "n_ctx is 99999999999999"),
        ("-t 100000", "n_threads is 100000"),
        ("-ngl most", "'most' is neither a number nor auto"),
        ("-ngl 9999999999", "n_gpu_layers is 9999999999"),
        ("-mg 7", "no GPU 7; llama.cpp found none: leave it out"),
        ("-ctv q8_0 -fa off", "need flash attention"),
        # Lists
        ("-ts 3,x", "'3,x' is not a list of proportions"),
        ("-ts 0,0", "'0,0' is not a list of proportions"),
        ("--rpc host:1,host", "--rpc: 'host' has no port"),
        ("--lora-scaled nan.gguf:nan", "must be a finite number"),
        ("-l five+1", "'five+1' is not a token id with a bias"),
        ("-l 5+inf", "logit_bias of token 5"),
        ("-l 99999+1", "logit_bias names token 99999; the vocabulary has"),
        ("--samplers top_k;xtc", "no distribution"),
        ("--samplers ;", "no sampler is named"),
        # Drafts
        ("--draft-n 3", "--draft-n needs a draft model"),
        ("--compare --drafter none", "--compare needs a draft model"),
        ("--drafter model", "'model' needs a draft"),
        ("--drafter oracle", "choose from"),
        ("--verify _lossy", "choose from"),
        ("--draft-temp 0.5", "--draft-temp needs a draft model"),
        ("-cmoed", "--cpu-moe-draft needs a draft model"),
        ("-otd exps=CPU", "--override-tensor-draft needs a draft model"),
        ("--lora-draft a.gguf", "--lora-draft needs a draft model"),
        ("--draft-n 65 -md x.gguf", "65 is not in the range 1<=x<=64"),
        ("--draft-temp auto -md x.gguf", "'auto' is not a valid float"),
        ("--draft-temp -1 -md x.gguf", "draft_temperature is -1.0"),
        # Constraints
        ("--mirostat 2", "--mirostat is not supported"),
        ("--regex (", "the regular expression cannot be used: unclosed group."),
        ("--grammar x", "the grammar needs a rule start"),
        ("--grammar start:<think>", "unknown special token"),
        ('--json-schema {"not":{"const":1}}', 'at #: "not" cannot be guaranteed; leave it out'),
        ("--json-schema {", "JSON"),
        ("--json-schema {} --grammar x", "--json-schema and --grammar were given; give one"),
        ("--choice yes --ignore-eos", "ignore_eos"),
        ("--regex-file .", "the file . is a folder"),
        ("--stop=", "stop string is empty"),
        # Files
        ("-f prompt.txt", "with -p or with -f, not both"),
        ("--prompt-cache-ro", "--prompt-cache-ro needs --prompt-cache"),
        ("--prediction .", "is a directory"),
    ],
)
def test_an_option_that_cannot_be_used(args: str, named: str, run: Command, target: Path) -> None:
    refuses(run("-m", target, "-p", "hi", *args.split()), USAGE, named)


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


def test_a_run_without_a_target_and_a_command_that_there_is_not(
    run: Command, command: Command
) -> None:
    refuses(run("-p", "hi"), USAGE, "Missing option", "--target")
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
        [sys.executable, "-c", limited, *args], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (ERROR, "")
    assert "context of 10,000,000 tokens" in done.stderr
    assert "Traceback" not in done.stderr
