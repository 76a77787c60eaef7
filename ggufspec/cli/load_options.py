"""The options of `load` for commands, made of their table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ggufspec.cli.parameters import POSITIVE, Option, OrWord, gathered, option
from ggufspec.common import validate
from ggufspec.common.facts import json_object
from ggufspec.common.reading import read_text
from ggufspec.common.validate import OneOf, Whole
from ggufspec.engine.load_options import OPTIONS, LoadOption
from ggufspec.errors import OptionError
from ggufspec.models.adapters import adapters_of
from ggufspec.models.key_overrides import key_overrides_of
from ggufspec.placement.overrides import ALL
from ggufspec.placement.rpc_address import addresses


def named(*names: str, **changed: Mapping[str, Any]) -> Iterator[Option]:
    """The options with these names in the table. `changed`: what differs, by an option's name."""
    for name in names:
        each = OPTIONS[name]._replace(**changed.get(name, {}))
        settings = _settings(each)
        if each.default not in (None, ()):
            settings["default"] = each.default
        if each.metavar:
            settings["metavar"] = each.metavar
        yield option(f"{each.names} {name}", each.help, **settings)
        if each.flag:
            text = f"The same as {each.names.split()[1]} {ALL}."
            yield option(f"{each.flag} {name}", text, flag_value=ALL, type=settings["type"])


def load_options(*groups: str, **changed: Mapping[str, Any]) -> Callable[..., Any]:
    """The options of `load` that all commands have, and those of groups, as `load_settings`."""
    listed = [name for name in OPTIONS if OPTIONS[name].commands in ("all", *groups)]
    listed = [name for name in listed if OPTIONS[name].names]
    return gathered("load_settings", *named(*listed, **changed))


def _settings(each: LoadOption) -> dict[str, Any]:
    check = each.check
    if isinstance(check, Whole):
        numbers = click.IntRange(check.least, check.most)
        words = {word: each.default if n is None else n for word, n in check.words.items()}
        return {"type": OrWord(numbers, words) if words else numbers}
    if isinstance(check, OneOf):
        return {"type": click.Choice(check.words)}
    if check is validate.switch:
        return {"default": each.default} if "/" in each.names else {"is_flag": True}
    return dict(_SETTINGS[check])


def _parts(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    return tuple(filter(None, ",".join(given).split(",")))


def _template(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    if given is None or "{" in given:
        return given
    return read_text(Path(given), "the file", OptionError)


def _variables(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for text in given:
        if (members := json_object(text)) is None:
            raise click.BadParameter(f"{text!r} is not a JSON object")
        found |= members
    return found or None


def _adapters(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
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


def _shares(
    context: click.Context, option: click.Parameter, value: str | None
) -> tuple[float, ...]:
    if not value:
        return ()
    try:
        return validate.shares("it", [float(part) for part in value.split(",")])
    except ValueError as error:  # OptionError is a ValueError
        raise click.BadParameter(f"{value!r} is not a list of proportions such as 3,1") from error


def _servers(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    return () if value is None else tuple(map(str, addresses("--rpc", value.split(","))))


_FILES = click.Path(path_type=Path, dir_okay=False, resolve_path=True)
_SETTINGS: dict[Callable[[str, Any], Any], dict[str, Any]] = {
    adapters_of: {"multiple": True, "callback": _adapters},
    addresses: {"callback": _servers},
    key_overrides_of: {"multiple": True, "callback": _parts},
    validate.path: {"type": _FILES},
    validate.paths: {"type": _FILES, "multiple": True},
    validate.positive: {"type": POSITIVE},
    validate.shares: {"callback": _shares},
    validate.text: {"callback": _template},
    validate.texts: {"multiple": True, "callback": _parts},
    validate.variables: {"multiple": True, "callback": _variables},
}
