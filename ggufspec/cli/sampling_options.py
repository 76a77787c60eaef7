"""The options that shape a distribution, by llama.cpp's names; for `generate`, in one dict."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from ggufspec.cli.files import read_file
from ggufspec.cli.options import gathered
from ggufspec.common import defaults
from ggufspec.errors import OptionError

_BIAS = re.compile(r"(\d+)([+-](?:inf|\d*\.?\d+(?:e[+-]?\d+)?))", re.IGNORECASE)


def _biases(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> Any:
    """15043+1, 15043-0.5, 15043-inf -> {token: bias}."""
    found = {}
    for text in given:
        match = _BIAS.fullmatch(text.strip())
        if match is None:
            raise click.BadParameter(
                f"{text!r} is not a token id with a bias, such as 15043+1 or 15043-inf"
            )
        found[int(match[1])] = float(match[2])
    return found


def _names(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """The samplers of a list with semicolons."""
    names = tuple(name.strip() for name in text.split(";") if name.strip())
    if not names:
        raise click.BadParameter("names no sampler; 'temperature' alone truncates nothing")
    return names


def _breakers(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Those given take the place of the default ones; `none` stands for none at all."""
    if not given:
        return defaults.DRY_SEQUENCE_BREAKERS
    return tuple(text for text in given if text != "none")


def _read(context: click.Context, option: click.Parameter, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return read_file(path, "the file", OptionError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 at byte {error.start}") from error


def _refused(context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value not in (None, "0", "0.0"):
        raise click.UsageError(
            f"{option.opts[0]} cannot be used: it draws random numbers of its own or "
            "depends on earlier draws, so it defines no distribution to verify a draft against; "
            "leave it out"
        )


_SHARE = click.FloatRange(min=0, max=1, min_open=True)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_NOT_NEGATIVE = click.FloatRange(min=0)
_WINDOW = click.IntRange(min=-1)


def _number(names: tuple[str, ...], kind: click.ParamType[Any], default: float, text: str) -> Any:
    return click.option(*names, type=kind, default=default, show_default=True, help=text)


_TEMPERATURE = _number(
    ("--temp", "temperature"), _NOT_NEGATIVE, defaults.TEMPERATURE, "Temperature; 0: greedy."
)
_BESIDE_TEMPERATURE = (
    _number(
        ("--top-k",),
        click.IntRange(min=0),
        defaults.TOP_K,
        "Keep the k most likely tokens; 0: off.",
    ),
    _number(
        ("--top-p",),
        _SHARE,
        defaults.TOP_P,
        "Keep the likeliest tokens that together have this probability; 1: off.",
    ),
    _number(
        ("--min-p",),
        click.FloatRange(min=0, max=1),
        defaults.MIN_P,
        "Keep tokens at least this likely, relative to the likeliest; 0: off.",
    ),
    _number(
        ("--typical", "--typical-p", "typical_p"),
        _SHARE,
        1.0,
        "Keep the tokens of the most typical surprise that together have this probability; 1: off.",
    ),
    _number(
        ("--top-nsigma", "--top-n-sigma", "top_n_sigma"),
        click.FLOAT,
        0.0,
        "Keep tokens within so many standard deviations of the largest logit; 0: off.",
    ),
    _number(
        ("--repeat-last-n",),
        _WINDOW,
        defaults.REPEAT_LAST_N,
        "Tokens that the penalties look back upon; 0: off, -1: all.",
    ),
    _number(
        ("--repeat-penalty",), _POSITIVE, 1.0, "Divides the logits of repeated tokens; 1: off."
    ),
    _number(
        ("--presence-penalty",), click.FLOAT, 0.0, "Subtracted from the logits of repeated tokens."
    ),
    _number(
        ("--frequency-penalty",),
        click.FLOAT,
        0.0,
        "Subtracted for each time that a token is repeated.",
    ),
    _number(
        ("--dry-multiplier",),
        _NOT_NEGATIVE,
        0.0,
        "DRY: penalty for continuing a repetition; 0: off.",
    ),
    _number(
        ("--dry-base",),
        click.FloatRange(min=1),
        defaults.DRY_BASE,
        "DRY: its growth with each token repeated.",
    ),
    _number(
        ("--dry-allowed-length",),
        click.IntRange(min=0),
        defaults.DRY_ALLOWED_LENGTH,
        "DRY: repetitions that are free.",
    ),
    _number(
        ("--dry-penalty-last-n",),
        _WINDOW,
        defaults.DRY_PENALTY_LAST_N,
        "DRY: tokens that it looks back upon; 0: off, -1: all.",
    ),
    click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        callback=_breakers,
        help="DRY: a text over which nothing is a repetition; may be given several times; none: "
        "no such text. [default: newline, colon, quote, asterisk]",
    ),
    click.option(
        "-l",
        "--logit-bias",
        "logit_bias",
        multiple=True,
        metavar="ID(+/-)BIAS",
        callback=_biases,
        help="Added to the logit of a token, such as 15043+1 or 15043-inf; may be given several "
        "times.",
    ),
    click.option(
        "--samplers",
        default=";".join(defaults.SAMPLERS),
        callback=_names,
        help="Which samplers are used, in what order, with ';' between. "
        f"[default: {'; '.join(defaults.SAMPLERS)}]",
    ),
    click.option("--grammar", metavar="GBNF", help="Write only what this grammar allows."),
    click.option(
        "--grammar-file",
        type=click.Path(path_type=Path),
        callback=_read,
        help="The grammar is in a file.",
    ),
    click.option(
        "-j",
        "--json-schema",
        metavar="SCHEMA",
        help="Write JSON that this schema accepts (of oneOf, perhaps more than one); {}: any JSON.",
    ),
    click.option(
        "-jf",
        "--json-schema-file",
        type=click.Path(path_type=Path),
        callback=_read,
        help="The schema is in a file.",
    ),
    *(
        click.option(name, hidden=True, expose_value=False, callback=_refused)
        for name in ("--mirostat", "--xtc-probability", "--adaptive-target")
    ),
)

sampling_options = gathered("sampling", _TEMPERATURE, *_BESIDE_TEMPERATURE)
sampling_options_beside_temperature = gathered("sampling", *_BESIDE_TEMPERATURE)


def to_generate(sampling: dict[str, Any]) -> dict[str, Any]:
    """The same for `generate`: grammar and schema from wherever they were given."""
    found = dict(sampling)
    for name in ("grammar", "json_schema"):
        in_file = found.pop(f"{name}_file")
        if in_file is not None and found[name] is not None:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"give {option} or {option}-file, not both")
        found[name] = in_file if found[name] is None else found[name]
    return found


def to_json(sampling: dict[str, Any]) -> dict[str, Any]:
    """The same for a document: JSON knows no infinity."""
    biases = {str(token): bias for token, bias in sampling["logit_bias"].items()}
    shown = {token: str(bias) if bias == float("-inf") else bias for token, bias in biases.items()}
    return {**sampling, "logit_bias": shown}
