"""JSON values as they should be, or a ValueError that says what was found where, and needed.

Knows types and ranges; nothing of what the values mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Kind: TypeAlias = Callable[[str, object], Any]  # (where it stands, value) -> value

_MOST = 2**53  # beyond, JSON's numbers are not whole any more
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e9  # rates of them are numbers that one can reckon with
_MOST_NUMBER = 1e15
_N_SHOWN = 40
_N_LEVELS = 32


def text(where: str, value: object) -> str:
    """A text that can be printed: no half of a character."""
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(where, value.encode(errors="replace").decode(), "a text in Unicode") from None
    return value


def count(where: str, value: object) -> int:
    """A whole number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise _wrong(where, value, "a whole number from 0 on")
    return value


def seconds(where: str, value: object) -> float:
    """A duration, or 0."""
    found = _number(where, value)
    if found != 0 and not _LEAST_SECONDS <= found <= _MOST_SECONDS:
        raise _wrong(where, value, "a number of seconds, from 0 on")
    return found


def amount(where: str, value: object) -> float:
    """A number from 0 on."""
    found = _number(where, value)
    if not 0 <= found <= _MOST_NUMBER:
        raise _wrong(where, value, "a number from 0 on")
    return found


def switch(where: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(where, value, "true or false")
    return value


def plain(where: str, value: object, level: int = 0) -> Any:
    """Any JSON that can be written again: finite numbers, whole texts, not too deep."""
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
    """An object of any JSON."""
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    found: dict[str, Any] = plain(where, value)
    return found


def optional(kind: Kind) -> Kind:
    """That kind, or null."""
    return lambda where, value: None if value is None else kind(where, value)


def several(kind: Kind) -> Kind:
    """A list of that kind."""

    def check(where: str, value: object) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        return [kind(f"{where}[{i}]", each) for i, each in enumerate(value)]

    return check


def record(kinds: Mapping[str, Kind]) -> Kind:
    """An object with these keys at least; others are left out."""

    def check(where: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        missing = next((name for name in kinds if name not in value), None)
        if missing is not None:
            raise ValueError(f"{where or 'it'} has no {missing!r}")
        within = f"{where}." if where else ""
        return {name: kind(f"{within}{name}", value[name]) for name, kind in kinds.items()}

    return check


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > _MOST:
        raise _wrong(where, value, "a number")
    if not math.isfinite(value):
        raise _wrong(where, value, "a number")
    return float(value)


def _wrong(where: str, value: object, needed: str) -> ValueError:
    shown = repr(value if not isinstance(value, (dict, list)) else type(value).__name__)
    short = shown if len(shown) <= _N_SHOWN else f"{shown[:_N_SHOWN]}..."
    return ValueError(f"{where} is {short}; it must be {needed}")
