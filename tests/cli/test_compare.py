"""`ggufspec compare`: two texts and who was faster, for people, programs, and files."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.conftest import ERROR, INTERRUPTED, Command, started
from cli.terminal import Terminal
from patience import PATIENCE

ESCAPE_SCREEN, RETURN = b"\x1b[?1049h", b"\x1b[?1049l"
SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def chatterbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the alphabet, over and over."""
    path = tmp_path_factory.mktemp("models") / "chatterbox.gguf"
    return tiny.write_scripted(path, tiny.SPM.spell(LETTERS))


@pytest.fixture
def compare(command: Command, chatterbox: Path) -> Command:
    """The alphabet against the alphabet."""
    pair = ("-m", chatterbox, "-md", chatterbox, "-t", "1", "-p", "hi", "-n", "30")
    return lambda *args, **how: command("compare", *pair, "--temp", "0", *args, **how)


def test_both_texts_and_the_result_on_stdout(compare: Command) -> None:
    result = compare("--draft-n", "4")
    assert result.code == 0
    text = (LETTERS * 2)[:30]
    assert f"plain: hi{text}\n" in result.out
    assert f"speculative: hi{text}\n" in result.out
    header = next(line for line in result.out.splitlines() if "tokens/s" in line)
    assert header.split() == ["tokens/s", "speed-up", "accepted", "tokens/round"]
    (row,) = (line for line in result.out.splitlines() if re.match("speculative +[0-9]", line))
    name, rate, speedup, accepted, length = row.split()
    assert name == "speculative"
    assert float(rate) > 0
    assert float(speedup) > 0
    assert (accepted, length) == ("100.0%", "5.00")
    assert "The two texts are the same, all 30 tokens." in result.out
    assert "`ggufspec bench`" in result.out
    assert "Plain decoding runs first" in result.err
    assert "one after the other" in result.out
    assert "\x1b" not in result.out


def test_an_empty_prompt_is_refused_before_models_are_loaded(
    command: Command, tmp_path: Path
) -> None:
    result = command("compare", "-m", tmp_path / "none.gguf", stdin=b"\n")
    assert (result.code, result.out) == (ERROR, "")
    assert result.err.startswith("ggufspec: the prompt is empty")
    assert len(result.err.splitlines()) == 1


def test_the_document(compare: Command) -> None:
    result = compare("--json", "--draft-n", "4", "--seed", "3")
    assert result.code == 0
    document = result.document
    assert (document["same_text"], document["parting"]) == (True, None)
    assert document["order"] == ["plain", "speculative"]
    for name in ("plain", "speculative"):
        lane = document[name]
        assert lane["text"] == (LETTERS * 2)[:30]
        assert "".join(chunk["text"] for chunk in lane["chunks"]) == lane["text"]
        assert sum(chunk["n_tokens"] for chunk in lane["chunks"]) == len(lane["tokens"]) == 30
        seconds = [chunk["seconds"] for chunk in lane["chunks"]]
        assert seconds == sorted(seconds)
        assert 0 < seconds[0] <= seconds[-1]
        assert -1e-3 < seconds[-1] - 30 / lane["tokens_per_second"] < 1
    assert not any(chunk["drafted"] for chunk in document["plain"]["chunks"])
    drafted = [chunk["n_tokens"] for chunk in document["speculative"]["chunks"] if chunk["drafted"]]
    assert sum(drafted) == document["speculative"]["n_accepted"] == 24
    rates = [document[name]["tokens_per_second"] for name in document["order"]]
    assert document["speedup"] == pytest.approx(rates[1] / rates[0])
    assert (document["settings"]["seed"], document["settings"]["n_draft"]) == (3, 4)


def test_sampled_texts_differ_and_it_says_why(command: Command, target: Path, draft: Path) -> None:
    pair = ("-m", target, "-md", draft, "-t", "1", "-p", "hi", "-n", "20", "--draft-n", "3")
    result = command("compare", *pair, "--temp", "1", "--seed", "1")
    assert result.code == 0
    assert "both are drawn from the same distribution" in " ".join(result.out.split())
    seeds = {command("compare", *pair, "--json").document["settings"]["seed"] for _ in range(2)}
    assert len(seeds) == 2, "a fresh one each time, and told"


def test_text_that_no_draft_model_drafts_is_called_n_grams(
    command: Command, chatterbox: Path
) -> None:
    args = ("-m", chatterbox, "-t", "1", "-p", LETTERS, "-n", "30", "--temp", "0")
    assert command("compare", *args, "--json").document["speculative"]["n_accepted"] > 0
    result = command("compare", *args, "--drafter", "ngram")
    assert result.code == 0
    assert "speculative:" not in result.out
    assert re.search("^n-grams: ", result.out, re.MULTILINE)
    assert re.search("^n-grams +[0-9]", result.out, re.MULTILINE)


# Several drafts


@pytest.fixture
def stranger(chatterbox: Path) -> Path:
    """Drafts for the alphabet, but writes it backwards."""
    path = chatterbox.with_name("stranger.gguf")
    return tiny.write_scripted(path, tiny.SPM.spell(LETTERS[::-1]))


def several(command: Command, target: Path, drafts: str, *args: str) -> Any:
    pair = ("-m", target, "-md", drafts, "-t", "1", "-p", "hi", "-n", "30", "--temp", "0")
    return command("compare", *pair, "--draft-n", "4", "--drafter", "model", *args)


