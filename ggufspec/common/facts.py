"""Forms of values: plain JSON, lines that differ, and text that cannot control a terminal."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_N_SHOWN = 60  # longest value shown, in characters
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


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
    """The number with its noun, such as "1 token" or "2,000 tokens"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def listed(values: Iterable[object]) -> str:
    """The values as in a sentence: "A, B and C"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


def visible(text: str) -> str:
    """The text with control characters, except newline and tab, as escapes such as \\x1b."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class LogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


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
