"""Reads the values of options: the kinds that options.toml names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.types import StringParamType

from ggufspec.common import defaults, validate
from ggufspec.common.facts import json_object
from ggufspec.common.reading import read_text
from ggufspec.errors import OptionError
from ggufspec.models.trim_facts import numbers_of
from ggufspec.placement.rpc_address import addresses

_AUTO = {"auto": "auto"}
_BIAS = re.compile(r"(\d+)([+-](?:inf|\d*\.?\d+(?:e[+-]?\d+)?))", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(?:([KMGT])(i?))?(B?)\s*", re.IGNORECASE)
_MOST_BYTES = 2**53
_LEAST_BANDWIDTH = 10**6
_MOST_DIGITS = 6  # of a range such as 1-8


class Number(click.FloatRange):
    """A range that refuses NaN, which click accepts in any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class OrWord(click.ParamType[Any]):
    """Type of an option: a number of the given type, or a word that stands for a value."""

    name = "n|auto"

    def __init__(self, kind: click.ParamType[Any], words: Mapping[str, Any] = _AUTO) -> None:
        self.kind, self.words = kind, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.words:
            return self.words[value]
        try:
            return self.kind.convert(value, param, ctx)
        except click.BadParameter:
            try:
                float(value)
            except ValueError:
                self.fail(f"{value!r} is neither a number nor auto", param, ctx)
            raise


class _WholeText(StringParamType):
    """A text that may contain spaces, also in a variable."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


def _last_target(
    context: click.Context, option: click.Parameter, given: Sequence[str]
) -> str | None:
    """The last of several; all are in the context."""
    context.meta["targets"] = given
    return given[-1] if given else None


def _show_log(context: click.Context, option: click.Parameter, verbose: bool) -> bool:
    if verbose:
        from ggufspec.llama import log

        log.show_log()
    return verbose


def _biases(given: Sequence[str]) -> dict[int, float]:
    """The bias of each token, from texts such as 15043+1, 15043-0.5, 15043-inf."""
    found = {}
    for text in given:
        if (match := _BIAS.fullmatch(text.strip())) is None:
            raise click.BadParameter(
                f"{text!r} is not a token id with a bias, such as 15043+1 or 15043-inf"
            )
        found[int(match[1])] = float(match[2])
    return found


def _samplers(text: str) -> tuple[str, ...]:
    if names := tuple(name.strip() for name in text.split(";") if name.strip()):
        return names
    raise click.BadParameter("no sampler is named; give at least 'temperature'")


def _breakers(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for text in given if text != "none")


def _parts(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(filter(None, ",".join(given).split(",")))


def _text_of(path: Path | str, end: str = "") -> str:
    return read_text(Path(path), "the file", OptionError).rstrip(end)


def _variables(given: Sequence[str]) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for text in given:
        if (members := json_object(text)) is None:
            raise click.BadParameter(f"{text!r} is not a JSON object")
        found |= members
    return found or None


def _adapters(given: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Pairs of path and scale from (a.gguf, b.gguf:0.5); paths may contain colons and commas."""
    found = []
    for text in filter(None, given):
        parts = [_scaled(part) for part in text.split(",") if part]
        whole = _scaled(text)
        is_list = not os.path.exists(whole[0]) and all(os.path.exists(path) for path, _ in parts)
        found += parts if is_list else [whole]
    return tuple(found)


def _scaled(text: str) -> tuple[str, float]:
    file, _, scale = text.rpartition(":")
    try:
        path, factor = (file, float(scale)) if file else (text, 1.0)
    except ValueError:
        path, factor = text, 1.0
    return os.path.abspath(path), factor


def _shares(text: str) -> tuple[float, ...]:
    try:
        return validate.shares("it", [float(part) for part in text.split(",") if text])
    except ValueError as error:  # OptionError is a ValueError
        raise click.BadParameter(f"{text!r} is not a list of proportions such as 3,1") from error


def parse_bytes(value: str) -> int:
    """Bytes of "24GiB", "24G" (the same), "25.7GB". Raises BadParameter."""
    if matched := _SIZE.fullmatch(value):
        number, prefix, binary, unit = matched.groups()
        power = "KMGT".index(prefix.upper()) + 1 if prefix else 0
        found = float(number) * (1000.0 if unit and not binary else 1024.0) ** power
        if 0 <= found <= _MOST_BYTES:
            return round(found)
    raise click.BadParameter(f"{value!r} is not a size; write it like 24GiB")


