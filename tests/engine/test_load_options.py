"""The options of `load`: their rows in the table, the guide, the signature of `load`, refusals."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ggufspec
from ggufspec.cli.options import TABLE, help_text, parameter_of
from ggufspec.engine import load_options
from ggufspec.engine.load_options import OPTIONS, LoadOptions

GUIDE = Path(load_options.__file__).with_name("README.md")
ROWS = {
    parameter_of(names): (names, row)
    for names, row in TABLE["load"].items()
    if "flag_value" not in row
}


def line(name: str) -> str:
    """The option's row in the guide; what is not in all commands names one that has it."""
    names, row = ROWS[name]
    shown = names.partition("|")[0]
    flags = ", ".join(f"`{flag}`" for flag in shown.split() if flag.startswith("-"))
    where = f" (`{row['for']}`)" if row.get("for") == "serve" else ""
    meaning, _, end = help_text(row["help"]).partition("  [default: ")
    default = "none" if OPTIONS[name].default in (None, ()) else f"{OPTIONS[name].default}"
    return f"| `{name}` | {flags}{where} | {meaning.partition('  [')[0]} | {end[:-1] or default} |"


def test_the_guide_has_the_table() -> None:
    lines = [line(name) for name in OPTIONS]
    found = re.findall(
        r"^\| `\w+` \| .*? \| .*? \| .*? \|$", GUIDE.read_text("utf-8"), re.MULTILINE
    )
    assert found == lines, "put this into the guide:\n" + "\n".join(lines)


def test_load_has_the_defaults_of_the_table() -> None:
    named = inspect.signature(ggufspec.load).parameters
    given = {name: each.default for name, each in named.items() if name in OPTIONS}
    assert len(given) > 8
    assert given == {name: OPTIONS[name].default for name in given}


def test_nothing_given_is_what_the_fields_have(tmp_path: Path) -> None:
    assert LoadOptions.of(tmp_path, None, {}) == LoadOptions(tmp_path)


@pytest.mark.parametrize(("name", "near"), [("n_bach", "n_batch"), ("n_slot", "n_slots")])
def test_an_unknown_option_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"no option '{name}'; do you mean {near}\?"):
        ggufspec.load("none.gguf", **{name: 5})
    with pytest.raises(TypeError, match=r"no option 'xyz'$"):
        ggufspec.load("none.gguf", xyz=5)
