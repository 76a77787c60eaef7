"""`ggufspec demo` measures the embedded pair, and says what its large model really is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggufspec.cli.demo import GREEDY_PROMPT, PROMPTS
from ggufspec.engine.engine import Engine
from ggufspec.standin import padded

Command = Callable[..., Any]

ERROR, USAGE, INTERRUPTED = 1, 2, 130
SIZE = 10_000_000
SHORT = ("demo", "--size", "10M", "-n", "8", "-t", "1")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the stand-in."""
    folder = tmp_path_factory.mktemp("cache")
    padded.padded_target(SIZE, folder)
    return folder


def test_the_document_has_both_ways(command: Command, cache: Path) -> None:
    result = command(*SHORT, "--cache-dir", cache, "--json", "--draft-n", "3")
    assert result.code == 0
    document = result.document
    assert set(document) == {
        *("rows", "speedup", "speedup_spread", "n_texts", "greedy", "stand_in"),
        *("settings", "versions"),
    }
    plain, speculative = document["rows"]
    assert (plain["mode"], speculative["mode"]) == ("plain", "speculative")
    for row in (plain, speculative):
        low, high = row["tokens_per_second_spread"]
        assert 0 < low <= row["tokens_per_second"] <= high
        assert 0 < row["overhead"] < 1
        assert row["n_runs"] == document["n_texts"] == 4
    assert plain["accepted"] is None
    assert plain["mean_length"] == 1
    assert 0 < speculative["accepted"] <= 1
    assert 1 < speculative["mean_length"] <= 4
    low, high = document["speedup_spread"]
    assert 0 < low <= document["speedup"] <= high


def test_a_greedy_text_is_the_same_in_both_ways(command: Command, cache: Path) -> None:
    document = command(*SHORT, "--cache-dir", cache, "--json").document
    assert document["settings"]["temperature"] == 0.8
    greedy = document["greedy"]
    assert greedy["same_text"] is (greedy["divergence"] is None)
    assert greedy["same_text"] or greedy["divergence"]["near_tie"]
    assert (greedy["prompt"], bool(greedy["text"])) == (GREEDY_PROMPT, True)


def test_the_text_does_not_go_in_circles(command: Command, cache: Path) -> None:
    """Of 64 tokens, no phrase of five words comes three times."""
    out = command(*SHORT, "-n", "64", "--cache-dir", cache).out
    texts = [line for line in out.split("speculative: ")[1:] if line]
    assert len(texts) == len(PROMPTS)
    for text in texts:
        words = text.split("plain: ")[0].split("plain at ")[0].split()
        phrases = Counter(zip(*(words[i:] for i in range(5)), strict=False))
        assert max(phrases.values()) < 3, text


def test_each_prompt_runs_as_often_as_asked(command: Command, cache: Path) -> None:
    args = ("--cache-dir", cache, "--json", "--runs", "2", "--draft-n", "5", "--temp", "0.7")
    document = command(*SHORT, *args, "--seed", "3").document
    assert document["n_texts"] == document["rows"][0]["n_runs"] == 8
    settings = document["settings"]
    assert (settings["runs"], settings["n_draft"], settings["seed"]) == (2, 5, 3)
    assert (settings["temperature"], settings["max_tokens"]) == (0.7, 8)


def test_the_document_names_the_stand_in(command: Command, cache: Path) -> None:
    stand_in = command(*SHORT, "--cache-dir", cache, "--json").document["stand_in"]
    shape = padded.plan_dimensions(SIZE)
    assert {name: stand_in[name] for name in ("n_embd", "n_layer", "n_head", "n_ff")} == {
        "n_embd": shape.n_embd,
        "n_layer": shape.n_layers,
        "n_head": shape.n_heads,
        "n_ff": shape.n_ff,
    }
    file = padded.padded_file(SIZE)
    assert stand_in["n_params"] == file.n_params
    assert stand_in["n_bytes"] == Path(stand_in["path"]).stat().st_size == file.n_bytes


