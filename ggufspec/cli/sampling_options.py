"""The sampling options and constraints of the command line, by llama.cpp's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from ggufspec.cli.files import read_file
from ggufspec.cli.options import COUNT, NOT_NEGATIVE, POSITIVE, Option, gathered, option
from ggufspec.common import defaults
from ggufspec.errors import OptionError

_BIAS = re.compile(r"(\d+)([+-](?:inf|\d*\.?\d+(?:e[+-]?\d+)?))", re.IGNORECASE)


def _biases(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> Any:
    """15043+1, 15043-0.5, 15043-inf -> {token: bias}."""
    found = {}
    for text in given:
        if (match := _BIAS.fullmatch(text.strip())) is None:
            raise click.BadParameter(
                f"{text!r} is not a token id with a bias, such as 15043+1 or 15043-inf"
            )
        found[int(match[1])] = float(match[2])
    return found


def _names(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(";") if name.strip())
    if not names:
        raise click.BadParameter("no sampler is named; give at least 'temperature'")
    return names


def _breakers(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Given breakers replace the default ones; `none` means no breakers."""
    if not given:
        return defaults.DRY_SEQUENCE_BREAKERS
    return tuple(text for text in given if text != "none")


def _from_file(names: str, help_text: str, end: str = "") -> Option:
    """An option whose value is the text of a file, without the characters `end` at its end."""

    def read(context: click.Context, option: click.Parameter, path: Path | None) -> str | None:
        if path is None:
            return None
        try:
            return read_file(path, "the file", OptionError).decode("utf-8-sig").rstrip(end)
        except UnicodeDecodeError as error:
            raise OptionError(f"{path} is not UTF-8 at byte {error.start}") from error

    return option(names, help_text, type=click.Path(path_type=Path), callback=read)


def _refused(context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value not in (None, "0", "0.0"):
        raise click.UsageError(
            f"{option.opts[0]} is not supported: such a sampler draws its own random numbers or "
            "depends on earlier draws, so there is no distribution to verify a draft against; "
            "leave it out"
        )


_SHARE = click.FloatRange(min=0, max=1, min_open=True)
_WINDOW = click.IntRange(min=-1)


def _number(names: str, help_text: str, kind: click.ParamType[Any], default: float) -> Option:
    return option(names, help_text, type=kind, default=default)


_TEMPERATURE = _number(
    "--temp temperature",
    "Temperature; 0: greedy. Sampling options that are not given come from the target's file if "
    "it has them.",
    NOT_NEGATIVE,
    defaults.TEMPERATURE,
)
_BESIDE_TEMPERATURE = (
    _number("--top-k", "Keep the k most likely tokens; 0: off.", COUNT, defaults.TOP_K),
    _number(
        "--top-p",
        "Keep the most likely tokens up to this total probability; 1: off.",
        _SHARE,
        defaults.TOP_P,
    ),
    _number(
        "--min-p",
        "Keep tokens with this probability relative to the most likely one; 0: off.",
        click.FloatRange(min=0, max=1),
        defaults.MIN_P,
    ),
    _number(
        "--typical --typical-p typical_p",
        "Keep the most typical tokens up to this total probability; 1: off.",
        _SHARE,
        1.0,
    ),
    _number(
        "--top-nsigma --top-n-sigma top_n_sigma",
        "Keep tokens within this many standard deviations of the largest logit; 0: off.",
        click.FLOAT,
        0.0,
    ),
    _number(
        "--repeat-last-n",
        "Number of last tokens that are penalized; 0: off, -1: all.",
        _WINDOW,
        defaults.REPEAT_LAST_N,
    ),
    _number("--repeat-penalty", "Penalty factor for repeated tokens; 1: off.", POSITIVE, 1.0),
    _number(
        "--presence-penalty", "Subtracted once from logits of repeated tokens.", click.FLOAT, 0.0
    ),
    _number(
        "--frequency-penalty",
        "Subtracted from logits of repeated tokens, per repetition.",
        click.FLOAT,
        0.0,
    ),
    _number(
        "--dry-multiplier", "DRY: penalty for continuing a repetition; 0: off.", NOT_NEGATIVE, 0.0
    ),
    _number(
        "--dry-base",
        "DRY: growth of the penalty per repeated token.",
        click.FloatRange(min=1),
        defaults.DRY_BASE,
    ),
    _number(
        "--dry-allowed-length",
        "DRY: longest repetition without a penalty.",
        COUNT,
        defaults.DRY_ALLOWED_LENGTH,
    ),
    _number(
        "--dry-penalty-last-n",
        "DRY: number of last tokens to search; 0: off, -1: all.",
        _WINDOW,
        defaults.DRY_PENALTY_LAST_N,
    ),
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
        "--samplers",
        f"Samplers in their order, separated by ';'.  [default: {'; '.join(defaults.SAMPLERS)}]",
        default=";".join(defaults.SAMPLERS),
        callback=_names,
        show_default=False,
    ),
    option(
        "-j --json-schema",
        "JSON schema of the text (oneOf is treated as anyOf); {}: any JSON.",
        metavar="SCHEMA",
    ),
    _from_file("-jf --json-schema-file", "Read the schema from a file."),
    option("--grammar", "Grammar of the text, in Lark or GBNF.", metavar="GRAMMAR"),
    _from_file("--grammar-file", "Read the grammar from a file."),
    option("--regex", "Regular expression that matches the whole text.", metavar="REGEX"),
    # Most editors write a line break at the end of a file.
    _from_file("--regex-file", "Read the regular expression from a file.", end="\r\n"),
    option(
        "--choice choices",
        "The whole text is TEXT; several times: one of them.",
        multiple=True,
        callback=lambda context, option, given: given or None,
    ),
    *(
        click.option(name, hidden=True, expose_value=False, callback=_refused)
        for name in ("--mirostat", "--xtc-probability", "--adaptive-target")
    ),
)

_CONSTRAINTS = {
    "json_schema": "--json-schema",
    "json_schema_file": "--json-schema-file",
    "grammar": "--grammar",
    "grammar_file": "--grammar-file",
    "regex": "--regex",
    "regex_file": "--regex-file",
    "choices": "--choice",
}  # a text has at most one

SAMPLING = (_TEMPERATURE, *_BESIDE_TEMPERATURE)
sampling_options_beside_temperature = gathered("sampling", *_BESIDE_TEMPERATURE)


def to_generate(sampling: dict[str, Any]) -> dict[str, Any]:
    """The same for `generate`: a constraint may come from a file. Raises UsageError."""
    given = [name for name in _CONSTRAINTS if sampling[name] is not None]
    if len(given) > 1:
        options = " and ".join(_CONSTRAINTS[name] for name in given)
        raise click.UsageError(f"{options} were given; give one of them")
    in_files = {name: sampling[name] for name in given if name.endswith("_file")}
    found = {name: value for name, value in sampling.items() if not name.endswith("_file")}
    return found | {name.removesuffix("_file"): text for name, text in in_files.items()}


def to_json(sampling: dict[str, Any]) -> dict[str, Any]:
    """The same for a document: JSON has no infinity."""
    biases = {str(token): bias for token, bias in sampling["logit_bias"].items()}
    shown = {token: str(bias) if bias == float("-inf") else bias for token, bias in biases.items()}
    return {**sampling, "logit_bias": shown}
