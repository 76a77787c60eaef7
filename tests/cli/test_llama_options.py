"""llama.cpp's command lines run: each of its options has an effect, is explained, or is refused.

Another version of llama.cpp: `python -m tests.benchmarks.llama_options llama-server llama-cli`,
and these tests say what the table lacks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import click
import pytest
from cli.conftest import Command

from ggufspec.cli import llama_lines
from ggufspec.cli.llama_lines import Row, rows, translated
from ggufspec.cli.main import cli
from ggufspec.cli.options import NamedOption
from tests.benchmarks.llama_options import options_of, recorded

TABLE = Path(llama_lines.__file__).with_name("llama_options.toml")
ALL = ("run", "chat", "serve")
# Of earlier versions of llama.cpp; people still write them.
EARLIER = {"-cnv", "--conversation", "-no-cnv", "--no-conversation", "-i", "--interactive"}


@cache
def command_of(name: str) -> click.Command:
    found: click.Command = importlib.import_module(f"ggufspec.cli.{name}").command
    return found


@cache
def options(command: str) -> frozenset[str]:
    of = cli if command == "ggufspec" else command_of(command)
    found = {
        name
        for each in of.get_params(click.Context(of, help_option_names=["-h", "--help"]))
        if isinstance(each, click.Option)
        for name in (*each.opts, *each.secondary_opts)
    }
    return frozenset(found)


OWN = {name for command in (*ALL, "ggufspec") for name in options(command)}
READ = {  # variables that click reads
    variable
    for command in ALL
    for each in command_of(command).params
    if isinstance(each, NamedOption)
    for variable in each.envvar or ()
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")


def listed(section: str) -> list[str]:
    return [name for row in rows() if row.section == section for name in row.names]


def test_the_table_has_each_option_that_has_no_counterpart_of_its_name() -> None:
    known = {name for each in recorded() for name in each.names}
    names = {name for row in rows() for name in row.names}
    assert known - OWN - names == set(), "write rows for them"
    assert names - known - EARLIER == {"-nr"} - known, "llama.cpp has them no longer"
    for section in ("differs", "instead", "no_effect", "refused"):
        named = [
            (name, row.commands) for row in rows() if row.section == section for name in row.names
        ]
        assert len(named) == len(set(named)), section
    assert set(listed("differs")) <= OWN


def test_rows_take_as_many_values_as_llama_cpp() -> None:
    n_values = {name: each.n_values for each in recorded() for name in each.names}
    for row in rows():
        if row.section != "differs":
            for name in {*row.names} - EARLIER:
                assert row.n_values in (n_values[name], n_values[name] + row.may_lack_value), name
    for command in ALL:
        for each in command_of(command).params:
            for name in {*each.opts} & n_values.keys():
                if name not in ("--slots", "--draft"):  # of another meaning
                    n = 0 if isinstance(each, click.Option) and each.is_flag else each.nargs
                    assert n == n_values[name], name


def others(by_value: Mapping[str, str]) -> list[str]:
    return [text for pattern, text in by_value.items() if pattern != "else"]


def targets(row: Row) -> list[str]:
    """The options and variables that a row puts in place of others."""
    texts = [row.what] if isinstance(row.what, str) else others(row.what)
    return [word for text in texts for word in text.split() if text[0] in "-$" and len(word) > 1]


def test_rows_name_options_that_exist() -> None:
    for row in rows():
        if row.section in ("renamed", "instead", "by_value"):
            named = [name for name in targets(row) if name[0] == "-" and not name[1].isdigit()]
            assert {*named} <= OWN, row
    for row in rows():
        for text in (row.what,) if isinstance(row.what, str) else row.what.values():
            for words in map(str.split, re.findall(r"`ggufspec ([^`]+)`", text)):
                if len(words) > 1 and words[1].startswith("-"):
                    assert words[1] in options(words[0])


def test_variables_are_those_of_the_same_options() -> None:
    names: dict[str, set[str]] = {}
    for each in recorded():
        names.setdefault(each.variable, set()).update(each.names)
    for row in rows():
        for variable in row.variables:
            assert names[variable] & {*row.names}, variable
            assert variable not in READ or row.commands, variable
    for command in ALL:
        for parameter in command_of(command).params:
            for variable in parameter.envvar or () if isinstance(parameter, NamedOption) else ():
                if variable.startswith("LLAMA_"):
                    assert names[variable] & {*parameter.opts}, variable


@pytest.mark.parametrize("command", ALL)
def test_each_option_is_mapped_accepted_or_refused_by_name(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    outcomes: dict[str, int] = {"own": 0, "mapped": 0, "accepted": 0, "refused": 0}
    for each in recorded():
        for name in {*each.names} - {"-h", "--help"}:
            outcome = outcome_of(command, name, [str(tmp_path / "file")] * each.n_values)
            outcomes[outcome] += 1
    assert sum(outcomes.values()) == sum(
        len({*each.names} - {"-h", "--help"}) for each in recorded()
    )
    assert min(outcomes.values()) > 15, outcomes


def outcome_of(command: str, name: str, values: list[str]) -> str:
    given = ["-m", "user/repo", name, *values]
    try:
        arguments, note = translated(command_of(command), given)
    except click.UsageError as error:
        return "refused" if f"no option {name}. Instead: " in error.message else error.message
    if name in note:
        assert re.search(rf"{re.escape(name)}.*\(.+\)", note), "with a reason"
        assert arguments == ["-m", "user/repo"]
        return "accepted"
    assert {word for word in arguments if word[:1] == "-"} <= options(command), arguments
    return "own" if name in arguments else "mapped"


def test_names_of_llama_cpp_are_left_out_of_help_and_errors(command: Command) -> None:
    known = {name for each in recorded() for name in each.names}
    shown = command("run", "--help-all").out + command("serve", "--help-all").out
    for each in (*command_of("run").params, *command_of("serve").params):
        for alias in getattr(each, "aliases", ()):
            assert alias in known
            assert not re.search(rf"^  (-\w+, )?{alias}[, ]", shown, re.MULTILINE), alias
    failed = command("run", "--model", "a.gguf", "--predict", "none")
    assert failed.code == 2
    assert "Invalid value for '-n' / '--n-predict': 'none' is not a valid integer" in failed.err


def test_options_are_read_from_help() -> None:
    text = (
        "----- common params -----\n\n"
        "-t,    --threads N                      number of threads (env: LLAMA_ARG_THREADS)\n"
        "--mlock                                 keep it\n"
        "----- example-specific params -----\n"
        "-kvu,  --kv-unified, -no-kvu, --no-kv-unified\n"
        "                                        use a unified cache - or not\n"
        "                                        (env: LLAMA_ARG_KV_UNIFIED)\n"
        "-fa,   --flash-attn [on|off|auto]       set it\n"
        "--layer-range START END\n"
    )
    assert [(*each,) for each in options_of(text)] == [
        ("common params", ("-t", "--threads"), "LLAMA_ARG_THREADS", 1),
        ("common params", ("--mlock",), "", 0),
        (
            "example-specific params",
            ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
            "LLAMA_ARG_KV_UNIFIED",
            0,
        ),
        ("example-specific params", ("-fa", "--flash-attn"), "", 1),
        ("example-specific params", ("--layer-range",), "", 2),
    ]


def test_the_guide_to_the_command_line_leads_there() -> None:
    assert f"({TABLE.name})" in TABLE.with_name("README.md").read_text(encoding="utf-8")
