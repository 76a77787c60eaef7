"""Replaces keywords of a JSON schema that llguidance lacks, where others mean the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Keywords that concern values of one type only.
_TYPES = {
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("propertyNames", "dependentRequired", "dependentSchemas"), "object"),
    "unevaluatedProperties": "object",
}
_ANYTHING: tuple[Any, ...] = ({}, True)

IsName = Callable[[str], bool]


def simplify(part: dict[str, Any], is_name: IsName | None) -> None:
    """Change one part of a schema, but not which values it allows.

    Keywords without effect are removed. A part that allows nothing becomes {"enum": []}.
    `is_name`: whether the part's propertyNames allow a name; None: unknown.
    """
    if part.get("not") in _ANYTHING:
        part.clear()
        part["enum"] = []
    for name in [name for name in part if _is_void(name, part)]:
        del part[name]
    if is_name is not None and "propertyNames" in part:
        _replace_names(part, is_name)


def _is_void(name: str, part: Mapping[str, Any]) -> bool:
    value, types, required = part[name], part.get("type"), part.get("required")
    if name in _TYPES and types is not None:
        listed = types if isinstance(types, list) else [types]
        if _TYPES[name] not in listed:
            return True
    if name == "uniqueItems":
        n_most = part.get("maxItems")
        return value is False or (isinstance(n_most, (int, float)) and n_most <= 1)
    if name == "dependentRequired" and isinstance(value, dict) and isinstance(required, list):
        return all(isinstance(each, list) and set(each) <= set(required) for each in value.values())
    return {
        "not": value is False,
        "if": "then" not in part and "else" not in part,
        "then": "if" not in part,
        "else": "if" not in part,
        "propertyNames": value in (*_ANYTHING, {"type": "string"}),
        "unevaluatedItems": value in _ANYTHING,
        "unevaluatedProperties": value in _ANYTHING,
    }.get(name, False)


def _replace_names(part: dict[str, Any], is_name: IsName) -> None:
    names, properties = part["propertyNames"], part.get("properties", {})
    required, rest = part.get("required", []), part.get("additionalProperties", {})
    if not (isinstance(names, dict) and isinstance(properties, dict)):
        return
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if rest is False and "patternProperties" not in part:
        listed = []
    elif "patternProperties" in part or not (isinstance(listed, list) or not properties):
        return
    if isinstance(listed, list):
        for name in (each for each in listed if isinstance(each, str) and is_name(each)):
            properties.setdefault(name, rest)
    elif (pattern := _pattern(names)) is not None:
        part["patternProperties"] = {pattern: rest}
    else:
        return
    for name in {*properties, *filter(lambda each: isinstance(each, str), required)}:
        if not is_name(name):
            properties[name] = False
    if properties:
        part["properties"] = properties
    part["additionalProperties"] = False
    del part["propertyNames"]


def _pattern(names: Mapping[str, Any]) -> str | None:
    known = names.keys() - {"type"}
    if known == {"pattern"}:
        return str(names["pattern"])
    if known <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None
