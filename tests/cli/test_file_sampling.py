"""What commands do with the sampling that the target's file recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.conftest import Command

from ggufspec.decoding.sampling_options import Sampling

SAMPLING = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": "warm"}
LINE = "sampling from the file: temperature 0.7, top-k 20, top-p 0.8"
NOT_APPLIED = "general.sampling.min_p of the file is not used, but the default: "
PROMPT = ("-p", "hi", "-n", "4")


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose file sets its sampling."""
    path = tmp_path_factory.mktemp("models") / "target.gguf"
    header = {f"general.sampling.{name}": value for name, value in SAMPLING.items()}
    return tiny.write_llama(path, header=header)


def test_run_takes_what_is_not_given(run: Command, recommending: Path) -> None:
    """A default that is given wins, too."""
    temperature = str(Sampling.temperature)
    found = run("-m", recommending, *PROMPT, "--temp", temperature, "--json")
    settings = found.document["settings"]
    assert settings["temperature"] == Sampling.temperature
    assert (settings["top_k"], settings["top_p"]) == (20, 0.8)
    assert settings["min_p"] == Sampling.min_p
    assert NOT_APPLIED in found.err
    assert "sampling from" not in found.err


def test_verbose_says_where_it_comes_from(
    run: Command, recommending: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.llama.log.show_log", lambda: None)  # it would stay on
    assert LINE in run("-m", recommending, *PROMPT, "-v").err
    assert "sampling from" not in run("-m", target, *PROMPT, "-v").err


def test_show_prints_it(command: Command, recommending: Path, target: Path) -> None:
    shown = command("models", "show", recommending).out
    assert "temperature 0.7, top-k 20, top-p 0.8" in shown
    assert NOT_APPLIED in shown
    document = command("models", "show", recommending, "--json").document
    assert document["header"]["sampling"] == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert "llama.cpp's defaults" in command("models", "show", target).out


@pytest.mark.parametrize(
    "args", [("compare", *PROMPT), ("audit", "--runs", "2", "-n", "4")], ids=lambda args: args[0]
)
def test_other_commands_have_it(
    args: tuple[str, ...], command: Command, recommending: Path, draft: Path
) -> None:
    name, *rest = args
    pair = ("--target", recommending, "--draft", draft, "-t", "1")
    settings = command(name, *pair, *rest, "--json").document["settings"]
    assert (settings["temperature"], settings["top_k"]) == (0.7, 20)


def test_a_batch_has_it(command: Command, recommending: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("hello\n")
    called = ("batch", prompts, "-o", out, "-m", recommending, "-n", "4", "-t", "1")
    found = command(*called, "--temp", "0")
    assert found.code == 0, found.err
    assert NOT_APPLIED in found.err
    plain = (*called, "--top-k", "20", "--top-p", "0.8", "--temp", "0", "--resume")
    assert command(*plain).code == 0, "the same settings, given"
    assert len(json.loads(out.read_text())["text"]) > 0


def test_benchmarks_have_it_but_presets_do_not(
    command: Command, recommending: Path, draft: Path, tmp_path: Path
) -> None:
    pair = ("--target", recommending, "--draft", draft, "-t", "1")
    short = ("--runs", "1", "--warm-up", "0", "-p", "hi", "-n", "4")

    def options(*given: str) -> list[dict[str, Any]]:
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        found = command("bench", *pair, *short, *given, "--json", out)
        assert found.code == 0, found.err
        return [each["options"] for each in json.loads(out.read_text())["contenders"]]

    for own in options():
        assert (own["temperature"], own["top_k"], own["top_p"]) == (0.7, 20, 0.8)
    for own in options("--temp", "0", "--top-k", "40"):
        assert (own["temperature"], own["top_k"]) == (0, 40)
    for own in options("--preset", "notebook"):
        assert own["temperature"] == 0
        assert "top_k" not in own
