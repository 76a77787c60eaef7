"""Checks decoded JSON by type hints; raises ValueError with the path, the value and the need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

_MAX = 2**53  # larger numbers of JSON are not exact
_MIN = 1e-9  # of a number that is not 0, so that rates are finite
_N_SHOWN = 40
_N_LEVELS = 32
_hints = cache(get_type_hints)


def decode(kind: Any, where: str, value: object) -> Any:
    """The value as a type: str, bool, int, float, None, or a list, mapping or dataclass of them.

    Numbers are at least 0. A dataclass is an object with at least its fields, or a list of them in
    order.
    """
    if kind is str:
        return _text(where, value)
    if kind is bool:
        return _checked(isinstance(value, bool), where, value, "true or false")
    if kind is int:
        is_whole = type(value) is int and 0 <= value <= _MAX
        return _checked(is_whole, where, value, "a whole number of at least 0")
    if kind is float:
        is_number = type(value) in (int, float) and (value == 0 or _MIN <= value <= _MAX)  # type: ignore[operator]
        return _checked(is_number, where, value, "a number of at least 0")
    if is_dataclass(kind):
        return _record(kind, where, value)
    inner = get_args(kind)
    if type(None) in inner:
        return None if value is None else decode(inner[0], where, value)
    if issubclass(get_origin(kind), Mapping):
        return _plain(where, _checked(isinstance(value, dict), where, value, "an object"))
    entries = _checked(isinstance(value, list), where, value, "a list")
    return [decode(inner[0], f"{where}[{i}]", each) for i, each in enumerate(entries)]


def _record(kind: Any, where: str, value: object) -> Any:
    kinds = _hints(kind)
    if isinstance(value, list):
        value = dict(zip(kinds, value, strict=False))
    found = _checked(isinstance(value, dict), where, value, "an object")
    missing = next((name for name in kinds if name not in found), None)
    if missing is not None:
        raise ValueError(f"{where or 'it'} has no {missing!r}")
    within = f"{where}." if where else ""
    return kind(**{name: decode(each, within + name, found[name]) for name, each in kinds.items()})


def _text(where: str, value: object) -> str:
    """A text without surrogates, so that it can be printed."""
    text: str = _checked(isinstance(value, str), where, value, "a text")
    shown = text.encode(errors="replace").decode()
    _checked(shown == text, where, shown, "a text in Unicode")
    return text


def _plain(where: str, value: object, level: int = 0) -> Any:
    """Any JSON that can be encoded again: finite numbers, no surrogates, not too deep."""
    if level > _N_LEVELS:
        raise ValueError(f"{where} is nested too deeply; it must have at most {_N_LEVELS} levels")
    if isinstance(value, dict):
        return {_text(where, name): _plain(where, value[name], level + 1) for name in value}
    if isinstance(value, list):
        return [_plain(where, each, level + 1) for each in value]
    if isinstance(value, str):
        return _text(where, value)
    is_number = not isinstance(value, float) or math.isfinite(value)
    return _checked(is_number, where, value, "a number")


def _checked(is_valid: bool, where: str, value: object, needed: str) -> Any:
    if is_valid:
        return value
    shown = repr(value if not isinstance(value, (dict, list)) else type(value).__name__)
    short = shown if len(shown) <= _N_SHOWN else f"{shown[:_N_SHOWN]}..."
    raise ValueError(f"{where} is {short}; it must be {needed}")
