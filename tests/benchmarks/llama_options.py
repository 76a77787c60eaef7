"""The options of llama.cpp's programs, for the table of ggufspec/cli/llama_options.md.

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
_ENVIRONMENT = re.compile(r"\(env: (\w+)\)")


class LlamaOption(NamedTuple):
    """An option: the title of its section in --help, its names, and its environment variable."""

    section: str
    names: tuple[str, ...]
    variable: str = ""


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
            found = LlamaOption(section, tuple(names))
        if found is not None and (variable := _ENVIRONMENT.search(line)):
            found = found._replace(variable=variable[1])
    if found is not None:
        yield found


def recorded() -> list[LlamaOption]:
    """What DATA has."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return [LlamaOption(section, tuple(names.split()), var) for section, names, var in rows]


@click.command()
@click.argument("programs", nargs=-1, required=True)
def main(programs: tuple[str, ...]) -> None:
    def output(*command: str) -> str:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout or done.stderr

    version = output(programs[0], "--version").splitlines()[0]
    found = [each for program in programs for each in options_of(output(program, "--help"))]
    rows = dict.fromkeys(["\t".join((each[0], " ".join(each[1]), each[2])) for each in found])
    sections = list(dict.fromkeys(row.partition("\t")[0] for row in rows))
    ordered = sorted(rows, key=lambda row: sections.index(row.partition("\t")[0]))
    head = f"# llama.cpp {version.removeprefix('version: ')}: section, names, environment variable"
    DATA.write_text("\n".join([head, *ordered]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
