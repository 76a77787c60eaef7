"""The options of a text (drafting, sampling, constraints), with llama.cpp's names; their checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render, shared
from ggufspec.cli.loading import PairOptions
from ggufspec.cli.parameters import Command, Number, Option, gathered, only, option, read_option
from ggufspec.common import defaults
from ggufspec.common.facts import plain
from ggufspec.decoding.sampling_options import NUMBERS
from ggufspec.models.heads import DraftFile

if TYPE_CHECKING:
    from ggufspec.engine.options import CheckedOptions, FileSampling

_BIAS = re.compile(r"(\d+)([+-](?:inf|\d*\.?\d+(?:e[+-]?\d+)?))", re.IGNORECASE)


def _biases(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> Any:
    """The bias of each token, from texts such as 15043+1, 15043-0.5, 15043-inf."""
    found = {}
    for text in given:
        if (match := _BIAS.fullmatch(text.strip())) is None:
            raise click.BadParameter(
                f"{text!r} is not a token id with a bias, such as 15043+1 or 15043-inf"
            )
        found[int(match[1])] = float(match[2])
    return found


def _names(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    if text is None:
        return defaults.SAMPLERS
    if names := tuple(name.strip() for name in text.split(";") if name.strip()):
        return names
    raise click.BadParameter("no sampler is named; give at least 'temperature'")


def _breakers(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    if not given:
        return defaults.DRY_SEQUENCE_BREAKERS
    return tuple(text for text in given if text != "none")


_NAMES = {  # of options that are not named after their field
    "temperature": "--temp temperature | --temperature $LLAMA_ARG_TEMPERATURE",
    "dynatemp_exponent": "--dynatemp-exponent | --dynatemp-exp",
    "typical_p": "--typical-p | --typical",
    "top_n_sigma": "--top-n-sigma | --top-nsigma",
    "mirostat_tau": "--mirostat-tau | --mirostat-ent",
    "mirostat_eta": "--mirostat-eta | --mirostat-lr",
}


def _sampler(name: str) -> Option:
    default, (least, most, above), text = NUMBERS[name]
    kind: click.ParamType[Any] = Number(least, most, min_open=above)
    if isinstance(default, int):
        kind = click.IntRange(None if least is None else int(least))
    elif least is None:
        kind = click.FLOAT
    names = _NAMES.get(name, f"--{name.replace('_', '-')}")
    if name.endswith("_penalty") or name in ("top_k", "top_p", "min_p"):
        names += f" $LLAMA_ARG_{name.upper()}"
    return option(names, text, type=kind, default=default)


_TEMPERATURE, *_NUMBERS = map(_sampler, NUMBERS)
_SAMPLERS = (
    *_NUMBERS,
    option(
        "--dry-sequence-breaker dry_sequence_breakers",
        "DRY: a text that ends a repetition; may be given several times; none: no such text. "
        "[default: newline, colon, quote, asterisk]",
        multiple=True,
        callback=_breakers,
    ),
    option(
        "-l --logit-bias logit_bias",
        "Add BIAS to the logit of a token, such as 15043+1 or 15043-inf; may be given several "
        "times.",
        multiple=True,
        metavar="ID(+/-)BIAS",
        callback=_biases,
    ),
    option(
        "--banned-string banned_strings",
        "A string that the text never contains, in upper or lower case; may be given several "
        "times.",
        multiple=True,
    ),
    option(
        "--samplers",
        f"Samplers in their order, separated by ';'.  [default: {'; '.join(defaults.SAMPLERS)}]",
        callback=_names,
    ),
)
_CONSTRAINTS = (
    option(
        "-j --json-schema",
        "JSON schema of the text; {}: any JSON. oneOf is treated as anyOf.",
        metavar="SCHEMA",
    ),
    option("-jf --json-schema-file", "Read the schema from a file.", **read_option()),
    option("--grammar", "Grammar of the text, in Lark or GBNF.", metavar="GRAMMAR"),
    option("--grammar-file", "Read the grammar from a file.", **read_option()),
    option("--regex", "Regular expression that matches the whole text.", metavar="REGEX"),
    # Most editors write a line break at the end of a file.
    option("--regex-file", "Read the regular expression from a file.", **read_option("\r\n")),
    option(
        "--choice choices",
        "The whole text is TEXT; several times: one of them.",
        multiple=True,
        callback=lambda context, option, given: given or None,
    ),
)


def _to_generate(**sampling: Any) -> dict[str, Any]:
    """The options for `generate`, with constraints from files, not checked. Raises UsageError."""
    from ggufspec.engine.options import CONSTRAINTS

    constraints = (name for each in CONSTRAINTS for name in (each, f"{each}_file"))
    given = [name for name in constraints if sampling.get(name) is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(map(flag_of, given))} were given; give one of them")
    for name in [name for name in sampling if name.endswith("_file")]:
        text = sampling.pop(name)
        if text is not None:
            sampling[name.removesuffix("_file")] = text
    if sampling.get("max_tokens") == -2:  # llama.cpp's word for it
        sampling |= {"max_tokens": None, "context_shift": False}
    return sampling


_OF_DRAFT_MODELS = (
    *("draft_temperature", "n_threads_draft", "n_gpu_layers_draft", "n_ctx_draft"),
    *("override_tensor_draft", "n_cpu_moe_draft", "n_cpu_ffn_draft", "lora_draft"),
)
_NEEDS_DRAFT = "{} needs a draft model: name one with --draft"
_OF_DRAFTS = ("n_draft", "tree", "verify")  # they also affect n-gram lookup
_BESIDE_TEMPERATURE = (*_SAMPLERS, *_CONSTRAINTS)
_SAMPLING = (_TEMPERATURE, *_BESIDE_TEMPERATURE)
sampling_options_beside_temperature = gathered("sampling", *_BESIDE_TEMPERATURE, make=_to_generate)
# The options that a server accepts as defaults for its requests.
_DEFAULTS = (
    *(*shared.DRAFTING, _TEMPERATURE, *_SAMPLERS),
    *(shared.max_tokens_option, shared.seed_option),
)
default_options = gathered("settings", *_DEFAULTS, *shared.LIMITS, make=_to_generate)
audited_options = gathered(
    "options", *only(shared.DRAFTING, "draft_temperature"), *_SAMPLING, make=_to_generate
)


def text_options(*others: Option) -> Callable[[Command], Command]:
    """All options of a text, and `others`, combined into the command's argument `settings`."""
    ends = (shared.stop_option, shared.ignore_eos_option, *shared.LIMITS)
    texts = (*shared.DRAFTING, *ends, *_SAMPLING, *others)
    return gathered("settings", *texts, make=_to_generate)


