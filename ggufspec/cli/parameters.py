"""Builds options: their types, groups that become one argument, llama.cpp's names for them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a decorator that gives a command one option

COUNT = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)
_AUTO = {"auto": "auto"}
PATH, FILE = click.Path(path_type=Path), click.Path(path_type=Path, dir_okay=False)

# Keys: the last name of our option. --help and errors do not show these aliases.
_ALIASES = {
    "--target": ("--model",),
    "--draft": ("--spec-draft-model", "--model-draft"),
    "--n-predict": ("--predict",),
    "--threads-draft": ("--spec-draft-threads",),
    "--gpu-layers": ("--n-gpu-layers",),
    "--gpu-layers-draft": ("--spec-draft-ngl", "--n-gpu-layers-draft"),
    "--override-tensor-draft": ("--spec-draft-override-tensor",),
    "--cpu-moe-draft": ("--spec-draft-cpu-moe",),
    "--n-cpu-moe-draft": ("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"),
    "--temp": ("--temperature",),
    "--system": ("--system-prompt",),
    "--stop": ("-r", "--reverse-prompt"),
    "--color": ("-co",),
    "--verbose": ("--log-verbose",),
    "--alias": ("-a",),
    "--timeout": ("-to",),
    "--slots": ("-np", "--parallel"),
    "--ctx-checkpoints": ("--swa-checkpoints",),
}
# Options whose variable is LLAMA_ARG_ with their own name.
_NAMED_ALIKE = (
    *("offline", "ctx-size", "n-predict", "threads", "override-tensor", "n-cpu-moe", "n-cpu-ffn"),
    *("tensor-split", "main-gpu", "rpc", "flash-attn", "cache-type-k", "cache-type-v", "repack"),
    *("rope-scale", "rope-freq-base", "rope-freq-scale", "yarn-orig-ctx", "context-shift"),
    *("cache-ram", "ctx-checkpoints", "top-k", "top-p", "min-p", "repeat-penalty"),
    *("presence-penalty", "frequency-penalty", "chat-template-file", "host", "port", "alias"),
    "api-key-file",
)
VARIABLES = {
    **{f"--{name}": f"LLAMA_ARG_{name.upper().replace('-', '_')}" for name in _NAMED_ALIKE},
    "--target": "LLAMA_ARG_MODEL",
    "--draft": "LLAMA_ARG_SPEC_DRAFT_MODEL",
    "--batch-size": "LLAMA_ARG_BATCH",
    "--gpu-layers": "LLAMA_ARG_N_GPU_LAYERS",
    "--gpu-layers-draft": "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    "--n-cpu-moe-draft": "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
    "--rope-scaling": "LLAMA_ARG_ROPE_SCALING_TYPE",
    "--temp": "LLAMA_ARG_TEMPERATURE",
    "--slots": "LLAMA_ARG_N_PARALLEL",
    "--api-key": "LLAMA_API_KEY",
}


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
    """click.option with its names in one string; a default is shown in --help."""
    shown = {"show_default": "default" in settings}
    return click.option(*names.split(), cls=NamedOption, help=help_text, **{**shown, **settings})


def only(options: Iterable[Option], *names: str) -> list[Option]:
    """Those of the options whose parameters have these names."""
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


THREADS = OrWord(AT_LEAST_1, {"auto": None, "-1": None})


class NamedOption(click.Option):
    """An option that also has llama.cpp's names and variable; its own variable has priority."""

    def __init__(self, param_decls: list[str], **settings: object) -> None:
        names = [name for name in param_decls if name.startswith("-")]
        key = names[-1].partition("/")[0]
        self.aliases = [name for name in _ALIASES.get(key, ()) if name not in names]
        if self.aliases and len(names) == len(param_decls):  # else an alias would become its name
            param_decls = [*param_decls, key.lstrip("-").replace("-", "_")]
        own = settings.pop("envvar", None)
        found = [each for each in (own, VARIABLES.get(key)) if isinstance(each, str)]
        super().__init__([*self.aliases, *param_decls], envvar=found or None, **settings)  # type: ignore[arg-type]

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
        names = [self.envvar] if isinstance(self.envvar, str) else self.envvar or ()
        return f"{hint} ({next(name for name in names if os.environ.get(name))})"
