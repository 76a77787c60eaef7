"""Parses JSON: bodies strictly, as parsers may differ; arguments of calls even if cut off."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from ggufspec.server.errors import ApiError

_LARGE_BODY = 2**16
_MAX_DEPTH = 64
_MAX_DIGITS = 19
_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")  # in each body with surrogates
_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE = (b"0" * (_MAX_DIGITS + 1), b"0e000", b"0e+000")  # in each body with numbers to check
_CUT_PAIR = re.compile(r"\\u[dD][89abAB]..(\\(u[0-9a-fA-F]{0,3})?)?\Z")


async def parsed_body(body: bytes) -> Any:
    """The document, parsed in another thread if it is large: 1 MB takes 0.1 s. Raises ApiError."""
    is_large = len(body) >= _LARGE_BODY
    return await run_in_threadpool(parse_json, body) if is_large else parse_json(body)


def parse_json(body: bytes) -> Any:
    """The document. Raises ApiError (400)."""
    try:
        shape = body.translate(_AS_ZEROS)
        has_large = any(each in shape for each in _LARGE)  # to check each number would take long
        document = json.loads(
            body.decode("utf-8"),
            parse_constant=_finite_float,
            parse_float=_finite_float if has_large else None,
            parse_int=_limited_int if has_large else None,
            object_pairs_hook=_object_of,
        )
        _check_depth(document)
        if _ESCAPED.search(body):
            _check_text(document)
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


def _check_depth(document: object) -> None:
    level: list[Any] = [document]
    for _ in range(_MAX_DEPTH):
        containers = [value for value in level if isinstance(value, (dict, list))]
        level = []
        for value in containers:
            level += value.values() if isinstance(value, dict) else value
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_text(document: object) -> None:
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += (*value, *value.values())
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and _SURROGATE.search(value):
            raise ValueError("a string has half of a surrogate pair")


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