def _bandwidth(value: str) -> int:
    if (found := parse_bytes(value)) < _LEAST_BANDWIDTH:
        raise click.BadParameter(f"{value!r} is not a bandwidth; write it like 60GB")
    return found


def _layers(value: str) -> tuple[int, ...]:
    if found := numbers_of(value):
        return found
    raise click.BadParameter(f"{value!r} is not a list such as 0-10,14-23")


def _listed(kind: click.ParamType[Any], what: str) -> dict[str, Any]:
    """A comma-separated list of values and of ranges like 1-8."""

    def read(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        try:
            found = [kind.convert(each, None, None) for part in parts for each in _expanded(part)]
        except click.BadParameter:
            found = []
        if not (found and all(parts)):
            raise click.BadParameter(f"{text!r} is not a list of {what}")
        return tuple(dict.fromkeys(found))

    return {"metavar": "LIST", **_reads(read, ())}


def _expanded(part: str) -> Sequence[str]:
    first, _, last = part.partition("-")
    if first.isdecimal() and last.isdecimal() and len(part) <= _MOST_DIGITS:
        return [str(n) for n in range(int(first), int(last) + 1)] or [part]
    return [part]


def _reads(read: Callable[[Any], Any], without: Any = None) -> dict[str, Any]:
    """Settings of an option whose value is read by a function; `without`: its default."""
    return {
        "callback": lambda context, option, given: without if given in (None, ()) else read(given)
    }


_LENGTH = OrWord(click.IntRange(1, defaults.N_DRAFT_LIMIT))
PATH: Final = click.Path(path_type=Path)
FILE: Final = click.Path(path_type=Path, dir_okay=False)
KINDS: Final[Mapping[str, dict[str, Any]]] = {  # settings of click.option
    "text": {},
    "flag": {"is_flag": True},
    "yes_no_auto": {"default": None, "show_default": False},  # of two flags; None without them
    "log": {"is_flag": True, "callback": _show_log},
    "number": {"type": click.FLOAT},
    "not_negative": {"type": Number(min=0)},
    "positive": {"type": Number(min=0, min_open=True)},
    "share": {"type": Number(min=0, max=1)},
    "false_alarm": {"type": click.FloatRange(0, 0.5, min_open=True, max_open=True)},
    "none_if_minus_1": {"default": -1, **_reads(lambda n: None if n == -1 else n)},
    "path": {"type": PATH},
    "file": {"type": FILE},
    "folder": {"type": click.Path(path_type=Path, file_okay=False)},
    "absolute_file": {"type": click.Path(path_type=Path, dir_okay=False, resolve_path=True)},
    "text_in_file": {"type": PATH, **_reads(_text_of)},
    # Most editors write a line break at the end of a file.
    "line_in_file": {"type": PATH, **_reads(lambda path: _text_of(path, "\r\n"))},
    "text_or_file": _reads(lambda given: given if "{" in given else _text_of(given)),
    "targets": {"multiple": True, "type": _WholeText(), "callback": _last_target},
    "adapters": {"multiple": True, **_reads(_adapters, ())},
    "parts": {"multiple": True, **_reads(_parts, ())},
    "variables": {"multiple": True, **_reads(_variables)},
    "shares": _reads(_shares, ()),
    "servers": _reads(lambda text: tuple(map(str, addresses("--rpc", text.split(",")))), ()),
    "biases": {"multiple": True, "callback": lambda context, option, given: _biases(given)},
    "breakers": {"multiple": True, **_reads(_breakers, defaults.DRY_SEQUENCE_BREAKERS)},
    "choices": {"multiple": True, **_reads(tuple)},
    "samplers": _reads(_samplers, defaults.SAMPLERS),
    "length": {"type": _LENGTH},
    "lengths": _listed(_LENGTH, "lengths such as auto,3 or 1-8 (at most 64)"),
    "trees": _listed(click.Choice(defaults.TREES), "auto, on, off"),
    "drafters": _listed(click.STRING, "drafters"),
    "rules": _listed(click.STRING, "rules"),
    "temperatures": _listed(Number(min=0), "temperatures"),
    "layers": _reads(_layers),
    "size": {"type": parse_bytes},
    "sizes": {"type": lambda text: [parse_bytes(each) for each in text.split(",") if each.strip()]},
    "bandwidth": {"type": _bandwidth},
}
