"""`ggufspec demo`: `ggufspec compare` on the embedded pair, with few options in --help."""

from __future__ import annotations

from copy import copy
from typing import Final

import click

from ggufspec.cli import compare, shared

_SHOWN: Final = (
    *("size", "cache_dir", "n_draft", "max_tokens", "n_threads"),
    *("speed", "record", "color", "as_json", "verbose"),
)


def _listed(parameter: click.Parameter) -> click.Parameter:
    """The same option; --help lists it if it is one of those to show."""
    made = copy(parameter)
    if isinstance(made, click.Option):
        made.hidden = made.name not in _SHOWN
    return made


command = shared.SectionedCommand(
    name="demo",
    callback=compare.command.callback,
    params=[_listed(each) for each in compare.command.params],
    help="""Watch a large model generate faster with a small draft model, without a download.

    The large model is a stand-in: a 7 M-parameter model of old novels, padded with zeros to the
    cost of --size parameters; it writes no better. It continues a prompt with and without its 1.5 M
    draft at temperature 0, where both texts are the same, up to rounding. This is `ggufspec
    compare` without --target.
    """,
)
