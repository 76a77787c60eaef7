"""Turns JSON schemas, grammars, regular expressions and choices into Lark, for llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from ggufspec.errors import OptionError

Made = TypeVar("Made")

MAX_BYTES = 128 * 1024  # of a source: 1 MB of schema takes seconds to compile
LIMITS = LLParserLimits(max_grammar_size=30_000, verbose_errors=False)
MAX_SECONDS = 1.2  # terminals that each name the next take a minute
_STACK_BYTES = 64 * 1024 * 1024  # 4,000 references in a row overflow 8 MB
_stack_size = threading.Lock()  # threading.stack_size is of the whole process

# JSON in one form, so the text between two values is forced.
_JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
_NAMED_PARTS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LISTED_PARTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_PARTS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")


def of_json_schema(schema: object) -> str:
    """The grammar of the JSON that a schema allows: its text, its dict, or a pydantic model.

    An object with `properties` has no others, unless the schema says so or combines objects.
    Raises OptionError, with the path in the schema, for what cannot be guaranteed.
    """
    if isinstance(schema, type) and callable(getattr(schema, "model_json_schema", None)):
        schema = schema.model_json_schema()  # type: ignore[attr-defined]
    try:
        parsed = (
            json.loads(schema, parse_constant=_no_number) if isinstance(schema, str) else schema
        )
        text = json.dumps(dict(parsed) if isinstance(parsed, Mapping) else parsed, allow_nan=False)
        _check_size(text, "JSON schema")
        made = json.loads(text)  # a copy
        made = _prepared({} if made is True else made)
    except RecursionError as error:
        raise OptionError("the JSON schema is nested too deeply; make it flatter") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f'the JSON schema is not JSON: {error}; give a JSON object such as {{"type": "object"}}'
        ) from error
    complaint = limited(lambda: _complaint(made), "JSON schema")
    if complaint:
        at = limited(lambda: _place(made, complaint), "JSON schema")
        unknown = re.fullmatch(r"Unimplemented keys: \[(.*)\]", complaint)
        if unknown:
            complaint = f"{unknown[1]} cannot be guaranteed; leave it out"
        raise OptionError(f"the JSON schema at {at}: {complaint}")
    return f"start: %json {json.dumps(made)}"


def of_grammar(text: str) -> str:
    """The grammar of a text in llguidance's Lark syntax (rule `start`) or in GBNF (rule `root`).

    Raises OptionError for one that is not valid. Whether the vocabulary has the tokens that it
    names is left to GrammarConstraint.
    """
    _check_size(text, "grammar")
    made = text if is_lark_syntax(text) else _lark_of(text)
    complaint = limited(lambda: _complaint_of_grammar(made), "grammar")
    if complaint:
        raise OptionError(f"the grammar cannot be used: {complaint.strip()}")
    return made


def _lark_of(gbnf: str) -> str:
    try:
        return gbnf_to_lark(_with_characters(gbnf))
    except RecursionError as error:
        raise OptionError("the grammar is nested too deeply; make it flatter") from error
    except Exception as error:  # the converter raises bare Exceptions, too
        raise OptionError(
            f'the grammar is not valid GBNF: {error}. Write rules such as root ::= "yes" | "no" '
            '(GBNF), or start: "yes" | "no" (Lark)'
        ) from error


def of_regex(regex: str) -> str:
    """The grammar of the texts that a regular expression, in Rust's syntax, matches entirely.

    Raises OptionError for one that is not valid.
    """
    _check_size(regex, "regular expression")
    try:
        made = f"start: /{regex_to_lark(regex)}/"
    except UnicodeEncodeError as error:
        raise OptionError(f"the regular expression is not valid Unicode: {error.reason}") from error
    complaint = limited(lambda: _complaint_of_grammar(made), "regular expression")
    if complaint:
        reason = complaint.partition("\n   1 |")[0].splitlines()[-1]
        reason = reason.rpartition("(in regex): ")[2].removeprefix("error: ")
        raise OptionError(
            f"the regular expression cannot be used: {reason}. Its syntax is Rust's, without "
            "look-around and back-references"
        )
    return made


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    text = " | ".join(json.dumps(choice) for choice in choices)
    _check_size(text, "list of choices")
    return f"start: {text}"


def limited(work: Callable[[], Made], what: str) -> Made:
    """The result of `work`, which compiles a grammar: with a deep stack, and within a time limit.

    Raises what it raises, and OptionError after MAX_SECONDS; the thread then ends by itself later.
    """
    results: list[Made] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(MAX_SECONDS)
    if errors:
        raise errors[0]
    if not results:
        raise OptionError(f"the {what} takes longer than {MAX_SECONDS} s to compile; simplify it")
    return results[0]


def _prepared(schema: Any) -> Any:
    """The schema without `uniqueItems: false`, with closed objects and the form of the JSON."""
    if not isinstance(schema, dict):
        raise OptionError(f"the JSON schema is {json.dumps(schema)[:40]}; give a JSON object")
    parts = list(_all_parts(schema))
    combines = any(map(_combines, parts))
    for part in parts:
        if part.get("uniqueItems") is False:  # allows everything, but llguidance refuses it
            del part["uniqueItems"]
        is_open = {"additionalProperties", "patternProperties"} & part.keys()
        if "properties" in part and not is_open and not combines:
            part["additionalProperties"] = False
    form = schema.get("x-guidance", {})
    if not isinstance(form, dict):
        raise OptionError(f"the JSON schema at #/x-guidance: {form!r} is not a JSON object")
    return {**schema, "x-guidance": {**_JSON_FORM, **form}}


def _combines(schema: dict[str, Any]) -> bool:
    """Whether several parts describe one object: none of them lists all of its properties."""
    if "$ref" in schema and "properties" in schema:
        return True
    several = schema.get("allOf")
    if isinstance(several, list) and (len(several) > 1 or "properties" in schema):
        return True
    return "properties" in schema and bool({"anyOf", "oneOf"} & schema.keys())


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, with their JSON pointers from there."""
    for name in _NAMED_PARTS:
        if isinstance(schema.get(name), dict):
            for key, part in schema[name].items():
                yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", part
    for name in _LISTED_PARTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{i}", part) for i, part in enumerate(schema[name]))
    yield from ((name, schema[name]) for name in _PARTS if name in schema)


