"""The table of options and the library agree on the options of a text and of `load`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ggufspec
from ggufspec.cli import run, serve
from ggufspec.cli.options import TABLE, parameter_of
from ggufspec.decoding.sampling_options import NUMBERS, SAMPLING
from ggufspec.engine.load_options import OPTIONS, LoadOptions
from ggufspec.engine.options import CheckedOptions, GenerateOptions

TEXT = GenerateOptions.__annotations__.keys()
ONLY_IN_PYTHON = {  # or in requests to a server
    *("max_seconds", "min_indent", "min_tokens", "shown_tokens", "stop_tokens", "progress"),
}
ONES = {"dynatemp_exponent"}  # whose default 1 is not "off"


@pytest.fixture
def given() -> dict[str, Any]:
    """What `ggufspec run` is given if the command line has only a target."""
    return run.command.make_context("run", ["--target", "a.gguf"]).params


def test_each_option_of_a_text_is_on_the_command_line(given: dict[str, Any]) -> None:
    assert TEXT - given.keys() == ONLY_IN_PYTHON


def test_the_types_of_options_and_the_checked_ones_have_the_same_names() -> None:
    fields = CheckedOptions.__dataclass_fields__.keys() - {"sampling", "constraint_grammar"}
    assert fields | {*SAMPLING} == TEXT


def test_the_command_line_has_the_defaults_of_the_library(given: dict[str, Any]) -> None:
    text = {name: given[name] for name in TEXT & given.keys()}
    assert CheckedOptions.of(text) == CheckedOptions()  # type: ignore[arg-type]
    load = {name: given[name] for name in OPTIONS.keys() & given.keys()}
    assert LoadOptions.of("a.gguf", None, load) == LoadOptions(Path("a.gguf"))


def test_each_option_of_load_has_a_row_and_is_in_some_command(given: dict[str, Any]) -> None:
    assert {parameter_of(names) for names in TABLE["load"]} == {*OPTIONS}
    served = serve.command.make_context("serve", []).params
    assert OPTIONS.keys() - given.keys() - served.keys() == {"usual_text", "tuned"}


def test_the_guide_has_the_sampling_options_with_their_defaults() -> None:
    guide = Path(ggufspec.__file__).with_name("decoding") / "README.md"
    table = re.findall(r"^\| (`--.*?) \| (`.*?) \|.*?\| (.*?) \|$", guide.read_text("utf-8"), re.M)
    flags, defaults = set[str](), dict[str, str]()
    for names, fields, shown in table:
        flags |= {*re.findall(r"`(--[\w-]+)`", names)}
        named = re.findall(r"`(\w+)`", fields)
        defaults |= zip(named, shown.split(", "), strict=False)
    assert defaults.keys() == {*SAMPLING, "dry_sequence_breakers", "banned_strings"}
    for name, option in NUMBERS.items():
        is_off = option.default == 1 or option.default <= 0
        assert defaults[name] == ("off" if is_off else f"{option.default:g}") or name in ONES, name
    assert flags <= {name for each in run.command.params for name in each.opts}
