"""Parses JSON: bodies strictly, as parsers may differ; arguments of calls even if cut off."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

from pydantic_core import from_json

from ggufspec.server.errors import ApiError

_MAX_DEPTH = 64
_MAX_DIGITS = 19
_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"
_SURROGATE = re.compile("[\ud800-\udfff]")
_CUT_PAIR = re.compile(r"\\u[dD][89abAB]..(\\(u[0-9a-fA-F]{0,3})?)?\Z")


def parse_json(body: bytes) -> Any:
    """The document. Raises ApiError (400)."""
    try:
        document = json.loads(
            body.decode("utf-8"),
            parse_constant=_finite_float,
            parse_float=_finite_float,
            parse_int=_limited_int,
            object_pairs_hook=_object_of,
        )
        _check_depth_and_text(document)
        return document
    except UnicodeDecodeError as error:
        found = f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        found = f"{error.msg} at character {error.pos}"
    except RecursionError:
        found = _TOO_DEEP
    except ValueError as error:  # raised by the checks below
        found = str(error)
    message = f"the body is not valid JSON: {found}; send one JSON object"
    raise ApiError(400, message, code="invalid_json")


def sent_arguments(text: str) -> str:
    """The arguments of an earlier call as JSON text of an object, for chat templates.

    Completes arguments that were cut off; puts a text that is no object into one.
    """
    if text.strip() in ("", "null"):
        return "{}"
    # A string that ends in half of a surrogate pair is left out.
    is_half = _CUT_PAIR.search(text) is not None
    ways: tuple[bool | Literal["trailing-strings"], ...]
    ways = (False, True if is_half else "trailing-strings")
    for way in ways:
        try:
            value = from_json(text, allow_partial=way)
        except ValueError:
            continue
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False) if way else text
    return json.dumps({"arguments": text}, ensure_ascii=False)


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
                raise ValueError("a string has half of a surrogate pair")
        if not below:
            return
        level = below
    raise ValueError(_TOO_DEEP)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_MAX_DIGITS]} is not a JSON number, or too large")
    return value


def _limited_int(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(f"an integer has more than {_MAX_DIGITS} digits")
    return int(text)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found