def checked(settings: Mapping[str, Any]) -> CheckedOptions:
    """The settings, checked, as options for `Engine.begin`. Raises OptionError."""
    from ggufspec.engine.options import CheckedOptions

    return CheckedOptions.of(settings)  # type: ignore[arg-type]


def with_file_sampling(
    settings: Mapping[str, Any], found: FileSampling, *, verbose: bool
) -> dict[str, Any]:
    """The settings, with the target file's values for sampling options that were not given.

    If `verbose`, prints them, and values of the file that are not used.
    """
    from ggufspec.engine.options import sampling_text

    taken: Any = {name: each for name, each in found.options.items() if not was_given(name)}
    if verbose and taken:
        render.note(f"sampling from the file: {sampling_text(taken)}")
    for line in found.notes:
        render.note(line)
    return {**settings, **taken}


def check(pair: PairOptions, settings: dict[str, Any], *, compare: bool = False) -> None:
    """Check the settings of a text and of its pair, before models are loaded.

    Raises UsageError for a draft without a target, or an option that needs a missing draft; and
    OptionError.
    """
    options = checked(settings)
    pair.check()
    if pair.draft is not None or pair.target is None:
        return
    has_no_drafts = options.drafter_name(has_draft=False) in ("none", "model")
    refuse_without_draft(*(_OF_DRAFTS if has_no_drafts else ()))
    if compare and has_no_drafts:
        raise click.UsageError(_NEEDS_DRAFT.format("--compare"))


def refuse_without_draft(*others: str) -> None:
    """Raise UsageError if an option of draft models was given, or one of `others`."""
    for name in (*_OF_DRAFT_MODELS, *others):
        if is_on_command_line(name):
            raise click.UsageError(_NEEDS_DRAFT.format(flag_of(name)))


def was_given(name: str) -> bool:
    context = click.get_current_context()
    return context.get_parameter_source(name) not in (None, click.core.ParameterSource.DEFAULT)


def is_on_command_line(name: str) -> bool:
    """Whether a parameter was given on the command line, not only by an environment variable."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def flag_of(name: str) -> str:
    """The long name of the option that sets a parameter of the command."""
    parameters = click.get_current_context().command.params
    return next(each.opts[-1] for each in parameters if each.name == name)


def conditions(paths: tuple[Path, DraftFile | None], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings and versions that a result depends on, for a JSON document."""
    pair = dict(zip(("target", "draft"), paths, strict=True))
    return {"settings": plain({**pair, **settings}), "versions": render.versions()}
