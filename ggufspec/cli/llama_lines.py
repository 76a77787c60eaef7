"""Translates llama.cpp's options, which llama_options.toml lists, into a command's own options."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

import click

from ggufspec.common.reading import read_text, read_toml
from ggufspec.errors import OptionError

_PREFIX = "LLAMA_ARG_"  # of variables
_OTHERS = ("serve", "run")  # commands that may have an option which another one lacks
_TARGET = ("-m", "--model", "--target")
_NUMBER = re.compile(r"\d+")


class Row(NamedTuple):
    """A row of the table: what llama.cpp's options of these names mean."""

    section: str
    names: tuple[str, ...]
    commands: tuple[str, ...]  # those that it is for; empty: all
    n_values: int
    may_lack_value: bool
    variables: tuple[str, ...]
    what: str | Mapping[str, str]


class Meaning(NamedTuple):
    kind: Literal["own", "renamed", "options", "no_effect", "refused"]  # own: as click reads it
    what: str = ""


@cache
def rows() -> tuple[Row, ...]:
    table = read_toml(Path(__file__).with_name("llama_options.toml"))
    each = ((section, *item) for section in table for item in table[section].items())
    return tuple(_row(section, key.split(), what) for section, key, what in each)


def _row(section: str, words: Sequence[str], what: str | Mapping[str, str]) -> Row:
    values = [word for word in words if word[0] == "[" or (word.isalpha() and word.isupper())]
    return Row(
        section,
        tuple(word for word in words if word[0] == "-"),
        tuple(word for word in words if word.islower() and word.isalpha()),
        len(values),
        any(word[0] == "[" for word in values),
        tuple(word[1:] for word in words if word[0] == "$"),
        what,
    )


def translated(command: click.Command, arguments: Sequence[str]) -> tuple[list[str], str]:
    """The arguments of a command in its own options, and a line on what has no effect, or "".

    Variables of llama.cpp count as options given first, unless click reads them; HF_TOKEN is set
    if it is given as an option. Raises UsageError for an option that is refused.
    """
    line = _Line(command)
    line.read_variables()
    line.read(arguments)
    return line.arguments, line.note


