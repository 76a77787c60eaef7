"""Schemas and grammars that are refused, and those that are converted, without a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from ggufspec.errors import OptionError
from ggufspec.structured import gbnf as notation
from ggufspec.structured.json_schema import gbnf_of_schema


@pytest.mark.parametrize(
    ("schema", "complaint"),
    {
        "{": "not JSON",
        "[1]": "no schema",
        "3": "no schema",
        "false": "accepts nothing",
        "[" * 100_000: "too deeply",
        '{"items":' * 3000 + "{}" + "}" * 3000: "too deeply",
        '{"const": NaN}': "NaN",
        '{"type": "text"}': "'text'",
        '{"type": {"a": 1}}': "none of",
        '{"properties": {"a": 5}}': "#/properties/a",
        '{"type": "object", "required": [[1]]}': "list of names",
        '{"required": ["a"], "additionalProperties": false}': "does not allow",
        '{"$ref": "https://example.org/schema.json"}': "nothing is fetched",
        '{"$ref": "other.json#/a"}': "nothing is fetched",
        '{"$ref": "#/$defs/none"}': "points to nothing",
        '{"$ref": "#"}': "ever ends",
        '{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}': "ever ends",
        '{"anyOf": [{"$ref": "#"}, {"type": "null"}]}': "begin with itself",
        '{"not": {}}': "'not'",
        '{"type": "array", "uniqueItems": true}': "'uniqueItems'",
        '{"type": "integer", "multipleOf": 2}': "'multipleOf'",
        '{"type": "integer", "minimum": 0.5}': "whole numbers",
        '{"type": "integer", "minimum": 5, "maximum": 4}': "no number",
        '{"type": "string", "maxLength": 100000}': "at most 2000",
        '{"type": "string", "minLength": -1}': "at least 0",
        '{"type": "array", "minItems": 5, "maxItems": 2}': "more than",
        '{"type": "string", "pattern": "(?=a)"}': "cannot be used",
        '{"type": "string", "pattern": "^a|b$"}': "brackets",
        '{"type": "string", "pattern": "a(b"}': "pattern",
        '{"type": "string", "pattern": "*"}': "pattern",
        '{"type": "string", "format": "iri"}': "'iri'",
        '{"type": "string", "format": ["date"]}': "format",
        '{"allOf": [{"type": "object"}, {"required": ["a"]}]}': "cannot be combined",
        '{"anyOf": []}': "at least one",
        '{"type": "string", "enum": [1]}': "none of its values",
    }.items(),
)
def test_a_schema_that_cannot_be_kept_is_refused(schema: str, complaint: str) -> None:
    with pytest.raises(OptionError, match=re.escape(complaint)):
        gbnf_of_schema(schema)


def test_what_is_no_json_at_all_is_refused() -> None:
    loop: dict[str, object] = {}
    loop["properties"] = {"a": loop}
    schemas: list[Mapping[str, object]] = [loop, {"const": object()}, {"const": float("nan")}]
    for schema in schemas:
        with pytest.raises(OptionError):
            gbnf_of_schema(schema)


@pytest.mark.parametrize("escape", [r"\x00", r"\uD800", r"\U00110000", r"\UFFFFFFFF"])
def test_what_no_text_can_have_is_refused_in_a_grammar(escape: str) -> None:
    for gbnf in (f'root ::= "a{escape}"', f"root ::= [a{escape}]"):
        with pytest.raises(OptionError, match="a character that no text can have"):
            notation.check(gbnf, lambda name: False)


def test_whole_numbers_of_json_and_empty_patterns_are_understood() -> None:
    for schema in (
        {"type": "string", "minLength": 2.0, "maxLength": 3.0},
        {"type": "string", "pattern": ""},
        {"type": "string", "pattern": "^$"},
    ):
        notation.check(gbnf_of_schema(schema), lambda name: False)
