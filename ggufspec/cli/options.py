"""Options that several commands share, with llama.cpp's names if it has the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from ggufspec.cli import llama_names
from ggufspec.cli.names import PairOptions
from ggufspec.common import defaults

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a decorator that gives a command one option

COUNT = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)
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
    """click.option with its names in one string; a default is shown in --help."""
    shown = {"show_default": "default" in settings}
    return click.option(
        *names.split(), cls=llama_names.Option, help=help_text, **{**shown, **settings}
    )


def _all(*options: Option) -> Option:
    """Apply decorators so that --help lists them in the order given."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def gathered(
    into: str, *options: Option, make: Callable[..., Any] = dict
) -> Callable[[Command], Command]:
    """Options whose values `make` combines into one argument of the command, named `into`."""

    probe: Any = _all(*options)(lambda: None)
    # Two options may share a parameter: a flag may set the value of another option.
    names = dict.fromkeys(option.name for option in probe.__click_params__ if option.expose_value)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def gather(*args: Any, **given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return command(*args, **given, **{into: make(**values)})

        made: Any = _all(*options)(gather)
        return made  # type: ignore[no-any-return]

    return decorate


class OrAuto(click.ParamType[Any]):
    """Type of an option: a number of the given type, or the word auto."""

    name = "n|auto"

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto":
            return value
        try:
            return self.kind.convert(value, param, ctx)
        except click.BadParameter:
            try:
                float(value)
            except ValueError:
                self.fail(f"{value!r} is neither a number nor auto", param, ctx)
            raise


def _limit(context: click.Context, option: click.Parameter, value: int) -> int | None:
    if value != -1 and value < 1:
        raise click.BadParameter("must be at least 1, or -1 for no limit")
    return None if value == -1 else value


max_tokens_option = option(
    "-n --n-predict max_tokens",
    "Maximum tokens to generate; -1: until the model stops or the context is full.",
    type=int,
    default=-1,
    callback=_limit,
)


seed_option = option("-s --seed", "Seed of the random numbers.  [default: random]", type=COUNT)


def target_option(*, required: bool = True) -> Option:
    """The option for the target: a file, or a name that `cli.names` resolves."""
    return option(
        "-m --target",
        "Target model: a GGUF file, or a name: a registered one, user/repo:QUANT or "
        "user/repo/file.gguf.",
        required=required,
        metavar="MODEL",
    )


def draft_option(without: str = "", *, required: bool = False) -> Option:
    """The option for the draft: a file, or a name. `without`: help text for leaving it out."""
    end = f"; {without}" if without else ""
    return option(
        "-md --draft",
        "Draft: a file or name of a small model or of an MTP, DFlash or EAGLE-3 head; mtp: the "
        f"head in the target's own file; auto: chosen to fit the target{end}.",
        required=required,
        metavar="MODEL",
    )


draft_of_draft_option = option(
    "--draft-of-draft",
    "Draft of the draft: an even smaller model that drafts the draft's tokens. With --drafter "
    "auto, it is used when that is faster.",
    metavar="MODEL",
)

LOOKUP = "without a draft, only n-gram lookup drafts"
SEVERAL = "several drafts (a.gguf,b.gguf) are measured one after the other, and ranked"

offline_option = option(
    "--offline",
    "Use only models on this machine; download nothing.  [default: HF_HUB_OFFLINE]",
    is_flag=True,
)

size_option = option(
    "--size", "Size of the stand-in target, in parameters: 10M to 8B.", default=defaults.DEMO_SIZE
)

cache_dir_option = option(
    "--cache-dir",
    "Folder for the stand-in.  [default: GGUFSPEC_CACHE, or the user's cache folder]",
    type=PATH,
)

pair_options = gathered(
    "pair",
    target_option(),
    draft_option(LOOKUP),
    draft_of_draft_option,
    offline_option,
    make=PairOptions,
)


def pair_or_embedded_options(without: str = LOOKUP) -> Callable[[Command], Command]:
    """The options of a pair; without a target, the embedded pair. `without`: see draft_option."""
    return gathered(
        "pair",
        target_option(required=False),
        draft_option(without),
        draft_of_draft_option,
        offline_option,
        size_option,
        cache_dir_option,
        make=PairOptions,
    )


DRAFT_LENGTH = OrAuto(click.IntRange(1, defaults.N_DRAFT_LIMIT))


def draft_n_option_of(default: int | str, help_text: str) -> Option:
    """The option for the draft length: a number, or "auto"."""
    return option("--draft-n n_draft", help_text, type=DRAFT_LENGTH, default=default)


draft_n_option = draft_n_option_of(
    defaults.N_DRAFT,
    "Draft length: tokens drafted per round; auto: the length with the highest expected tokens/s, "
    "0 if drafting would not be faster.",
)


def room_for(n_draft: int | str) -> dict[str, Any]:
    """The argument with which `load` reserves room for drafts of that length."""
    return {} if isinstance(n_draft, str) else {"n_draft_max": n_draft}


draft_temperature_option = option(
    "--draft-temp draft_temperature",
    "Temperature of the draft; 0: greedy; auto: adjusted during generation for the highest "
    "acceptance. The text keeps the target's distribution at any value.",
    type=OrAuto(click.FLOAT),
    default=defaults.DRAFT_TEMPERATURE,
)

TREE = click.Choice(defaults.TREES)

tree_option = option(
    "--tree",
    "Branches in a draft: several continuations, verified together; auto: when measured costs "
    "predict a gain; on: the --draft-n most likely nodes; off: chains only.",
    type=TREE,
    default=defaults.TREE,
)

drafter_option = option(
    "--drafter",
    "Drafting strategy: model, staged (the model, with its own tokens drafted by --draft-of-draft, "
    "else by lookup), ngram (lookup in the text so far, without a model), auto (picks the faster "
    "one each round), forced (only tokens that a constraint leaves no alternative to; the others "
    "draft them, too) or none.  [default: auto; if --draft-n is a number: model, or staged with "
    "--draft-of-draft]",
)

verify_option = option(
    "--verify",
    "Verification rule: traversal (whole paths at once), rejection (token by token) or match "
    "(only equal tokens, as in llama.cpp). The text has the target's distribution with each.",
    default=defaults.VERIFY,
)

DRAFTING = (draft_n_option, tree_option, drafter_option, verify_option, draft_temperature_option)

system_option = option("-sys --system", "System message; in run, implies --chat.")

prompt_options = gathered(
    "asked",
    option("-p --prompt", "Prompt text.  [default: read from stdin]"),
    option("-f --file prompt_file", "Read the prompt from a file.", type=PATH),
    option("--chat", "Apply the target's chat template, so that the model answers.", is_flag=True),
    system_option,
)

stop_option = option("--stop", "End before this string; may be given several times.", multiple=True)

SHIFT = (
    option(
        "--context-shift/--no-context-shift",
        "When the context is full, drop the older half of the text and continue. Not for texts "
        "with a constraint.",
        default=False,
        show_default=False,
    ),
    option(
        "--keep n_keep",
        "Number of first tokens that --context-shift keeps; -1: the whole prompt.",
        type=click.IntRange(min=-1),
        default=0,
        metavar="N",
    ),
)

ignore_eos_option = option("--ignore-eos", "Never sample the tokens that end a text.", is_flag=True)

color_option = option(
    "--color",
    "Show accepted draft tokens in green.",
    type=click.Choice(("auto", "on", "off")),
    default="auto",
)

json_option = option("--json as_json", "Print one JSON document instead.", is_flag=True)

verbose_option = option("-v --verbose", "Show llama.cpp's log on stderr.", is_flag=True)

explaining_option = option(
    "-v --verbose",
    "Show on stderr why each round had its draft length, where the time went, and llama.cpp's log.",
    is_flag=True,
)


def show_log(verbose: bool) -> None:
    """Let llama.cpp's log through to stderr."""
    if verbose:
        from ggufspec.llama import log

        log.show_log()
