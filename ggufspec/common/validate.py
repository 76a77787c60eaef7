"""Checks argument values: each function returns the typed value or raises OptionError."""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

from ggufspec.errors import OptionError

_UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(-?)((?:\d+(?:\.\d*)?(?:ns|us|ms|s|m|h))+|\d+(?:\.\d*)?)", re.ASCII)
_LEAST32, _MOST32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of 32 bits


def number(name: str, value: object) -> float:
    """A real number, also a numpy scalar, as a float."""
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"{name} is {value!r}; it must be a number") from error


def duration(name: str, value: object) -> float:
    """Seconds of a number, or of a text such as "5m" or "1h30m"; infinite if it is negative."""
    match = None if isinstance(value, bool) else _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise OptionError(
            f"{name} is {value!r}; give seconds, or a duration such as 5m or 1h30m; -1: without end"
        )
    parts = re.findall(r"([\d.]+)([a-z]*)", match[2])
    return math.inf if match[1] else sum(float(n) * _UNITS[unit] for n, unit in parts)


def number32(name: str, value: object) -> float:
    """A number that a 32-bit float does not round to 0 or to infinity."""
    found = number(name, value)
    try:
        (kept,) = struct.unpack("<f", struct.pack("<f", found))
    except OverflowError as error:
        raise OptionError(f"{name} is {found}; that is too large") from error
    if kept == 0 != found:
        raise OptionError(f"{name} is {found}; that is too small")
    return found


def whole(name: str, value: object) -> int:
    """An integer, also a numpy scalar, as an int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise OptionError(f"{name} is {value!r}; it must be a whole number") from error


@dataclass(frozen=True)
class Whole:
    """The check of a whole number from `least` to `most`, or of a word for a value."""

    least: int
    most: int | None = 2**31 - 1
    words: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, name: str, value: object) -> Any:
        if self.words and isinstance(value, str):
            if value in self.words:
                return self.words[value]
            raise OptionError(f"{name} is {value!r}; it must be a whole number, or 'auto'")
        found, most = whole(name, value), self.most
        if found < self.least or (most is not None and found > most):
            end = f"at least {self.least}" if most is None else f"from {self.least:,} to {most:,}"
            raise OptionError(f"{name} is {found}; it must be {end}")
        return found


@dataclass(frozen=True)
class Number:
    """The check of a number from `least` to `most`; `above` excludes `least`."""

    least: float | None = None
    most: float | None = None
    above: bool = False

    def __call__(self, name: str, value: object) -> float:
        found, least, most = number32(name, value), self.least, self.most
        if not (
            (most is None or found <= most)
            and (least is None or found > least or (found == least and not self.above))
            and math.isfinite(found)
        ):
            low = "" if least is None else f"{'above' if self.above else 'at least'} {least} and "
            high = "finite" if most is None else f"at most {most}"
            raise OptionError(f"{name} is {found}; it must be {low}{high}")
        return found


POSITIVE = Number(0, above=True)


@dataclass(frozen=True)
class OneOf:
    """The check of a word from a list."""

    words: Sequence[str]

    def __call__(self, name: str, value: object) -> str:
        if value not in self.words:
            raise OptionError(f"{name} is {value!r}; it must be one of {', '.join(self.words)}")
        return str(value)


def switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}; it must be True or False")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r}; it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # such as bytes of a command line that are not UTF-8
        raise OptionError(
            f"{name} is not valid Unicode at character {error.start}: {error.reason}"
        ) from error
    return value


def function(name: str, value: object) -> object:
    if value is not None and not callable(value):
        raise OptionError(f"{name} is {value!r}; it must be a function")
    return value


def path(name: str, value: object) -> Path:
    if not isinstance(value, (str, PathLike)) or not str(value):
        raise OptionError(f"{name} is {value!r}; it must be the path of a file")
    return Path(value)


def paths(name: str, value: object) -> tuple[Path, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(f"{name} is {value!r}; it must be a list of files")
    return tuple(path(f"an entry of {name}", entry) for entry in value)


def texts(name: str, value: object) -> tuple[str, ...]:
    """A list of texts; a single text is refused."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(f"{name} is {value!r}; it must be a list of texts")
    return tuple(text(f"an entry of {name}", entry) for entry in value)


def variables(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        raise OptionError(f"{name} is {value!r}; it must map names to values")
    return dict(value)


def tokens(name: str, value: object) -> tuple[int, ...]:
    """A tuple of token ids; empty for None."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Iterable, NoneType)):
        raise OptionError(f"{name} is {value!r}; it must be a list of token ids")
    return tuple(whole(f"a token of {name}", token) for token in (() if value is None else value))


def shares(name: str, value: object) -> tuple[float, ...]:
    """Relative shares: numbers of at least 0 with a sum above 0; may be empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(f"{name} is {value!r}; it must be a list of numbers")
    found = tuple(number(f"a share of {name}", each) for each in value)
    if found and (not all(0 <= each < math.inf for each in found) or not sum(found)):
        raise OptionError(f"{name} is {value!r}; give shares such as [3, 1]")
    return found


def biases(name: str, value: object) -> dict[int, float]:
    """A mapping from token ids to numbers."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} is {value!r}; it must map token ids to numbers")
    if {*map(type, value)} == {int} and {*map(type, value.values())} <= {int, float}:
        known = dict(value)
        sizes = map(abs, known.values())
        if (
            min(known) >= 0
            and max(known) < 2**31
            and all(size == 0 or _LEAST32 <= size <= _MOST32 or size == math.inf for size in sizes)
        ):
            return known  # as below, but 75,000 in some milliseconds
    found = {
        whole(f"a token of {name}", token): number32(f"{name} of token {token}", bias)
        for token, bias in value.items()
    }
    for token in found:
        if not 0 <= token < 2**31:
            raise OptionError(f"{name} names token {token}; token ids are from 0 to {2**31 - 1}")
    return found
