"""Builds options: their types, groups that become one argument, llama.cpp's names for them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ggufspec.common.reading import read_text
from ggufspec.errors import OptionError

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a decorator that gives a command one option

COUNT = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)
_AUTO = {"auto": "auto"}
PATH, FILE = click.Path(path_type=Path), click.Path(path_type=Path, dir_okay=False)


class Number(click.FloatRange):
    """A range that refuses NaN, which click accepts in any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


NOT_NEGATIVE = Number(min=0)
POSITIVE = Number(min=0, min_open=True)
SHARE = Number(min=0, max=1)


def option(names: str, help_text: str, **settings: Any) -> Option:
    """click.option with its names in one string; a default is shown in --help.

    names: such as "-c --ctx-size n_ctx | --context $LLAMA_ARG_CTX_SIZE": after the names, that of
    the parameter; after a bar, further names of llama.cpp, which --help and errors do not show;
    and its environment variable.
    """
    variables = [word[1:] for word in names.split() if word.startswith("$")]
    aliases = [word for word in names.partition("|")[2].split() if word.startswith("-")]
    declared = [word for word in names.split() if word[0] not in "|$" and word not in aliases]
    if declared[-1].startswith("-"):  # else an alias would become the parameter's name
        declared.append(declared[-1].partition("/")[0].lstrip("-").replace("-", "_"))
    more = {"show_default": "default" in settings, "envvar": variables or None, **settings}
    return click.option(*declared, cls=NamedOption, aliases=aliases, help=help_text, **more)


def read_option(end: str = "") -> dict[str, Any]:
    """Settings of an option whose value is read from a file, without trailing characters `end`."""

    def read(context: click.Context, option: click.Parameter, path: Path | None) -> str | None:
        if path is None:
            return None
        return read_text(path, "the file", OptionError).rstrip(end)

    return {"type": PATH, "callback": read}


def only(options: Iterable[Option], *names: str) -> list[Option]:
    by_name = {option(lambda: None).__click_params__[0].name: option for option in options}
    return [by_name[name] for name in names]


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
        made: Any = gather
        for option in reversed(options):  # so that --help lists them in the order given
            made = option(made)
        added = made.__click_params__[n_before:]
        # Two options may share a parameter: a flag may set the value of another option.
        names = dict.fromkeys(each.name for each in added if each.expose_value)
        return made  # type: ignore[no-any-return]

    return decorate


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
