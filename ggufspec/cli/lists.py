"""Parses options whose value is a comma-separated list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from ggufspec.common import defaults


def listed(parse: Callable[[str], Any], what: str) -> Callable[..., tuple[Any, ...]]:
    """A callback that parses a comma-separated list."""

    def read(context: click.Context, option: click.Parameter, text: str | None) -> tuple[Any, ...]:
        if text is None:
            return ()
        try:
            made = [value for part in text.split(",") for value in _expanded(part.strip(), parse)]
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of {what}") from None
        if not made:
            raise click.BadParameter(f"the list is empty; give {what}")
        return tuple(dict.fromkeys(made))

    return read


def length(text: str) -> int | str:
    """A draft length: a number, or auto."""
    if text == "auto":
        return text
    if not 1 <= int(text) <= defaults.N_DRAFT_LIMIT:
        raise ValueError(text)
    return int(text)


def temperature(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def _expanded(part: str, parse: Callable[[str], Any]) -> Sequence[Any]:
    """One value, or all of a range like 1-8."""
    if not part:
        raise ValueError(part)
    first, dash, last = part.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and len(first + last) < 6:
        if int(first) > int(last):
            raise ValueError(part)
        return [parse(str(n)) for n in range(int(first), int(last) + 1)]
    return [parse(part)]
