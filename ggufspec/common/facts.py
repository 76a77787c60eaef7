"""Settings and other facts as plain JSON, and what differs between two sets of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_N_SHOWN = 60  # characters of a value


def plain(value: object) -> Any:
    """The value as JSON can hold it: no infinite numbers, no surrogates."""
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
    """Such as "1 token" and "2 tokens"."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that a text is; None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two JSON objects, such as 'n_tokens was 64, is 96'."""
    then, now = dict(_flat(before)), dict(_flat(after))
    for name in dict.fromkeys([*then, *now]):
        old, new = (
            json.dumps(each[name], ensure_ascii=False) if name in each else "not given"
            for each in (then, now)
        )
        if old != new:
            yield f"{name} was {_short(old)}, is {_short(new)}"


def _flat(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values with their path as name."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _short(text: str) -> str:
    return text if len(text) <= _N_SHOWN else f"{text[: _N_SHOWN - 3]}..."
