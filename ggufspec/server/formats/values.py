"""The values of a call's arguments: their JSON, and the types that a schema allows."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from ggufspec.engine.answer_syntax import ParameterSyntax


def json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text, escaped for a JSON string, without the quotes."""
    return json_text(text)[1:-1]


def decoded(raw: str) -> str:
    """Decodes a JSON string that is given without quotes; returns `raw` if it is not valid."""
    try:
        found = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return raw
    return str(found)


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types that a tool's schema allows for one of its parameters; "any": unknown."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(found, schema, 8)


def _types(found: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(found, Mapping) or not depth:
        return {"any"}
    types = found.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {str(each) for each in types} or {"any"}
    if "const" in found or isinstance(found.get("enum"), list):
        values = [found["const"]] if "const" in found else found["enum"]
        return {"string"} if all(isinstance(value, str) for value in values) else {"any"}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(found.get(name), list):
            return {each for part in found[name] for each in _types(part, root, depth - 1)}
    if isinstance(found.get("$ref"), str):
        at: object = root
        for step in found["$ref"].split("/")[1:]:
            at = at.get(step) if isinstance(at, Mapping) else None
        return _types(at, root, depth - 1)
    return {"any"}


def json_of(text: str, types: set[str]) -> str:
    """The JSON of a value that the model wrote without quotes."""
    source = text.strip()
    value = value_of(source)
    if isinstance(value, str):
        is_text = value == source or "string" in types
    else:
        is_text = "string" in types and not (types - {"string"}) & _types_of(value)
    return json_text(text if is_text else value)


def _types_of(value: object) -> set[str]:
    names = {bool: "boolean", int: "integer number", float: "number", list: "array", dict: "object"}
    return {"any", *names.get(type(value), "null").split()}


def value_of(source: str) -> Any:
    """The value of a JSON text or Python literal; `source` if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(source)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        return value
    if source[:1] in ("'", '"') and source[-1:] == source[:1] and len(source) > 1:
        return source[1:-1]  # a text with line breaks
    return source


def nested_value(text: str, parameter: ParameterSyntax) -> Any:
    """The value of nested tags, as in MiniMax-M3's lists (of <item>) and objects."""
    begin, close = re.escape(parameter.begin.strip()), re.escape(parameter.string_middle.strip())
    stack: list[tuple[str, list[tuple[str, Any]], str]] = [("", [], "")]
    _, *pieces = re.split(f"{begin}(/?)(.*?){close}", text, flags=re.DOTALL)
    for slash, tag, after in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        if not slash:
            stack.append((tag, [], after))
        elif len(stack) > 1:
            name, members, inside = stack.pop()
            value = _collected(members) if members else value_of(inside.strip())
            stack[-1][1].append((name, value))
    return _collected(stack[0][1])


def _collected(members: list[tuple[str, Any]]) -> Any:
    if all(name == "item" for name, _ in members):
        return [value for _, value in members]
    return dict(members)


def object_text(text: str) -> str:
    """The JSON of the arguments; unwraps a JSON string that contains the object."""
    if text.startswith('"'):
        inside = decoded(text[1:-1])
        return inside if inside.lstrip().startswith("{") else "{}"
    return text if text.startswith("{") else "{}"
