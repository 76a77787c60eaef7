"""The options of llama.cpp's programs, for the table ggufspec/cli/llama_options.toml.

    python -m tests.benchmarks.llama_options llama-server llama-cli

writes tests/cli/data/llama_options.txt from their --help. tests/cli/test_llama_options.py then says
what the table lacks.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

DATA = Path(__file__).parents[1] / "cli" / "data" / "llama_options.txt"
_NAMES = re.compile(r"(--?[\w.-]+)(?:, +|(?= |$))")
_VALUE = re.compile(r" (?! )(\S+)(?: (?! )([A-Z]+)$)?")  # two: START END
_ENVIRONMENT = re.compile(r"\(env: (\w+)\)")


class LlamaOption(NamedTuple):
    """An option: its section in --help, its names, its variable, and its number of values."""

    section: str
    names: tuple[str, ...]
    variable: str = ""
    n_values: int = 0


def options_of(help_text: str) -> Iterator[LlamaOption]:
    found = None
    section = ""
    for line in help_text.splitlines():
        if title := re.fullmatch(r"----- (.+) -----", line):
            section = title[1]
        elif line.startswith("-"):
            if found is not None:
                yield found
            names, at = [], 0
            while match := _NAMES.match(line, at):
                names.append(match[1])
                at = match.end()
            value = _VALUE.match(line, at)
            n_values = len([each for each in value.groups() if each]) if value else 0
            found = LlamaOption(section, tuple(names), n_values=n_values)
        if found is not None and (variable := _ENVIRONMENT.search(line)):
            found = found._replace(variable=variable[1])
    if found is not None:
        yield found


def recorded() -> list[LlamaOption]:
    """What DATA has."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return [LlamaOption(title, (*names.split(),), var, int(n)) for title, names, var, n in rows]


@click.command()
@click.argument("programs", nargs=-1, required=True)
def main(programs: tuple[str, ...]) -> None:
    def output(*command: str) -> str:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout or done.stderr

    version = output(programs[0], "--version").splitlines()[0]
    found = [each for program in programs for each in options_of(output(program, "--help"))]
    rows = dict.fromkeys(
        ["\t".join((each[0], " ".join(each[1]), each[2], str(each[3]))) for each in found]
    )
    sections = list(dict.fromkeys(row.partition("\t")[0] for row in rows))
    ordered = sorted(rows, key=lambda row: sections.index(row.partition("\t")[0]))
    version = version.removeprefix("version: ")
    head = f"# llama.cpp {version}: section, names, environment variable, number of values"
    DATA.write_text("\n".join([head, *ordered]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
