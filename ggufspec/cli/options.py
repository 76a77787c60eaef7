"""Options that several commands share, by llama.cpp's names where it has one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from ggufspec.cli import render
from ggufspec.common import defaults

Command = TypeVar("Command", bound=Callable[..., Any])


def _all(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Apply decorators so that --help lists them in the order given."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def gathered(into: str, *options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Options whose values come to the command in one dict, its argument `into`."""

    probe: Any = _all(*options)(lambda: None)
    names = [option.name for option in probe.__click_params__ if option.expose_value]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def gather(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return command(**given, **{into: values})

        made: Any = _all(*options)(gather)
        return made  # type: ignore[no-any-return]

    return decorate


def a_share(context: click.Context, option: click.Parameter, value: float) -> float:
    """A callback for options from 0 to 1, which a range lets "nan" be too. Raises BadParameter."""
    if value != value:
        raise click.BadParameter("it is no number")
    return value


_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

context_option = click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=1),
    help=f"Tokens that prompt and text may have together. "
    f"[default: the target's own, at most {defaults.N_CTX}]",
)

type_k_option = click.option(
    "-ctk",
    "--cache-type-k",
    "type_k",
    type=click.Choice(_KV_TYPES),
    default=defaults.KV_TYPE,
    show_default=True,
    help="Type of the K cache.",
)

type_v_option = click.option(
    "-ctv",
    "--cache-type-v",
    "type_v",
    type=click.Choice(_KV_TYPES),
    default=defaults.KV_TYPE,
    show_default=True,
    help="Type of the V cache.",
)

rpc_option = click.option(
    "--rpc",
    "rpc",
    metavar="HOST:PORT,...",
    callback=lambda context, option, value: _servers(value),
    help="Servers of llama.cpp's RPC backend that take layers of the target, as GPUs do. They ask "
    "nobody for a password: only in a network that you trust.",
)

load_options = gathered(
    "load_settings",
    context_option,
    click.option(
        "-b",
        "--batch-size",
        "n_batch",
        type=click.IntRange(min=1),
        help="Prompt tokens a batch, of target and draft. [default: what tune found, or "
        f"{defaults.N_BATCH}]",
    ),
    click.option(
        "-t",
        "--threads",
        "n_threads",
        type=click.IntRange(min=1),
        help="Threads of the target. [default: what tune found, or one per core]",
    ),
    click.option(
        "-td",
        "--threads-draft",
        "n_threads_draft",
        type=click.IntRange(min=1),
        help="Threads of the draft. [default: what tune found, or as the target; 1 if tiny]",
    ),
    click.option(
        "-ngl",
        "--gpu-layers",
        "n_gpu_layers",
        default=defaults.N_GPU_LAYERS,
        show_default=True,
        callback=lambda context, option, value: _layers(value),
        help="Layers of the target on the GPU, the output counting as one; -1: all; auto: what is "
        "predicted to be fastest within free memory.",
    ),
    click.option(
        "-ngld",
        "--gpu-layers-draft",
        "n_gpu_layers_draft",
        default=defaults.N_GPU_LAYERS,
        show_default=True,
        callback=lambda context, option, value: _layers(value),
        help="Layers of the draft on the GPU, likewise.",
    ),
    click.option(
        "-ts",
        "--tensor-split",
        "tensor_split",
        default="",
        metavar="N,N...",
        callback=lambda context, option, value: _shares(value),
        help="Shares of the target's layers for several GPUs. [default: by free memory]",
    ),
    click.option(
        "-mg",
        "--main-gpu",
        "main_gpu",
        type=click.IntRange(min=0),
        help="The GPU for the draft. [default: where it is predicted to be fastest]",
    ),
    rpc_option,
    click.option(
        "-fa",
        "--flash-attn",
        "flash_attention",
        type=click.Choice(["auto", "on", "off"]),
        default=defaults.FLASH_ATTENTION,
        show_default=True,
        help="Flash attention.",
    ),
    type_k_option,
    type_v_option,
    click.option(
        "--mmap/--no-mmap", default=True, show_default=True, help="Map the files into memory."
    ),
)


def _limit(value: int) -> int | None:
    """A number of tokens; -1 is none."""
    if value != -1 and value < 1:
        raise click.BadParameter("must be at least 1, or -1 for no limit", param_hint="-n")
    return None if value == -1 else value


max_tokens_option = click.option(
    "-n",
    "--n-predict",
    "max_tokens",
    type=int,
    default=-1,
    show_default=True,
    callback=lambda context, option, value: _limit(value),
    help="Tokens of a text at most; -1: until the model stops or the context is full.",
)


def _layers(value: str) -> int | str:
    """A number of layers, or "auto"."""
    if value == defaults.N_GPU_LAYERS:
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a whole number nor auto") from None


