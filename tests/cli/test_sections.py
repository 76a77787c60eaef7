"""`--help` of a command has the options that most people need, `--help-all` sections with all."""

from __future__ import annotations

import importlib
import re

import pytest
from cli.conftest import Command

USUAL = ["Sampling", "Constraints", "Drafting", "Devices and memory", "Output"]


def names(text: str) -> list[str]:
    """The first long name of each option of a --help, or its only one."""
    return re.findall(r"^  (?:-\w+, )?(--?[\w-]+)", text, re.MULTILINE)


def sections(text: str) -> dict[str, list[str]]:
    """The titles of a --help, each with the first name of its options."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.fullmatch(r"([A-Z][a-z ]+):", line):
            found[title[1]] = []
        elif found and (option := re.match(r"  (?:-\w+, )?(--?[\w-]+)", line)):
            found[list(found)[-1]].append(option[1])
    return found


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("run", ["--target", "--draft", "--prompt", "--file"]),
        ("chat", ["--target", "--draft"]),
        ("compare", ["--target", "--draft", "--prompt", "--file"]),
        ("audit", ["--target", "--draft", "--prompts"]),
        ("batch", ["--target", "--draft", "--output"]),
        ("bench", ["--preset", "--target", "--draft", "--prompt", "--prompts"]),
    ],
)
def test_options_are_grouped_and_the_usual_ones_come_first(
    command: Command, name: str, first: list[str]
) -> None:
    found = sections(command(name, "--help-all").out)
    assert next(iter(found)) == "Options"
    assert found["Options"] == first
    assert [title for title in found if title in USUAL] == USUAL
    assert found["Output"][-1] == "--help"
    assert "--lora-draft" in found["Models"]


@pytest.mark.parametrize(
    "args",
    [["serve"], ["plan"], ["tune"], ["trim"], ["demo"], ["standin"], ["bench", "compare"]],
    ids=" ".join,
)
def test_every_option_is_in_one_section(command: Command, args: list[str]) -> None:
    text = command(*args, "--help-all" if args == ["serve"] else "--help").out
    options = [option for listed in sections(text).values() for option in listed]
    assert options[-1] == "--help"
    assert len(options) == len(set(options))


@pytest.mark.parametrize("name", ["run", "chat", "serve", "bench", "compare", "batch", "audit"])
def test_help_fits_on_a_screen(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text, everything = command(name, "--help").out, command(name, "--help-all").out
    listed = names(text)
    assert len(listed) <= 25
    assert len(text.splitlines()) <= 60
    usual = {"--target", "--draft", "--draft-n", "--ctx-size", "--gpu-layers", "--threads"}
    assert {*usual, "--top-k", "--verbose", "--help-all"} <= {*listed}
    assert {*listed} < {*names(everything)}
    assert not re.search(r"\[\S*<?[<>]=?\S*\]|in run,", everything)


@pytest.mark.parametrize("name", ["run", "serve"])
def test_help_all_lists_each_option(command: Command, name: str) -> None:
    listed = {*names(command(name, "--help-all").out)}
    for each in importlib.import_module(f"ggufspec.cli.{name}").command.params:
        if not each.hidden:
            assert listed & {*each.opts} - {*getattr(each, "aliases", ())}, each.opts


def test_help_is_the_same_without_a_terminal_of_any_width(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = set()
    for width in ("200", "100"):
        monkeypatch.setenv("COLUMNS", width)
        texts.add(command("run", "--help").out)
    (text,) = texts
    assert "\x1b" not in text
    assert text.isascii()


@pytest.mark.parametrize("args", [["bench", "compare"], ["standin"], ["batch"]], ids=" ".join)
def test_arguments_are_in_the_usage_line_only(command: Command, args: list[str]) -> None:
    usage, _, rest = command(*args, "--help").out.partition("Options:")
    for argument in re.findall(r"\b[A-Z]{3,}\b", usage.partition("\n")[0].replace("OPTIONS", "")):
        assert not re.search(rf"^  {argument}\s*$", rest, re.MULTILINE)