@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_stand_in_is_announced_and_written_once(
    by: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "cache"
    if by == "variable":
        monkeypatch.setenv("GGUFSPEC_CACHE", str(folder))
    args = (*SHORT, "--json", *(["--cache-dir", folder] if by == "option" else []))
    first = command(*args)
    assert first.code == 0
    assert f"18 MB in {folder}" in first.err
    (file,) = folder.glob("*.gguf")
    written = file.stat()
    second = command(*args)
    assert second.code == 0
    assert "Writing" not in second.err
    assert list(folder.glob("*.gguf")) == [file]
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (written.st_mtime_ns, written.st_ino)


def test_a_terminal_gets_texts_and_a_table(command: Command, cache: Path) -> None:
    result = command(*SHORT, "--cache-dir", cache)
    assert result.code == 0
    for mode in ("plain", "speculative"):
        assert f"\n{mode}: {PROMPTS[0]}" in f"\n{result.out}"
    header = next(line for line in result.out.splitlines() if "tokens/s" in line)
    assert header.split() == ["tokens/s", "speed-up", "accepted", "tokens/round"]
    plain, speculative = (
        next(line for line in result.out.splitlines() if line.strip().startswith(f"{mode}  "))
        for mode in ("plain", "speculative")
    )
    assert "1.00" in plain
    assert "%" in speculative
    assert re.search("At temperature 0, (both wrote the same text|.*: a near-tie)[.]", result.out)
    assert "\x1b" not in result.out


def test_the_output_says_that_it_is_a_stand_in(command: Command, cache: Path) -> None:
    result = command(*SHORT, "--cache-dir", cache)
    assert "The large model is a stand-in" in result.out, "beside the numbers"
    assert result.err.startswith("The large model is a stand-in"), "and before all else"
    assert "padded with zeros" in result.err
    assert "only slower" in " ".join(result.err.split())


def test_the_table_fits_an_ascii_terminal(program: Command, cache: Path) -> None:
    result = program(*SHORT, "--cache-dir", cache, PYTHONIOENCODING="ascii")
    assert result.code == 0
    assert re.search("both wrote the same text|a near-tie", result.out)
    assert result.out.isascii()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--size", "5"], ["'5' is not a size", "250M"]),
        (["--size", "large"], ["'large' is not a size", "millions or billions"]),
        (["--size", "5M"], ["5M parameters", "10M to 8B"]),
        (["--size", "70B"], ["70B parameters", "too large", "10M to 8B"]),
        (["--runs", "0"], ["--runs"]),
        (["-n", "0"], ["-n"]),
        (["--draft-n", "0"], ["--draft-n"]),
        (["--temp", "-1"], ["--temp"]),
        (["--seed", "-1"], ["--seed"]),
        (["-t", "0"], ["--threads"]),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_used_writes_nothing(
    args: list[str], named: list[str], command: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    result = command("demo", "--size", "10M", "--cache-dir", folder, *args)
    assert (result.code, result.out) == (USAGE, "")
    assert "Traceback" not in result.err
    for part in named:
        assert part in result.err
    assert not folder.exists()


def test_a_cache_folder_that_is_a_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.write_text("something else")
    result = command(*SHORT, "--cache-dir", file)
    assert (result.code, result.out) == (ERROR, "")
    for part in ("it is a file, not a folder", str(file), "--cache-dir", "GGUFSPEC_CACHE"):
        assert part in result.err
    assert result.err.index("18 MB") < result.err.index("cannot write"), "announced, then tried"
    assert file.read_text() == "something else"


def test_ctrl_c_keeps_the_texts_that_are_whole(
    command: Command, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two to warm up, two for the first prompt, and the next is interrupted."""

    def tokenize(self: Engine, prompt: str, **how: int) -> list[int]:
        prompts.append(prompt)
        if len(prompts) == 5:
            monkeypatch.setattr("ggufspec.llama.session.LlamaSession.piece", interrupted)
        return real(self, prompt, **how)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    prompts: list[str] = []
    real = Engine.tokenize
    monkeypatch.setattr(Engine, "tokenize", tokenize)
    result = command(*SHORT, "--cache-dir", cache, "--json")
    assert result.code == INTERRUPTED
    assert result.document["n_texts"] == 1
    assert result.document["greedy"] is None
