"""`--help` of each command: sections by subject, the options that most people need first."""

from __future__ import annotations

import re

import pytest
from cli.conftest import Command

USUAL = ["Drafting", "Sampling", "Constraints", "Devices and memory", "Output"]


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
    found = sections(command(name, "--help").out)
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
    text = command(*args, "--help").out
    options = [option for listed in sections(text).values() for option in listed]
    assert options[-1] == "--help"
    assert len(options) == len(set(options))


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
