"""The guide's table of llama.cpp's options is complete and true; its variables are defaults here.

Another version of llama.cpp: `python -m tests.benchmarks.llama_options llama-server llama-cli`,
and these tests say what the table lacks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from cli.conftest import Command

from ggufspec.cli import parameters
from ggufspec.cli.main import cli
from ggufspec.cli.parameters import NamedOption
from tests.benchmarks.llama_options import options_of, recorded

GUIDE = Path(parameters.__file__).with_name("llama_options.md")
ALL = ("run", "chat", "serve")


class Row(NamedTuple):
    section: str
    names: tuple[str, ...]
    ours: str
    variables: tuple[str, ...]
    why: str


def ticked(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def read_rows() -> Iterator[Row]:
    section = ""
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:].lower()
        elif line.startswith("| `"):
            names, ours, variables, why = map(str.strip, line.strip("|").split(" | "))
            yield Row(section, ticked(names), ours, ticked(variables), why)


ROWS = list(read_rows())


@cache
def command_of(name: str) -> click.Command:
    found: click.Command = importlib.import_module(f"ggufspec.cli.{name}").command
    return found


@cache
def options(command: str, *, hidden: bool | None = None) -> frozenset[str]:
    """The names of a command's options; hidden: only those that --help leaves out, or has."""
    of = cli if command == "ggufspec" else command_of(command)
    found = {
        name
        for each in of.get_params(click.Context(of, help_option_names=["-h", "--help"]))
        if isinstance(each, click.Option) and hidden in (None, each.hidden)
        for name in (*each.opts, *each.secondary_opts)
    }
    return frozenset(found)


def test_each_option_of_llama_cpp_is_in_the_table_once() -> None:
    sections: dict[str, set[str]] = {}
    for known in recorded():
        for name in known.names:
            sections.setdefault(name, set()).add(known.section)
    listed = [name for row in ROWS for name in row.names]
    assert sections.keys() - listed == set(), "write rows for them"
    assert set(listed) - sections.keys() == set(), "llama.cpp has them no longer"
    assert len(listed) == len(set(listed))
    wrong = [(row.section, name) for row in ROWS for name in row.names]
    assert [each for each in wrong if each[0] not in sections[each[1]]] == []


def test_each_row_is_true() -> None:
    for row in ROWS:
        check(row)


def check(row: Row) -> None:
    kind, _, where = row.ours.partition(":")
    commands = ticked(where) or ALL
    if kind == "same":
        for command in commands:
            assert set(row.names) <= options(command, hidden=False), command
    elif kind in ("no", "refused", "other meaning"):
        found = {name for command in ALL for name in options(command) & set(row.names)}
        refused = {name for command in ALL for name in options(command, hidden=True)}
        assert bool(found) == (kind != "no"), found
        assert bool(found & refused) == (kind == "refused")
        assert row.why, "a reason, or what to do instead"
    else:
        assert ticked(row.ours)
        for words in map(str.split, ticked(row.ours)):
            if words[0] == "models":
                assert words[1] in command_of("models").commands  # type: ignore[attr-defined]
            elif words[0].startswith("-"):
                for command in ALL:
                    assert words[0] in options(command)
            else:
                assert set(words[1:]) <= options(words[0])


def test_variables_are_those_of_the_same_options() -> None:
    names = {each.variable: set(each.names) for each in recorded() if each.variable}
    found = set()
    for each in (each for name in ALL for each in command_of(name).params):
        for variable in each.envvar or () if isinstance(each, NamedOption) else ():
            if variable.startswith("LLAMA_"):
                assert names[variable] & {*each.opts}, variable
                found.add(variable)
    assert sorted(variable for row in ROWS for variable in row.variables) == sorted(found)
    for row in ROWS:
        for variable in row.variables:
            assert names[variable] <= {*row.names, "-nr"}, variable


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


def test_both_spellings_are_one_option(run: Command, target: Path, draft: Path) -> None:
    shared = ("-p", "hello", "--seed", "1", "-c", "64", "--json")
    ours = ("-m", target, "-md", draft, "-n", "4", "--temp", "0", "--stop", "zzz", "-ngl", "-1")
    theirs = ("--model", target, "--spec-draft-model", draft, "--predict", "4")
    theirs = (*theirs, "--temperature", "0", "-r", "zzz", "--n-gpu-layers", "all")
    first, second = (run(*given, *shared).document for given in (ours, theirs))
    assert first["settings"] == second["settings"]
    assert first["text"] == second["text"]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, target: Path) -> Callable[..., None]:
    """Sets environment variables without their beginning; the target is one."""

    def give(**values: object) -> None:
        for name, value in {"MODEL": target, "N_PREDICT": 4, **values}.items():
            monkeypatch.setenv(f"LLAMA_ARG_{name}", str(value))

    return give


def test_variables_are_defaults(run: Command, variables: Callable[..., None]) -> None:
    variables(CTX_SIZE=64, REPACK="off", TOP_K=7, ROPE_SCALE=2, N_GPU_LAYERS="all")
    settings = run("-p", "hello", "--top-k", "5", "--json").document["settings"]
    assert settings["target"].endswith(".gguf")
    expected = {"n_ctx": 64, "max_tokens": 4, "repack": False, "rope_scale": 2.0}
    expected |= {"n_gpu_layers": -1, "top_k": 5}
    assert {name: settings[name] for name in expected} == expected


def test_variables_of_a_draft_are_no_error_without_one(
    run: Command, variables: Callable[..., None]
) -> None:
    variables(N_GPU_LAYERS_DRAFT=3, SPEC_DRAFT_N_CPU_MOE=1)
    assert run("-p", "hello").code == 0
    failed = run("-p", "hello", "-ngld", "3")
    assert (failed.code, "needs a draft model" in failed.err) == (2, True)


def test_own_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "theirs")
    (key,) = (each for each in command_of("serve").params if each.name == "api_key")
    assert key.value_from_envvar(click.Context(command_of("serve"))) == "theirs"
    monkeypatch.setenv("GGUFSPEC_API_KEY", "ours")
    assert key.value_from_envvar(click.Context(command_of("serve"))) == "ours"


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
    )
    assert [(*each,) for each in options_of(text)] == [
        ("common params", ("-t", "--threads"), "LLAMA_ARG_THREADS"),
        ("common params", ("--mlock",), ""),
        (
            "example-specific params",
            ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
            "LLAMA_ARG_KV_UNIFIED",
        ),
        ("example-specific params", ("-fa", "--flash-attn"), ""),
    ]


def test_the_guide_to_the_command_line_leads_there() -> None:
    assert f"({GUIDE.name})" in GUIDE.with_name("README.md").read_text(encoding="utf-8")
