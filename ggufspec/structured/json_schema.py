"""Turns JSON schemas into Lark, for llguidance."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

from ggufspec.errors import OptionError
from ggufspec.structured.grammar import TOO_DEEP, schema_errors
from ggufspec.structured.limits import (
    END,
    JSON_START,
    LIMITS,
    byte_tokenizer,
    limited_matcher,
    summary,
)
from ggufspec.structured.simplified import IsName, simplify

_MAX_SEARCH_SECONDS = 0.3  # to find the part of a schema that a complaint is about

# One form of white space, so that the text between two values is forced.
_JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
# Without \\u: else "\\u0061" would be allowed as an additional property beside the same name "a".
_ESCAPES = 'nrbtf\\"'
# Characters that need \\u: without it, llguidance drops them from a schema.
_NEEDS_U = re.compile(r"\\u00[01]|\\u007f|\\x|\\c|\x7f")
_DRAFTS = re.compile(r"http://json-schema\.org/draft-0[467]/.*|https://json-schema\.org/draft/20.*")
# Added to llguidance's formats, which allow 29 February in every year, year 0, and any leap second.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"^(?:[0-9]{{4}}-(?:0[13-9]|1|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_EXACT_FORMATS = {
    "date": (_DATE, "^0{0,3}[1-9]"),
    "date-time": (_DATE, "^0{0,3}[1-9]", "^.{17}[0-5]"),
    "time": ("^.{6}[0-5]",),
}

_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*)\]")
_ANNOTATIONS = ("title", "description", "default", "examples", "$comment")  # without effect
_MAX_BOUND = 2**53 - 1
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}

_CONTEXT = ("$defs", "definitions", "x-guidance")  # of the root, for each part
_NAMED_PARTS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LISTED_PARTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_PARTS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_OF_OBJECTS = {
    *("additionalProperties", "maxProperties", "minProperties"),
    *("patternProperties", "properties", "required"),
}


def lark_of_schema(text: str, dropped: list[str] | None = None) -> str:
    """The JSON that a schema allows, as a grammar in Lark. Raises OptionError.

    `dropped`: gets the place and name of each keyword that cannot be guaranteed and is left out,
    so that more JSON is allowed; None: such keywords raise OptionError.
    """
    with schema_errors():
        made = json.loads(text, parse_constant=_no_number, parse_float=_number)
        text = json.dumps(made, allow_nan=False, ensure_ascii=False)
        made = _prepared({} if made is True else made, text, dropped)
    while complaint := _complaint(made):
        if "recursion limit" in complaint:
            raise OptionError(TOO_DEEP)
        if dropped is None or not _drop(made, complaint, dropped):
            at, _ = _place(made, complaint)
            if unknown := _UNKNOWN.fullmatch(complaint):
                complaint = f"{unknown[1]} cannot be guaranteed; leave it out"
            raise OptionError(f"the JSON schema at {at}: {summary(complaint)}")
    return f"{JSON_START}{json.dumps(made, separators=(',', ':'))}"


def _prepared(schema: Any, text: str, dropped: list[str] | None) -> Any:
    """The schema for llguidance: objects closed, annotations removed, form of the JSON added."""

    def refuse(at: str, name: str, why: str) -> None:
        if dropped is None:
            raise OptionError(f"the JSON schema at {at}: {name} {why}")
        del parts[at][name]
        dropped.append(f"{at}: {name}")

    if not isinstance(schema, dict):
        raise OptionError(f"the JSON schema is {json.dumps(schema)[:40]}; give a JSON object")
    parts = dict(_all_parts(schema))
    combined = _combined(schema, list(parts.values()))
    for at, part in reversed(parts.items()):  # a part after those in it
        for name in _ANNOTATIONS:
            part.pop(name, None)
        if not _DRAFTS.fullmatch(str(part.get("$schema", ""))):
            part.pop("$schema", None)  # llguidance would have to download it
        properties, required = part.get("properties"), part.get("required")
        names = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
        is_open = not {"additionalProperties", "patternProperties"}.isdisjoint(part)
        if isinstance(properties, dict) and not is_open and id(part) not in combined:
            part["additionalProperties"] = False
            for name in names:
                properties.setdefault(name, {})
        simplify(part, _name_check(schema, part))
        # In calls with tags, the text may repeat an additional property, which counts only once.
        n_least, is_closed = part.get("minProperties", 0), part.get("additionalProperties") is False
        if isinstance(n_least, int) and n_least > len(set(names)) + 1 and not is_closed:
            refuse(
                at,
                "minProperties",
                "above the number of required properties + 1 cannot be guaranteed; name them in "
                "required",
            )
        for name, sign in _BOUNDS.items():
            bound = part.get(name)
            if isinstance(bound, (int, float)) and abs(bound) > _MAX_BOUND:
                part[name] = sign * _MAX_BOUND  # llguidance would round it, or refuse it
                if sign * bound < 0:
                    refuse(at, name, "is beyond 2^53; leave it out")
        exact = _EXACT_FORMATS.get(str(part.get("format")), ())
        if exact and isinstance(part.get("allOf", []), list):
            part["allOf"] = [*part.get("allOf", []), *({"pattern": regex} for regex in exact)]
    form = schema.get("x-guidance", {})
    if not isinstance(form, dict):
        raise OptionError(f"the JSON schema at #/x-guidance: {form!r} is not a JSON object")
    escapes = {} if _NEEDS_U.search(text) else {"json_allowed_escapes": _ESCAPES}
    return {**schema, "x-guidance": {**_JSON_FORM, **escapes, **form}}


def _combined(root: dict[str, Any], parts: list[dict[str, Any]]) -> set[int]:
    """The ids of parts that describe an object only together with others, and of parts in them.

    They must stay open: none of them alone lists all properties.
    """
    found: set[int] = set()
    waiting = []
    for part in parts:
        several = part.get("allOf")
        n = len(several) if isinstance(several, list) else 0
        n += sum(name in part for name in ("$ref", "anyOf", "oneOf"))
        n += any(name in part for name in ("const", "enum"))
        n += any(name in part for name in _OF_OBJECTS)
        if n > 1:
            waiting.append(part)
    while waiting:
        part = waiting.pop()
        if id(part) in found:
            continue
        found.add(id(part))
        waiting += [
            inner
            for name, inner in _parts(part)
            if isinstance(inner, dict) and not name.startswith(("$defs/", "definitions/"))
        ]
        if "$ref" in part:
            target = _target(root, part["$ref"])
            waiting += parts if target is None else [target]
    return found


def _name_check(root: dict[str, Any], part: dict[str, Any]) -> IsName | None:
    """Tells which names the propertyNames of a part allow; None: there are none, or wrong ones.

    A reference in their place is resolved.
    """
    names = part.get("propertyNames")
    if isinstance(names, dict) and names.keys() == {"$ref"}:
        names = part["propertyNames"] = _target(root, names["$ref"]) or names
    if not isinstance(names, dict):
        return None
    matcher = limited_matcher(byte_tokenizer(), f"{JSON_START}{json.dumps(names)}")
    if matcher.is_error():
        return None

    def is_name(name: str) -> bool:
        tokens = [*json.dumps(name, ensure_ascii=False).encode(), END]
        return bool(matcher.validate_tokens(tokens) == len(tokens))

    return is_name


def _target(root: Any, ref: object) -> dict[str, Any] | None:
    at, hash_sign, pointer = str(ref).partition("#")
    if at or not hash_sign or (pointer and not pointer.startswith("/")):
        return None
    found = root
    for name in unquote(pointer).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(JSON pointer relative to `schema`, part) for each schema directly in it."""
    for name in _NAMED_PARTS:
        if isinstance(schema.get(name), dict):
            for key, part in schema[name].items():
                yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", part
    for name in _LISTED_PARTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{i}", part) for i, part in enumerate(schema[name]))
    yield from ((name, schema[name]) for name in _PARTS if name in schema)


