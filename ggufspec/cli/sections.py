"""Groups the options of `--help` by subject; the few that most people need come first."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from ggufspec.common.toml import read_toml

_SHORTER: Final = {
    "INTEGER RANGE": "N",
    "FLOAT RANGE": "X",
    "INTEGER": "N",
    "FLOAT": "X",
    "N|AUTO": "N|auto",
}
_FEW: Final = 12  # options that need no sections


class SectionedCommand(click.Command):
    """A command whose --help has sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Argument):
                continue  # in the usage line; some versions of click list them without a text
            if option.name and (record := option.get_help_record(ctx)) is not None:
                records[option.name] = (_shortened(record[0]), record[1])
        if len(records) <= _FEW:
            with formatter.section("Options"):
                formatter.write_dl(list(records.values()))
            return
        sections = read_toml(Path(__file__).with_suffix(".toml"))
        for title, names in sections.items():
            listed = [records.pop(name) for name in names if name in records]
            listed += records.values() if title == list(sections)[-1] else []
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed)


class SectionedGroup(click.Group, SectionedCommand):
    """A group whose --help has sections, and whose commands have them too."""

    command_class = SectionedCommand


def _shortened(usage: str) -> str:
    for long, short in _SHORTER.items():
        usage = usage.replace(long, short)
    return usage
