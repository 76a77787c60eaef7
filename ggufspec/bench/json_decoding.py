"""Checks values of decoded JSON; raises ValueError with the path, the value and the requirement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Kind: TypeAlias = Callable[[str, object], Any]  # (path, value) -> value

_MAX = 2**53  # larger numbers of JSON are not exact
_MIN_SECONDS, _MAX_SECONDS = 1e-9, 1e9  # so that rates are finite
_MAX_NUMBER = 1e15
_N_SHOWN = 40
_N_LEVELS = 32


def text(where: str, value: object) -> str:
    """A text without surrogates, so that it can be printed."""
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(where, value.encode(errors="replace").decode(), "a text in Unicode") from None
    return value


def _kind(needed: str, is_valid: Callable[[Any], bool]) -> Kind:
    """The values that pass a test; errors say what is `needed`."""

    def check(where: str, value: object) -> Any:
        if not is_valid(value):
            raise _wrong(where, value, needed)
        return value

    return check


def _is_number(value: object) -> bool:
    """Whether it is a finite number that JSON can hold exactly."""
    return type(value) in (int, float) and abs(value) <= _MAX  # type: ignore[arg-type]


switch = _kind("true or false", lambda value: isinstance(value, bool))
count = _kind(
    "a whole number of at least 0",
    lambda value: _is_number(value) and isinstance(value, int) and value >= 0,
)
amount = _kind(
    "a number of at least 0", lambda value: _is_number(value) and 0 <= value <= _MAX_NUMBER
)
seconds = _kind(
    "a number of seconds, of at least 0",
    lambda value: _is_number(value) and (value == 0 or _MIN_SECONDS <= value <= _MAX_SECONDS),
)


def plain(where: str, value: object, level: int = 0) -> Any:
    """Any JSON that can be encoded again: finite numbers, no surrogates, not too deep."""
    if level > _N_LEVELS:
        raise ValueError(f"{where} is nested too deeply; it must have at most {_N_LEVELS} levels")
    if isinstance(value, dict):
        return {text(where, name): plain(where, value[name], level + 1) for name in value}
    if isinstance(value, list):
        return [plain(where, each, level + 1) for each in value]
    if isinstance(value, str):
        return text(where, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(where, value, "a number")
    return value


def facts(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    found: dict[str, Any] = plain(where, value)
    return found


def optional(kind: Kind) -> Kind:
    return lambda where, value: None if value is None else kind(where, value)


def several(kind: Kind) -> Kind:
    def check(where: str, value: object) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        return [kind(f"{where}[{i}]", each) for i, each in enumerate(value)]

    return check


def record(kinds: Mapping[str, Kind], where: str, value: object) -> dict[str, Any]:
    """An object with at least these keys; others are dropped."""
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    missing = next((name for name in kinds if name not in value), None)
    if missing is not None:
        raise ValueError(f"{where or 'it'} has no {missing!r}")
    within = f"{where}." if where else ""
    return {name: kind(f"{within}{name}", value[name]) for name, kind in kinds.items()}


def _wrong(where: str, value: object, needed: str) -> ValueError:
    shown = repr(value if not isinstance(value, (dict, list)) else type(value).__name__)
    short = shown if len(shown) <= _N_SHOWN else f"{shown[:_N_SHOWN]}..."
    return ValueError(f"{where} is {short}; it must be {needed}")