class _Line:
    def __init__(self, command: click.Command) -> None:
        self.arguments: list[str] = []
        self._command = command
        self._own: dict[str, int] = {}  # the number of values of each of the command's options
        self._variables: set[str] = set()  # that click reads
        for each in command.params:
            if isinstance(each, click.Option):
                n_values = 0 if each.is_flag or each.count else each.nargs
                self._own |= dict.fromkeys((*each.opts, *each.secondary_opts), n_values)
                found = each.envvar or ()
                self._variables |= {found} if isinstance(found, str) else {*found}
        self._rows: dict[str, dict[str, Row]] = defaultdict(dict)  # by name and section
        for row in rows():
            if row.section != "differs" and command.name in (row.commands or [command.name]):
                for name in row.names:
                    self._rows[name].setdefault(row.section, row)
        self._without_effect: dict[str, list[str]] = defaultdict(list)  # by reason
        self._file = ""  # of --hf-file

    @property
    def note(self) -> str:
        named = (
            (why, ", ".join(dict.fromkeys(each))) for why, each in self._without_effect.items()
        )
        listed = "; ".join(f"{names} ({why})" if why else names for why, names in named)
        return f"without effect here: {listed}" if listed else ""

    def read_variables(self) -> None:
        """Begin with the options that variables set; name the variables without effect."""
        given = {name for name, value in os.environ.items() if name.startswith(_PREFIX) and value}
        rest = given - self._variables
        for row in rows():
            for variable in sorted(rest & {*row.variables}):
                name, value = row.names[0], os.environ[variable]
                meaning = self._meaning(name, value) if name in self._rows else Meaning("refused")
                if meaning.kind in ("renamed", "options"):
                    self.arguments += self._words(name, value, meaning)
                elif meaning.kind == "own":
                    self.arguments += (name, value)
                else:
                    why = meaning.what if meaning.kind == "no_effect" else ""
                    self._without_effect[why].append(variable)
                rest.remove(variable)
        if rest:
            self._without_effect[""] += sorted(rest)

    def read(self, arguments: Sequence[str]) -> None:
        """Add what was given. Raises UsageError."""
        own: list[str] = []
        renamed: list[str] = []
        for words in self._split(arguments):
            name, value = words[0], " ".join(words[1:])
            meaning = self._meaning(name, value)
            if meaning.kind == "refused":
                raise click.UsageError(
                    f"`ggufspec {self._command.name}` has no option {name}. Instead: {meaning.what}"
                )
            if meaning.kind == "own":
                own += words
            elif meaning.kind == "no_effect":
                self._without_effect[meaning.what].append(" ".join(words))
            elif meaning.kind == "options":
                self.arguments += self._words(name, value, meaning)
            else:
                renamed += self._words(name, value, meaning)
        # The last value counts: that of -ub after -b, and --draft after a draft from --spec-type.
        self.arguments += own + renamed
        if self._file:
            self._name_file()

    def _split(self, arguments: Sequence[str]) -> Iterator[list[str]]:
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if word == "--":
                yield from ([each] for each in (word, *rest))
                return
            name = word.replace("_", "-") if word.startswith("--") else word
            name = word if word in self._own or "=" in word else name
            n, may_lack = self._n_values(name)
            if may_lack and rest and rest[0].startswith("-") and not rest[0][1:].isdigit():
                n = 0
            yield [name, *rest[:n]]
            del rest[:n]

    def _n_values(self, name: str) -> tuple[int, bool]:
        found = self._rows.get(name, {})
        row = found.get("by_value") or next(iter(found.values()), None)
        n_values = self._own.get(name, row.n_values if row else 0)
        return n_values, row is not None and row.may_lack_value

    def _meaning(self, name: str, value: str) -> Meaning:
        """What an option with this value means; "own" if it is not llama.cpp's."""
        found = self._rows.get(name, {})
        patterns = found["by_value"].what if "by_value" in found else {}
        assert not isinstance(patterns, str)
        for pattern, what in patterns.items():
            if pattern != "else" and re.fullmatch(pattern, value):
                what = what.replace("{}", value).replace("{#}", ",".join(_NUMBER.findall(value)))
                return Meaning("options" if what[0] in "-$" else "no_effect", what)
        if name in self._own:
            return Meaning("own")
        texts = {section: str(row.what) for section, row in found.items()}
        for section, kind in (("renamed", "renamed"), ("instead", "options")):
            target = texts.get(section, "").partition(" ")[0]
            if target in self._own or target.startswith("$"):
                return Meaning(kind, texts[section])  # type: ignore[arg-type]
        if "no_effect" in texts:
            return Meaning("no_effect", texts["no_effect"])
        if instead := patterns.get("else"):
            return Meaning("refused", instead)
        others = [texts[each] for each in ("refused", "renamed", "instead") if each in texts]
        others += (f"`ggufspec {each}` has it" for each in _OTHERS if name in _names(each))
        return Meaning("refused", others[0]) if others else Meaning("own")

    def _words(self, name: str, value: str, meaning: Meaning) -> list[str]:
        target, _, how = meaning.what.partition(" ")
        if target.startswith("$"):
            os.environ[target[1:]] = (
                value if meaning.kind == "renamed" else _chosen(target[1:], value)
            )
            return []
        if meaning.kind == "options":
            return meaning.what.split()
        if how == "/":
            self._file = value
            return []
        if how == "<":
            return [target, read_text(Path(value), f"the file of {name}", OptionError)]
        parts = value.split(",") if how == "," else [value]
        return [word for part in parts for word in (target, part)]

    def _name_file(self) -> None:
        """Name the file of --hf-file in the repository that the target names. Raises UsageError."""
        at = [i for i, word in enumerate(self.arguments[:-1]) if word in _TARGET]
        if not at:
            raise click.UsageError("--hf-file needs the name of a repository: -hf user/repo")
        repo = re.sub(r":[\w.-]+$", "", self.arguments[at[-1] + 1])
        self.arguments[at[-1] + 1] = f"{repo}/{self._file}"


@cache
def _names(command: str) -> frozenset[str]:
    found: click.Command = import_module(f"ggufspec.cli.{command}").command
    options = (each for each in found.params if isinstance(each, click.Option))
    return frozenset(name for each in options for name in (*each.opts, *each.secondary_opts))


def _chosen(variable: str, devices: str) -> str:
    """The value of a variable that shows only these devices of those that it shows now."""
    shown = [each for each in os.environ.get(variable, "").split(",") if each]
    numbers = map(int, _NUMBER.findall(devices))
    return ",".join(shown[n] if n < len(shown) else f"{n}" for n in numbers)