def test_several_drafts_are_ranked(command: Command, chatterbox: Path, stranger: Path) -> None:
    drafts = f"{stranger},{chatterbox}"
    document = several(command, chatterbox, drafts, "--json").document
    ranking = {each["draft"]: each for each in document["ranking"]}
    assert set(ranking) == {"stranger", "chatterbox"}
    assert (ranking["stranger"]["acceptance"], ranking["chatterbox"]["acceptance"]) == (0, 1)
    assert all(each["ms_per_step"] > 0 for each in ranking.values())
    speedups = [each["speedup"] for each in document["ranking"]]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] == document["speedup"], "the document is that of the fastest"
    assert document["settings"]["draft"].endswith(f"{document['ranking'][0]['draft']}.gguf")

    result = several(command, chatterbox, drafts)
    assert result.code == 0
    assert "draft 1 of 2: stranger" in result.err
    assert result.err.count("Plain decoding runs first") == 1
    lines = result.out.splitlines()
    header = next(line for line in lines if "tokens/s" in line)
    assert header.split()[:3] == ["draft", "plain", "tokens/s"]
    assert header.split()[-1] == "ms/step"
    rows = [line.split() for line in lines if re.match(r"(stranger|chatterbox) +\d", line)]
    assert {row[0] for row in rows} == {"stranger", "chatterbox"}
    assert all(len(row) == len(header.split()) for row in rows)
    assert f"Fastest: {rows[0][0]}." in result.out or "No draft is faster" in result.out


def test_a_comma_in_the_name_of_a_file(command: Command, chatterbox: Path, tmp_path: Path) -> None:
    path = tmp_path / "a,b.gguf"
    path.write_bytes(chatterbox.read_bytes())
    document = several(command, chatterbox, str(path), "--json").document
    assert document["settings"]["draft"] == str(path)
    assert "ranking" not in document


# Recordings


def test_a_race_is_recorded_in_place_of_an_old_file(compare: Command, tmp_path: Path) -> None:
    path = tmp_path / "race.svg"
    path.write_text("of old")
    result = compare("--json", "--record", path)
    assert result.code == 0
    assert f"the race is in {path}" in result.err
    assert path.read_text(encoding="utf-8").count("abcdefghij") >= 2
    assert list(tmp_path.iterdir()) == [path]


# Terminals


def pair(model: Path, *args: str) -> list[str]:
    return ["-m", str(model), "-md", str(model), "-p", "hi", "-n", "30", "--temp", "0", *args]


def test_the_race_on_a_terminal(chatterbox: Path) -> None:
    code, out, _ = Terminal(
        "compare", "-t", "1", *pair(chatterbox, "--speed", "0.02"), talk=True
    ).end()
    assert (code, "Traceback" in out) == (0, False)
    before, _, screen = out.partition(ESCAPE_SCREEN.decode())
    for name in ("plain, warming up: 1 of 16", "plain: 1 of 30", "speculative: "):
        assert f"\r\x1b[K{name}" in before
    assert before.rpartition("tokens")[2].startswith("\r\x1b[K"), "and the line is gone"
    screen, _, after = screen.partition(RETURN.decode())
    assert HIDE_CURSOR.decode() in screen
    assert SHOW_CURSOR.decode() in out[-len(after) - 40 :]
    frames = screen.split("Prompt: hi")[1:]
    assert "0 of 30" in frames[0]
    assert "╭" in frames[0], "boxes where the terminal has them"
    assert "abc" not in frames[0]
    assert "so far" in screen
    assert after.replace("\x1b[32m", "").replace("\x1b[0m", "").count((LETTERS * 2)[:30]) == 2
    assert "\x1b[32m" in after, "drafted tokens are green"
    assert "The two texts are the same" in after


def test_a_resized_terminal_without_color_and_ctrl_c_in_the_replay(chatterbox: Path) -> None:
    terminal = Terminal("compare", "-t", "1", *pair(chatterbox, "--speed", "0.001"), NO_COLOR="1")
    terminal.read_until(b"0 of 30")
    terminal.resize(60, 20)
    terminal.read_until("╭".encode() + "─ plain, the target alone ".encode() + "─".encode() * 31)
    terminal.process.send_signal(signal.SIGINT)
    code, out, err = terminal.end()
    assert code == INTERRUPTED
    assert "Traceback" not in err
    assert re.findall(r"\x1b\[[0-9;]*m", out.replace("\x1b[0m", "")) == []
    _, _, after = out.partition(RETURN.decode())
    assert SHOW_CURSOR.decode() in out
    assert "30 tokens in" in after
    assert "The two texts are the same" in after


def test_ctrl_c_while_they_run(chatterbox: Path) -> None:
    args = ("-m", chatterbox, "-p", "hi", "-n", "99000", "-c", "100000", "--temp", "0")
    with started("compare", "-t", "1", "-v", *args) as process:
        assert process.stderr is not None
        try:
            assert any(b"runs first" in line for line in process.stderr)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()  # nothing, where it has ended
    assert (process.returncode, out) == (INTERRUPTED, b"")
    assert err.splitlines()[-1] == b"ggufspec: interrupted"
    assert b"Traceback" not in err


def test_a_terminal_without_a_cursor_gets_visible_text(tmp_path: Path) -> None:
    evil = "\x1b[2J\x07\x1b]0;title\x9b5m"
    model = tiny.write_timed(tmp_path / "evil.gguf", tiny.SPM.spell(evil), n_prompt=3)
    code, out, _ = Terminal("compare", "-t", "1", *pair(model), TERM="dumb").end()
    assert code == 0
    assert "plain: hi" in out
    assert "[2J" in out, "what is left of it"
    assert "\x1b" not in out
    assert "\x07" not in out
