"""Makes the options of commands from options.toml, and from the fields that they set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from ggufspec.cli.option_values import KINDS, Number, OrWord
from ggufspec.common import defaults, option_fields, validate
from ggufspec.common.reading import read_toml
from ggufspec.common.validate import OneOf, Whole
from ggufspec.decoding.sampling_options import NUMBERS
from ggufspec.engine.load_options import OPTIONS

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a decorator that gives a command one option

TABLE: Final[Mapping[str, dict[str, dict[str, Any]]]] = read_toml(
    Path(__file__).with_suffix(".toml")
)
_FIELDS: Final[Mapping[str, Mapping[str, option_fields.Option]]] = {
    "load": OPTIONS,
    "text": NUMBERS,
    "sampling": NUMBERS,
}
_WORDS: Final[Mapping[str, Any]] = {  # of help texts, after a "$"
    **{name: field.default for name, field in NUMBERS.items()},
    **{k: "; ".join(v) if isinstance(v, tuple) else v for k, v in vars(defaults).items()},
}


def options(group: str, *names: str, **changed: Mapping[str, Any]) -> Iterator[Option]:
    """The options of a group in the table, or those that set the parameters `names`.

    changed: what differs from the table, by parameter; `more` is a further sentence of the help.
    """
    for spelled, row in TABLE[group].items():
        name = parameter_of(spelled)
        if not names or name in names:
            field = _FIELDS.get(group, {}).get(name)
            own = {} if field is None else _settings_of(field, is_pair="/" in spelled)
            yield _option(spelled, name, **{**own, **row, **changed.get(name, {})})


def groups(*names: str) -> Iterator[Option]:
    """All options of these groups."""
    for name in names:
        yield from options(name)


def load_options(*groups: str, **changed: Mapping[str, Any]) -> Callable[..., Any]:
    """The options of `load` that all commands have, and those of groups, as `load_settings`."""
    names = [
        parameter_of(spelled)
        for spelled, row in TABLE["load"].items()
        if row.get("for", "all") in ("all", *groups) and spelled.startswith("-")
    ]
    return gathered("load_settings", *options("load", *names, **changed))


def added(*options: Option) -> Callable[[Command], Command]:
    """Options whose values are arguments of the command."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):  # so that --help lists them in the order given
            command = option(command)
        return command

    return decorate


def gathered(
    into: str, *options: Option, make: Callable[..., Any] = dict
) -> Callable[[Command], Command]:
    """Options whose values `make` combines into one argument of the command, named `into`."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def gather(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return command(**given, **{into: make(**values)})

        n_before = len(getattr(command, "__click_params__", ()))
        made: Any = added(*options)(gather)
        # Two options may share a parameter: a flag may set the value of another option.
        own = made.__click_params__[n_before:]
        names = dict.fromkeys(each.name for each in own if each.expose_value)
        return made  # type: ignore[no-any-return]

    return decorate


def help_text(written: str) -> str:
    """The help text of the table, with the values of constants."""
    return Template(written).safe_substitute(_WORDS)


def parameter_of(names: str) -> str:
    """The parameter that an option of the table sets."""
    return _shown(names)[-1].partition("/")[0].lstrip("-").replace("-", "_")


def _shown(names: str) -> list[str]:
    return [word for word in names.partition("|")[0].split() if word[0] != "$"]


def _settings_of(field: option_fields.Option, *, is_pair: bool) -> dict[str, Any]:
    """Settings of click.option for an option of a text or of `load`; is_pair: --yes/--no."""
    default, check = field.default, field.check
    if check is validate.switch:
        return {"default": default} if is_pair else {"is_flag": True}
    made: dict[str, Any] = {} if default in (None, ()) else {"default": default}
    if isinstance(check, Whole):
        words = {word: default if n is None else n for word, n in check.words.items()}
        numbers = click.IntRange(check.least, check.most)
        made["type"] = OrWord(numbers, words) if words else numbers
    elif isinstance(check, validate.Number):
        made["type"] = Number(check.least, check.most, min_open=check.above)
    elif isinstance(check, OneOf):
        made["type"] = click.Choice(check.words)
    return made


def _option(
    names: str, parameter: str, help: str, more: str = "", kind: str = "text", **row: Any
) -> Option:
    settings = {**KINDS[kind], **{name: _value(each) for name, each in row.items()}}
    for name in settings.keys() & {"for", "section"}:
        del settings[name]
    if "range" in settings:
        settings["type"] = click.IntRange(*map(_value, settings.pop("range")))
    if "choices" in settings:
        settings["type"] = click.Choice(settings.pop("choices"))
    return click.option(
        *(word for word in _shown(names) if word.startswith("-")),
        parameter,  # else an alias would become its name
        cls=NamedOption,
        aliases=[word for word in names.partition("|")[2].split() if word.startswith("-")],
        envvar=[word[1:] for word in names.split() if word.startswith("$")] or None,
        help=f"{help_text(help)} {more}".rstrip(),
        **{"show_default": "default" in settings, **settings},
    )


def _value(given: Any) -> Any:
    is_constant = isinstance(given, str) and given.startswith("$")
    return getattr(defaults, given[1:]) if is_constant else given


class NamedOption(click.Option):
    """An option that also has llama.cpp's names and variable; its own variable has priority."""

    def __init__(self, param_decls: list[str], *, aliases: list[str], **settings: Any) -> None:
        self.aliases = aliases
        super().__init__([*aliases, *param_decls], **settings)

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Without the range, which errors name."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        found = super().get_help_record(ctx)
        if found is None:
            return None
        names, text = found
        for alias in self.aliases:
            names = names.replace(f"{alias}, ", "")
        return names, text

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The option's names, and the environment variable if the value came from it."""
        hint = " / ".join(f"'{name}'" for name in self.opts if name not in self.aliases)
        source = ctx and self.name and ctx.get_parameter_source(self.name)
        if source != ParameterSource.ENVIRONMENT:
            return hint
        return f"{hint} ({next(name for name in self.envvar or () if os.environ.get(name))})"