def _all_parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for _, part in _parts(schema):
            yield from _all_parts(part)


def _place(root: dict[str, Any], complaint: str) -> str:
    """The JSON pointer of the smallest part of a schema that has this complaint."""
    at, schema, found = "#", root, True
    context: dict[str, Any] = {
        name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root
    }
    while found:
        found = False
        for name, part in _parts(schema):
            if isinstance(part, dict) and _complaint({**context, **part}) == complaint:
                at, schema, found = f"{at}/{name}", part, True
                break
    return at


def _complaint(schema: dict[str, Any]) -> str:
    """Why llguidance cannot use a schema; empty if it can."""
    return _complaint_of_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def _complaint_of_grammar(grammar: str) -> str:
    return LLMatcher.validate_grammar(grammar, None, limits=LIMITS)


def _with_characters(gbnf: str) -> str:
    """The grammar with characters for the escapes of those beyond ASCII.

    The converter writes \\u00e9 as \\ue9, which Lark does not know.
    """

    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3] or "0"
        code = int(digits, 16)
        is_character = 0xA0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
        return chr(code) if is_character else match[0]

    hexadecimal = r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})"
    return re.sub(rf"\\(?:{hexadecimal}|.)", character, gbnf, flags=re.DOTALL)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _check_size(text: str, what: str) -> None:
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes > MAX_BYTES:
        raise OptionError(
            f"the {what} has {n_bytes:,} bytes; it may have {MAX_BYTES:,}. Make it smaller"
        )
