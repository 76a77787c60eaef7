"""Parses request bodies as JSON that every parser reads in the same way.

That is: UTF-8, finite numbers of at most 19 digits, no repeated keys, no half of a surrogate pair,
and at most 64 levels of nesting.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ggufspec.server.errors import ApiError

_MAX_DEPTH = 64
_MAX_DIGITS = 19
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(body: bytes) -> Any:
    """The document. Raises ApiError (400)."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"not UTF-8 at byte {error.start}") from None
    try:
        document = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_limited_int,
            object_pairs_hook=_object_of,
        )
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from None
    _check_depth_and_text(document)
    return document


def _check_depth_and_text(document: object) -> None:
    level: list[object] = [document]
    for _ in range(_MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and _SURROGATE.search(value):
                raise _invalid("a string has half of a surrogate pair")
        if not below:
            return
        level = below
    raise _too_deep()


def _refuse_constant(name: str) -> object:
    raise _invalid(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid("a number is too large")
    return value


def _limited_int(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_DIGITS:
        raise _invalid(f"an integer has more than {_MAX_DIGITS} digits")
    return int(text)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _invalid("a key occurs twice in one object")
    return found


def _too_deep() -> ApiError:
    return _invalid(f"nested deeper than {_MAX_DEPTH} levels")


def _invalid(found: str) -> ApiError:
    return ApiError(
        400, f"the body is not valid JSON: {found}; send one JSON object", code="invalid_json"
    )
