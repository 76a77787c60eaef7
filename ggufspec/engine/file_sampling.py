"""Reads the sampling that a model file recommends (`general.sampling.*`), as llama.cpp does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ggufspec.common import defaults
from ggufspec.decoding.sampling_options import Sampling, sampler_name
from ggufspec.engine.options import GenerateOptions
from ggufspec.errors import OptionError

_PREFIX = "general.sampling."
_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "sequence": "samplers",
}
_UNSUPPORTED = {"xtc_probability": "xtc", "mirostat": "mirostat"}  # 0 is off


class FileSampling(NamedTuple):
    """The sampling options that a file sets, and one line for each value that is ignored."""

    options: GenerateOptions
    notes: tuple[str, ...] = ()


def file_sampling(values: Mapping[str, object]) -> FileSampling:
    """The sampling in the metadata of a file (Header.values)."""
    options: dict[str, Any] = {}
    notes: list[str] = []
    for key, name in _NAMES.items():
        if (value := values.get(_PREFIX + key)) is None:
            continue
        try:
            found: Any = _samplers(value, notes) if name == "samplers" else _number(name, value)
            options[name] = getattr(Sampling(**{name: found}), name)
        except OptionError as error:
            notes.append(f"{_PREFIX}{key} of the file is not used, but the default: {error}")
    for key, sampler in _UNSUPPORTED.items():
        if values.get(_PREFIX + key) not in (None, 0, "0"):
            notes.append(_not_applied(sampler))
    return FileSampling(options, tuple(notes))  # type: ignore[arg-type]


def sampling_text(options: GenerateOptions) -> str:
    """The options as text, such as "temperature 0.7, top-p 0.8"."""
    shown = {**options, "samplers": "; ".join(options.get("samplers", ()))}
    return ", ".join(
        f"{name.replace('_', '-')} {value}" for name, value in shown.items() if value != ""
    )


def _number(name: str, value: object) -> float:
    """The value as llama.cpp uses it: six decimals; a top-k below 1 keeps all tokens."""
    try:
        number = math.nan if isinstance(value, bool) else round(float(value), 6)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise OptionError(f"{name} is {repr(value)[:40]}; it must be a number")
    if name in ("top_k", "repeat_last_n") and math.isfinite(number):
        return max(int(number), 0) if name == "top_k" else int(number)
    return number


def _samplers(value: object, notes: list[str]) -> list[str]:
    names = [sampler_name(name) for name in str(value).split(";") if name]
    known = [name for name in names if name in defaults.SAMPLERS]
    notes += [_not_applied(name[:40]) for name in names if name not in {*known, "xtc"}]
    if not known:
        raise OptionError(f"samplers is {repr(value)[:40]}; none of them is supported")
    return known


def _not_applied(sampler: str) -> str:
    return f"the file asks for the sampler {sampler!r}, which is not supported and is left out"
