"""`ggufspec demo` is `ggufspec compare` of the embedded pair, and says what its large model is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from cli.conftest import ERROR, Command

from ggufspec.standin import embedded, padded

SHORT = ("demo", "--size", "10M", "-n", "12", "-t", "1")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the stand-in."""
    folder = tmp_path_factory.mktemp("cache")
    padded.padded_target(10_000_000, folder)
    return folder


def test_the_document_is_that_of_compare(command: Command, cache: Path) -> None:
    args = (*SHORT[1:], "--cache-dir", cache, "--json", "--draft-n", "3", "--seed", "1")
    document, same = (command(name, *args).document for name in ("demo", "compare"))
    assert document["prompt"] == same["prompt"] == "Up betimes, and by water to Whitehall,"
    assert document["settings"] == same["settings"]
    settings = document["settings"]
    assert (settings["temperature"], settings["repeat_penalty"]) == (0, 1.15)
    assert settings["draft"] == str(embedded.embedded_draft())
    assert document["same_text"] or document["divergence"]["near_tie"]
    assert document["plain"]["n_generated"] == document["speculative"]["n_generated"] == 12
    assert document["speculative"]["n_accepted"] > 0


def test_help_lists_few_options(command: Command) -> None:
    shown = command("demo", "--help").out
    assert "--size" in shown
    assert "--top-k" not in shown
    assert "--top-k" in command("compare", "--help").out


def test_the_texts_do_not_go_in_circles_and_fit_an_ascii_terminal(
    program: Command, cache: Path
) -> None:
    """Of 64 tokens, no phrase of five words comes three times."""
    result = program(*SHORT, "-n", "64", "--cache-dir", cache, PYTHONIOENCODING="ascii")
    assert result.code == 0
    assert result.err.startswith("The large model is a stand-in"), "before all else"
    assert "padded with zeros" in result.err
    assert result.out.isascii()
    plain, speculative = result.out.split("speculative: ", 1)
    speculative, _, after = speculative.partition("tokens/s")
    assert plain.startswith("plain: ")
    for text in (plain, speculative):
        words = text.split()
        phrases = Counter(zip(*(words[i:] for i in range(5)), strict=False))
        assert max(phrases.values()) < 3, text
    after = " ".join(after.split())
    assert "The two texts are the same" in after or "a near-tie" in after


def test_the_stand_in_is_announced_and_written_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "cache"
    monkeypatch.setenv("GGUFSPEC_CACHE", str(folder))
    assert f"18 MB in {folder}" in command(*SHORT, "--json").err
    (file,) = folder.glob("*.gguf")
    written = file.stat()
    assert "Writing" not in command(*SHORT, "--json", "--cache-dir", folder).err
    assert list(folder.glob("*.gguf")) == [file]
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (written.st_mtime_ns, written.st_ino)


def test_a_cache_folder_that_is_a_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.write_text("something else")
    result = command(*SHORT, "--cache-dir", file)
    assert (result.code, result.out) == (ERROR, "")
    for part in ("it is a file, not a folder", str(file), "--cache-dir", "GGUFSPEC_CACHE"):
        assert part in result.err
    assert result.err.index("18 MB") < result.err.index("cannot write"), "announced, then tried"
    assert file.read_text() == "something else"
