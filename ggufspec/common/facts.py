"""Converts settings and other facts to plain JSON, and lists differences between two sets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_N_SHOWN = 60  # longest value shown, in characters


def plain(value: object) -> Any:
    """The value in a form that JSON can hold: without infinite numbers and surrogates."""
    if isinstance(value, Mapping):
        return {str(plain(str(name))): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, Path)):  # a path may have bytes that are not UTF-8
        return str(value).encode("utf-8", "backslashreplace").decode()
    return value


def counted(n: int, what: str) -> str:
    """The number with its noun, such as "1 token" or "2 tokens"."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a text; None if the text is not exactly one JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """One line per value that differs between two JSON objects: 'n_tokens was 64, is 96'."""
    then, now = dict(_flat(before)), dict(_flat(after))
    for name in dict.fromkeys([*then, *now]):
        old, new = (
            json.dumps(each[name], ensure_ascii=False) if name in each else "not given"
            for each in (then, now)
        )
        if old != new:
            yield f"{name} was {_short(old)}, is {_short(new)}"


def _flat(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each innermost value with its path, such as ("sampling.top_k", 40)."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _short(text: str) -> str:
    return text if len(text) <= _N_SHOWN else f"{text[: _N_SHOWN - 3]}..."