def _shares(value: str) -> tuple[float, ...]:
    """Numbers between commas, as `load` takes them."""
    if not value:
        return ()
    from ggufspec.common import validate

    try:
        return validate.shares("it", [float(part) for part in value.split(",")])
    except ValueError as error:  # OptionError is one
        raise click.BadParameter(f"{value!r} are no shares: give numbers like 3,1") from error


def _servers(value: str | None) -> tuple[str, ...]:
    """Addresses between commas, as `load` takes them."""
    if value is None:
        return ()
    from ggufspec.placement import rpc_address

    return tuple(map(str, rpc_address.addresses("--rpc", value.split(","))))


seed_option = click.option(
    "-s",
    "--seed",
    type=click.IntRange(min=0),
    help="Seed of the random numbers. [default: a fresh one]",
)

_NAMES = "its name: a registered one, user/repo:QUANT or user/repo/file.gguf"


def target_option(*, required: bool = True) -> Callable[[Any], Any]:
    """Who is to write: a file, or a name that `cli.names` makes one of."""
    return click.option(
        "-m",
        "--target",
        required=required,
        metavar="MODEL",
        help=f"GGUF file of the target, or {_NAMES}.",
    )


def draft_option(without: str = "", *, required: bool = False) -> Callable[[Any], Any]:
    """Who writes ahead: a file, or a name. `without`: what is to be said of doing without."""
    end = f"; {without}" if without else ""
    return click.option(
        "-md",
        "--draft",
        required=required,
        metavar="MODEL",
        help=f"GGUF file of the draft, or its name; auto: one that fits the target{end}.",
    )


def draft_n_option_of(default: int | str, help_text: str) -> Callable[[Any], Any]:
    return click.option(
        "--draft-n",
        "n_draft",
        default=str(default),
        show_default=True,
        callback=lambda context, option, value: _count_or_auto(value),
        help=help_text,
    )


draft_n_option = draft_n_option_of(
    defaults.N_DRAFT,
    "Tokens that are written ahead in a round; auto: as many as bring the most tokens a second, "
    "none where none do.",
)

audited_draft_n_option = draft_n_option_of(
    defaults.N_DRAFT_FIXED,
    "Tokens that the draft writes ahead in a round; auto, as in run: fewer, so that as many texts "
    "tell less.",
)


def room_for(n_draft: int | str) -> dict[str, Any]:
    """What `load` has to be told for drafts of that length."""
    return {} if isinstance(n_draft, str) else {"n_draft_max": n_draft}


draft_temperature_option = click.option(
    "--draft-temp",
    "draft_temperature",
    default=defaults.DRAFT_TEMPERATURE,
    show_default=True,
    callback=lambda context, option, value: _temperature_or_auto(value),
    help="Temperature of the draft; 0: its likeliest token; auto: learned while it writes, so that "
    "most is accepted. The text keeps the target's distribution at any.",
)

drafter_option = click.option(
    "--drafter",
    help="Who drafts: model, ngram (the text so far, without a model), auto (whoever gains more), "
    "none, or a file of yours. [default: auto; model with a number for --draft-n]",
)

prompt_options = gathered(
    "asked",
    click.option("-p", "--prompt", help="The prompt."),
    click.option(
        "-f",
        "--file",
        "prompt_file",
        type=click.Path(path_type=Path),
        help="Read the prompt from a file.",
    ),
    click.option(
        "--chat", is_flag=True, help="Answer the prompt by the target's own chat template."
    ),
    click.option("--system", help="System message of the chat; implies --chat."),
)

stop_option = click.option(
    "--stop", multiple=True, help="Text that ends the generation; may be given several times."
)

ignore_eos_option = click.option(
    "--ignore-eos", is_flag=True, help="Forbid the tokens that end a text."
)

verify_option = click.option(
    "--verify",
    default=defaults.VERIFY,
    show_default=True,
    help="How drafted tokens are judged: block (as a whole), rejection (token by token), or match "
    "(as llama.cpp does). The text has the target's distribution by each.",
)

color_option = click.option(
    "--color",
    type=click.Choice(render.COLOR_CHOICES),
    default="auto",
    show_default=True,
    help="Show in green what the draft wrote and the target accepted.",
)

verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Show llama.cpp's log on stderr."
)

explaining_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show on stderr why each round had its length, where the time went, and llama.cpp's log.",
)


def _count_or_auto(value: str) -> int | str:
    if value == "auto":
        return value
    try:
        count = int(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither a whole number nor 'auto'") from error
    if not 1 <= count <= defaults.N_DRAFT_LIMIT:
        raise click.BadParameter(
            f"{count} is not in the range 1<=x<={defaults.N_DRAFT_LIMIT}; or give 'auto'"
        )
    return count


def _temperature_or_auto(value: str) -> float | str:
    if value == "auto":
        return value
    try:
        return float(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither a number nor 'auto'") from error


def show_log(verbose: bool) -> None:
    """Let llama.cpp's log through to stderr."""
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = logging.getLogger("ggufspec")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
