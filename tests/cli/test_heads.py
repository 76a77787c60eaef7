"""Heads as drafts, wherever a command takes one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import tiny_blocks
import tiny_heads
from cli.conftest import Command

TABLE = tiny_heads.Table()
HEAD = tiny_heads.Head(table=TABLE)


KINDS = {
    "mtp": "has an MTP head (1 layer",
    "sidecar": "is an MTP head without",
    "eagle3": "is an EAGLE-3 head for",
    "dflash": "is a DFlash head for",
    "dspark": "is a DSpark head for",
    "dflash2": "is a DFlash2 head for",
}


def write(kind: str, folder: Path) -> tuple[Path, str]:
    """A target, and a head that is right about each token."""
    if kind == "mtp":
        return tiny_heads.write_glm4moe(folder / "glm.gguf", TABLE, HEAD), "mtp"
    if kind == "sidecar":
        head = tiny_heads.write_glm4moe(folder / "mtp-glm.gguf", TABLE, HEAD, part="head")
        return tiny_heads.write_glm4moe(folder / "t.gguf", TABLE, HEAD, part="trunk"), str(head)
    if kind == "eagle3":
        target = tiny_heads.write_llama_table(folder / "llama.gguf", TABLE)
        return target, str(tiny_heads.write_eagle3(folder / "eagle3.gguf", HEAD))
    table = tiny_heads.Table(vocab=tiny_blocks.with_mask(tiny.SPM))
    blocks = tiny_blocks.BlockHead(table=table, kind=kind)  # type: ignore[arg-type]
    target = tiny_heads.write_llama_table(folder / "llama.gguf", table)
    return target, str(tiny_blocks.write_dflash(folder / "dflash.gguf", blocks))


@pytest.fixture(params=["mtp", "dflash"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A head in the target's file, or in one of its own."""
    return write(request.param, tmp_path)


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    return write("mtp", tmp_path)[0]


def test_texts_are_drafted_by_heads(command: Command, pair: tuple[Path, str]) -> None:
    ask = ("-p", "ab", "-n", "12", "--temp", "0", "--draft-n", "3", "-t", "1", "--json")
    plain = command("run", "-m", pair[0], *ask[:6], "--drafter", "none", *ask[8:]).document
    found = command("run", "-m", pair[0], "-md", pair[1], *ask).document
    assert found["tokens"] == plain["tokens"]
    assert found["n_accepted"] == found["n_drafted"] > 6
    assert found["settings"]["draft"] == pair[1]


def test_other_commands_take_heads(
    command: Command, pair: tuple[Path, str], tmp_path: Path
) -> None:
    of = ("-m", pair[0], "-md", pair[1], "-t", "1")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n')
    written = command("batch", *of, prompts, "-n", "4", "-o", "-")
    assert written.code == 0, written.err
    assert json.loads(written.out)["n_generated"] == 4
    bench = command("bench", *of, "--draft-n", "2", "-n", "4", "--runs", "1", "-p", "ab")
    assert bench.code == 0, bench.err
    assert "draft 2" in bench.out
    assert "draft alone" not in bench.out, "a head writes no text by itself"
    tuned = command("tune", *of, "--max-n", "2", "--runs", "2", "--json")
    assert tuned.code == 0, tuned.err
    assert tuned.document["draft"]["step"]["seconds"] > 0
    planned = command("plan", *of[:4], "--json")
    assert planned.code == 0, planned.err
    assert planned.document["draft"]["n_bytes"] > 0


def test_an_audit_takes_heads(command: Command, glm: Path) -> None:
    ask = ("-n", "4", "--runs", "12", "-t", "1", "--seed", "1")
    assert command("audit", "-m", glm, "-md", "mtp", *ask).code == 0


def test_the_own_head_is_proposed_first(command: Command, glm: Path) -> None:
    result = command("run", "-m", glm, "-md", "auto", "-p", "ab", "-n", "4", "-t", "1")
    assert result.code == 0, result.err
    assert "drafting with mtp: its own multi-token-prediction head" in result.err


def test_records_of_a_head_are_forgotten_by_its_name(command: Command, glm: Path) -> None:
    command("tune", "-m", glm, "-md", "mtp", "-t", "1", "--max-n", "2", "--runs", "2")
    assert "Deleted 0" in command("tune", "--forget", "-m", glm, "-md", glm).out
    assert "Deleted 0" not in command("tune", "--forget", "-m", glm, "-md", "mtp").out


@pytest.mark.parametrize(("kind", "said"), KINDS.items())
def test_show_names_heads(kind: str, said: str, command: Command, tmp_path: Path) -> None:
    target, head = write(kind, tmp_path)
    shown = command("models", "show", target if head == "mtp" else head).out
    assert said in shown
    assert ("mostly F32: on a CPU" in shown) == (head == "mtp")  # advice for targets


def test_a_head_is_no_target(command: Command, tmp_path: Path) -> None:
    _, head = write("eagle3", tmp_path)
    for args in (("run", "-p", "a"), ("plan",)):
        result = command(*args, "-m", head)
        assert result.code == 1
        assert "not a model: name it as the draft (--draft)" in result.err


def test_a_target_without_a_head_is_refused(command: Command, tmp_path: Path) -> None:
    target = tiny_heads.write_llama_table(tmp_path / "llama.gguf", TABLE)
    result = command("run", "-m", target, "-md", "mtp", "-p", "a")
    assert result.code == 1
    assert "has no MTP head" in result.err
    assert "--draft auto" in result.err