def _all_parts(schema: Any, at: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield at, schema
        for name, part in _parts(schema):
            yield from _all_parts(part, f"{at}/{name}")


def _drop(root: dict[str, Any], complaint: str, dropped: list[str]) -> bool:
    """Remove what llguidance complains about. Returns False if that is the form of the JSON."""
    if unknown := _UNKNOWN.fullmatch(complaint):
        found = [
            (part, f"{at}: {name}", name)
            for at, part in _all_parts(root)
            for name in json.loads(f"[{unknown[1]}]")
            if name in part
        ]
    else:
        at, part = _place(root, complaint)
        names = [name for name in part if name not in _CONTEXT]
        one = [
            name
            for name in names
            if not _complaint({**_context(root), **{key: part[key] for key in part if key != name}})
        ]
        found = [(part, f"{at}: {name}", name) for name in one[:1] or names]
    for part, shown, name in found:
        del part[name]
        dropped.append(shown)
    return bool(found)


def _context(root: dict[str, Any]) -> dict[str, Any]:
    return {name: root[name] for name in _CONTEXT if name in root}


def _place(root: dict[str, Any], complaint: str) -> tuple[str, dict[str, Any]]:
    """The smallest part of a schema that has this complaint of llguidance, and its JSON pointer."""
    at, schema, context = "#", root, _context(root)
    ends = time.monotonic() + _MAX_SEARCH_SECONDS
    while True:
        for name, part in _parts(schema):
            if time.monotonic() > ends:
                return at, schema
            if isinstance(part, dict) and _complaint({**context, **part}) == complaint:
                at, schema = f"{at}/{name}", part
                break
        else:
            return at, schema


def _complaint(schema: dict[str, Any]) -> str:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher.validate_grammar(grammar, limits=LIMITS)


def _number(text: str) -> int | float:
    """A number of a schema, as an int if it is whole: llguidance refuses 2.0 as a length."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _no_number(name: str) -> None:
    raise ValueError(f"JSON has no number {name}")
