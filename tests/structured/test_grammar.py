"""What schemas, grammars, regular expressions and choices allow, and what is refused."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from ggufspec.common.child import LimitedProcess
from ggufspec.errors import OptionError
from ggufspec.structured import grammar
from ggufspec.structured.constraint import GrammarConstraint, TokenTable

END = 256
BYTES = TokenTable(
    [bytes([byte]) for byte in range(256)] + [b"<end>"],
    special=[END],
    stop_tokens=[END],
    tokenize=lambda before, text: list(text),
)


def allows(source: str, text: str) -> bool:
    """Whether the whole text may be written, byte by byte, and end there."""
    tokens = [*text.encode(), END]
    return GrammarConstraint(BYTES, source, 0).n_allowed([], tokens) == len(tokens)


def refusal(schema: object) -> str:
    with pytest.raises(OptionError) as caught:
        GrammarConstraint(BYTES, grammar.of_json_schema(schema), 0)
    return str(caught.value)


def is_valid(schema: object, value: object) -> bool:
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)  # type: ignore[arg-type]
    return validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(value)  # type: ignore[arg-type]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
        }
    },
}
OBJECT = {"type": "object"}
BASE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
DERIVED = {
    "$defs": {"base": BASE},
    "allOf": [
        {"$ref": "#/$defs/base"},
        {"properties": {"name": {"type": "string"}}, "required": ["name"]},
    ],
}

# Schema, values that it allows, values that it does not allow.
SCHEMAS: list[tuple[dict[str, object], list[object], list[object]]] = [
    ({}, [None, True, 1, -2.5, 'q"\\/\n\t é 中 😀', [1, "a"], {"a": {}}], []),
    ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    ({"type": "string", "pattern": r"^\w+\s\d{2}$"}, ["ab 12", "a\n34"], ["ab12", "a 1"]),
    ({"type": "integer", "exclusiveMinimum": 1.5, "maximum": 3.7}, [2, 3], [1, 4]),
    ({"const": "nul \x00, delete \x7f"}, ["nul \x00, delete \x7f"], ["nul , delete "]),
    ({"enum": ["abc", "b"], "minLength": 2}, ["abc"], ["b"]),
    ({"enum": [{"a": 1}, {"b": 2}], "properties": {"a": {}}}, [{"a": 1}, {"b": 2}], [{}]),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    (PERSON, [{"name": "a"}, {"name": "a", "age": 3}], [{}, {"age": 3}, {"name": 1}]),
    (PERSON | {"additionalProperties": True}, [{"name": "a", "b": 1}], [{"b": 1}]),
    (PERSON | {"additionalProperties": False}, [{"name": "a"}], [{"name": "a", "b": 1}]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"b": 1}]),
    (PERSON | {"required": ["age", "email"]}, [{"age": 1, "email": "a"}], [{"age": 1}]),
    (
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        [{"a": 1}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}},
        [{}, {"n_a": 1}, {"other": "x"}],
        [{"n_a": "x"}],
    ),
    (
        TREE,
        [{"value": 1, "children": [{"value": 2, "children": []}]}],
        [{"value": 1, "children": [1]}],
    ),
    (DERIVED, [{"id": 1, "name": "a"}], [{"id": 1}, {"name": "a"}]),
    (
        {"$defs": {"base": BASE}, "allOf": [{"$ref": "#/$defs/base"}], "description": "one"},
        [{"id": 1}],
        [{}],
    ),
    (
        {"$defs": {"base": BASE}, "$ref": "#/$defs/base", "required": ["x"]},
        [{"id": 1, "x": 2}],
        [{"id": 1}],
    ),
    (
        {"allOf": [{"properties": {"a": BASE}}, {"properties": {"a": {"required": ["b"]}}}]},
        [{"a": {"id": 1, "b": 2}}],
        [{"a": {"id": 1}}],
    ),
    (
        BASE | {"anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
        [{"id": 1, "x": 1}, {"id": 1, "y": 1}],
        [{"id": 1}],
    ),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
    ({"type": "object", "properties": {"a": False, "b": {}}}, [{}, {"b": 1}], [{"a": 1}]),
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "1999-12-31"],
        ["2023-02-29", "0000-01-01", "1900-02-29", "2023-04-31", "x"],
    ),
    ({"type": ["string", "null"], "format": "date"}, [None, "2024-01-01"], ["x"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}, [None], [1]),
    ({"$schema": "https://example.com/of/ours", "type": "null"}, [None], [1]),
    # Keywords that are replaced by others, or have no effect.
    ({"properties": {"a": {"not": {}}, "b": {"not": False}}, **OBJECT}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": ["integer", "object"], "uniqueItems": True}, [1, {}], [[]]),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[], [1]], [[1, 1], 1]),
    ({"type": "integer", "if": {}, "dependentRequired": {"a": ["b"]}}, [1], ["a"]),
    ({"then": False, "type": "integer"}, [1], ["a"]),
    ({"propertyNames": {"type": "string", "title": "t"}, **OBJECT}, [{}, {"a": 1}], [1]),
    (
        PERSON | {"propertyNames": {"pattern": "^[an]"}, "dependentRequired": {"age": ["name"]}},
        [{"name": "a"}, {"name": "a", "age": 3}],
        [{}, {"age": 3}],
    ),
    (PERSON | {"propertyNames": {"maxLength": 3}, "required": ["age"]}, [{"age": 1}], [{}]),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}, **OBJECT}
        | {"required": ["a"]},
        [{"a": None}, {"a": None, "b": None}],
        [{}, {"a": 1}, {"a": None, "c": None}],
    ),
    (
        {"$defs": {"n": {"const": "a"}}, "propertyNames": {"$ref": "#/$defs/n"}, **OBJECT},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    ({"propertyNames": {"pattern": "^[ab]$"}, **OBJECT}, [{}, {"b": 1, "a": 2}], [{"c": 1}]),
    ({"propertyNames": {"minLength": 2}, **OBJECT}, [{}, {"b\n": 1}], [{"c": 1}]),
    ({"title": "t", "description": "d", "default": 1, "examples": [2], "x": 3}, [1, "a"], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda case: json.dumps(case)[:60])
def test_a_schema_allows_what_it_says(
    schema: dict[str, object], good: list[object], bad: list[object]
) -> None:
    source = grammar.of_json_schema(schema)
    assert grammar.of_json_schema(json.dumps(schema)) == source
    for value in good:
        assert is_valid(schema, value)
        assert allows(source, json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f"))
    for value in bad:
        assert not is_valid(schema, value)
        assert not allows(source, json.dumps(value, ensure_ascii=False))


def test_json_has_one_form() -> None:
    source = grammar.of_json_schema({"type": "object", "required": ["a"]})
    assert allows(source, '{"a": [1, 2], "b": 3}')
    for text in ('{"a":1}', '{ "a": 1}', '{"a": 1,"b": 2}', '{"a": 1}\n', '{"b": 3, "a": 1}'):
        assert not allows(source, text)
    wide = grammar.of_json_schema({"required": ["a"], "x-guidance": {"whitespace_flexible": True}})
    assert allows(wide, '{ "a" :  1 }')


def test_an_object_has_no_property_twice_under_an_escaped_name() -> None:
    """Else the second value would count, which the schema of the first does not allow."""
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    source = grammar.of_json_schema(schema)
    assert allows(source, '{"a": 1, "b": "x"}')
    assert not allows(source, '{"a": 1, "\\u0061": "x"}')
    assert not allows(source, '{"a": 1, "a": "x"}')
    source = grammar.of_json_schema({"patternProperties": {"^é": {"type": "integer"}}})
    assert allows(source, '{"é1": 1}')
    assert not allows(source, '{"\\u00e91": "x"}')


def test_properties_of_other_objects_are_closed_where_some_are_combined() -> None:
    schema = {"type": "object", "properties": {"person": PERSON, "item": DERIVED}}
    schema |= {"$defs": DERIVED["$defs"]}
    source = grammar.of_json_schema(schema)
    assert allows(source, '{"person": {"name": "a"}, "item": {"id": 1, "name": "b"}}')
    assert allows(source, '{"item": {"id": 1, "name": "b", "more": 1}}')
    assert not allows(source, '{"person": {"name": "a", "more": 1}}')
    assert not allows(source, '{"more": 1}')


@pytest.mark.parametrize(
    ("schema", "path", "complaint"),
    [
        (
            {"type": "array", "maxItems": 2, "uniqueItems": True},
            "#",
            '"uniqueItems" cannot be guaranteed',
        ),
        ({"properties": {"a/b~c": {"not": {"const": 1}}}}, "#/properties/a~1b~0c", '"not" cannot'),
        ({"items": {"if": {}, "then": {}}}, "#/items", '"if", "then" cannot be guaranteed'),
        ({"propertyNames": {"minLength": 2, "pattern": "a"}}, "#", '"propertyNames" cannot'),
        ({"anyOf": [{}, {"contains": {"type": "null"}}]}, "#/anyOf/1", '"contains"'),
        ({"$defs": {"a": {"not": {"const": 1}}}, "$ref": "#/$defs/a"}, "#/$defs/a", "not"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "#/properties/a", "/\\$defs/b"),
        ({"prefixItems": [{}, {"pattern": "a("}]}, "#/prefixItems/1", "unclosed group"),
        ({"items": {"format": "postcode"}}, "#/items", "postcode"),
        ({"type": "object", "minProperties": 2}, "#", "minProperties"),
        ({"type": "integer", "minimum": 10**40}, "#", "minimum is beyond 2.53"),
        ({"x-guidance": {"unknown": 1}}, "#", "unknown field"),
        ({"x-guidance": 1}, "#/x-guidance", "not a JSON object"),
        ({"properties": 5}, "#", "properties|type"),
        ({"required": "a", "properties": {}}, "#", "required|type"),
    ],
    ids=str,
)
def test_what_cannot_be_guaranteed_is_refused_by_its_path(
    schema: dict[str, object], path: str, complaint: str
) -> None:
    message = refusal(schema)
    assert message.startswith(f"the JSON schema at {path}: ")
    assert re.search(complaint, message)
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ("{", "is not JSON"),
        ('{"minimum": NaN}', "JSON has no number NaN"),
        ('{"minimum": 1e400}', "not JSON"),
        ({"minimum": float("inf")}, "not JSON"),
        ("[1]", "give a JSON object"),
        ('{"const": "\\ud800"}', "hex escape|surrogate|Unicode"),
        ("{" * 5000, "is not JSON|nested too deeply"),
        ('{"items":' * 10_000 + "{}" + "}" * 10_000, "nested too deeply"),
        ({"enum": [f"{i:0100}" for i in range(10_000)]}, "bytes"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_what_is_no_schema_is_refused(schema: object, complaint: str) -> None:
    message = refusal(schema)
    assert re.search(complaint, message)
    assert "\n" not in message
    assert len(message) < 500


def test_a_schema_may_be_a_pydantic_model_or_any_mapping() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", kind=(str, pydantic.Field(pattern="^[ab]$")))
    outer = pydantic.create_model("Outer", inner=(inner, ...), many=(list[inner], []))
    source = grammar.of_json_schema(outer)
    assert allows(source, '{"inner": {"kind": "a"}, "many": [{"kind": "b"}]}')
    assert not allows(source, '{"inner": {"kind": "c"}}')
    with pytest.raises(OptionError, match="not JSON"):
        grammar.of_json_schema(int)


def test_a_true_schema_allows_any_json() -> None:
    assert allows(grammar.of_json_schema(True), '[1, {"a": null}]')
    assert allows(grammar.of_json_schema("true"), '"x"')


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("time", ["23:59:59Z", "10:00:00.5+01:00"], ["24:00:00Z", "10:00:60Z", "10:00:00"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-01-01T10:00:60Z"]),
    ],
)
def test_formats_that_jsonschema_leaves_out_are_exact(
    name: str, good: list[str], bad: list[str]
) -> None:
    source = grammar.of_json_schema({"type": "string", "format": name})
    assert all(allows(source, f'"{text}"') for text in good)
    assert not any(allows(source, f'"{text}"') for text in bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, "-7", "1.5"),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 1e300}, "6", "5"),
        ({"type": "number", "minimum": 0, "maximum": 2**63}, "0.5", "-1"),
        ({"type": "number", "minimum": -1e300}, "-10.5", '"a"'),
    ],
    ids=str,
)
def test_bounds_beyond_exact_numbers_may_be_stricter(
    schema: dict[str, object], good: str, bad: str
) -> None:
    source = grammar.of_json_schema(schema)
    assert allows(source, good)
    assert not allows(source, bad)


@pytest.mark.parametrize("name", ["minimum", "exclusiveMinimum"])
def test_bounds_that_no_exact_number_meets_are_refused(name: str) -> None:
    part = {"type": "integer", name: 10**30, "maximum": 10**31}
    with pytest.raises(OptionError, match=f"#/properties/a: {name} is beyond"):
        grammar.of_json_schema({"type": "object", "properties": {"a": part}})


def test_required_must_be_a_list_of_names() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": [["a"]]}
    for more in ({}, {"minProperties": 1}):
        with pytest.raises(OptionError, match=r"at #: (Expected|.*required)"):
            grammar.of_json_schema({**schema, **more})


# Grammar, texts that it allows, texts that it does not allow.
GBNF: list[tuple[str, list[str], list[str]]] = [
    ('root ::= [a-z]* "end"', ["end", "endend"], ["abc"]),
    ('root ::= a b\na ::= "x"*\nb ::= "x"', ["x", "xxx"], [""]),
    ('root ::= a "b"\na ::= "a" | "ab"', ["ab", "abb"], ["a"]),
    ("root ::= . [^a]", ["a\n", "\né", "😀b"], ["ba"]),
    ("root ::= [a&&b~^-]+", ["&", "ab", "~", "^-"], ["c"]),
    ('root ::= [[/.$] "^" [\\]\\\\]', ["[^]", "/^\\", ".^]"], ["a^]"]),
    ('root ::= "\\x41\\u0042\\u00e9\\U0001F600" [\\u4e00-\\u9fff]', ["ABé😀中"], ["ABé😀a"]),
    ('root ::= "\\"\\\\\\[\\]\\n\\t\\r" "/*a*/"', ['"\\[]\n\t\r/*a*/'], []),
    ('root ::= "a" # the first\n# nothing\nother ::= "b" # unused', ["a"], ["b"]),
    ('root ::= (\n  "a" |\n  "b"\n) "c"', ["ac", "bc"], ["c"]),
    ('root ::= "a"{2} "b"{1,} "c"{0,1} "d"{,2}', ["aab", "aabbcdd"], ["ab", "aabccd", "aabddd"]),
    ('root ::= (("a"?)+ "b"*)+ "c"', ["c", "abac"], ["ab"]),
    ('root ::= s\ns ::= "(" s ")" | ""', ["", "(())"], ["(", ")"]),
    ('root ::= a | A\na ::= "x"\nA ::= "y" A | "z"', ["x", "yyz"], ["y"]),
    (
        "root ::= a-b a_b aB 1st start\n"
        'a-b ::= "1"\na_b ::= "2"\naB ::= "3"\n1st ::= "4"\nstart ::= "5"',
        ["12345"],
        [],
    ),
    (
        'root ::= (sum "=" ws term "\\n")+\nsum ::= term ([-+*/] term)*\n'
        'term ::= [0-9]+ ws | "(" ws sum ")" ws\nws ::= [ \\t\\n]*',
        ["1=1\n", "1 +(2 )= 3\n4= 5 \n"],
        ["1=1", "1"],
    ),
]


@pytest.mark.parametrize(("gbnf", "good", "bad"), GBNF, ids=str)
def test_a_grammar_of_llama_cpp_allows_what_it_says(
    gbnf: str, good: list[str], bad: list[str]
) -> None:
    source = grammar.of_grammar(gbnf)
    assert [text for text in good if not allows(source, text)] == []
    assert [text for text in bad if allows(source, text)] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "needs a rule start .Lark. or root .GBNF."),
        ('first ::= "a"', "needs a rule start .Lark. or root .GBNF."),
        ("root ::= other", "the rule other, but does not define it"),
        ('root ::= "a', 'a " that is never closed; close it'),
        ("root ::= [a", "a \\[ that is never closed; close it"),
        ("root ::= []", "matches no character"),
        ("root ::= [z-a]", "ends before it starts"),
        ('root ::= "\\q"', "unknown escape, .q"),
        ('root ::= "\\ud800"', "is not a character"),
        ('root ::= "a"\n | "b"', "line 2"),
        ('root ::= <think> "a"', "write Lark, where <think>"),
        ("root ::= root", "no text can match the constraint: its parts"),
        ('start: "a', "line 1, column 10: lexer error"),
        ('start: a "b"\na[max_tokens=3]: /[a-z]+/', "max_tokens=, which is not supported"),
        ("start: /a(/", "unclosed group"),
        ('root ::= "\ud800"', "Unicode"),
        ('start: "\ud800"', "Unicode"),
    ],
)
def test_what_is_no_grammar_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint) as caught:
        GrammarConstraint(BYTES, grammar.of_grammar(text), 0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_grammar_may_be_lark() -> None:
    source = grammar.of_grammar('start: NAME ("," NAME)*\nNAME: /[a-z]+/')
    assert allows(source, "ab,c")
    assert not allows(source, "ab,")
    assert allows(grammar.of_grammar('start: %json {"type": "null"}'), "null")
    for start in ("?start", "!start", "start[capture]", "  start [lazy] "):
        assert allows(grammar.of_grammar(f'{start}: "[stop=" /b/'), "[stop=b")


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("a|b", ["a", "b"], ["ab", ""]),
        ("^yes$", ["yes"], ["yes\n"]),
        (r"a/b\/c", ["a/b/c"], []),
        ("é[中-文]", ["é中"], ["é"]),
        ("a\nb", ["a\nb"], ["ab"]),
        ("", [""], ["a"]),
    ],
)
def test_a_regular_expression_matches_the_whole_text(
    regex: str, good: list[str], bad: list[str]
) -> None:
    source = grammar.of_regex(regex)
    assert [text for text in good if not allows(source, text)] == []
    assert [text for text in bad if allows(source, text)] == []


@pytest.mark.parametrize(
    "choices",
    [
        ["a", "ab", "abc"],
        ["", "a"],
        ['"', "\\", "/", "\n", "é", "😀", "$^.*", "a\tb", "</s>", "\x01", "\x7f"],
        [f"choice {i}" for i in range(2100)],
    ],
    ids=lambda choices: repr(choices)[:30],
)
def test_each_choice_is_allowed_and_nothing_else(choices: list[str]) -> None:
    source = grammar.of_choices(choices)
    constraint = GrammarConstraint(BYTES, source, 0)
    for choice in choices:
        tokens = [*choice.encode(), END]
        assert constraint.n_allowed([], tokens) == len(tokens)
        assert constraint.n_allowed([], [*choice.encode(), ord("!"), END]) == len(tokens) - 1
        assert constraint.masks([], tokens[:-1]).any(axis=1).all()


def test_the_schemas_of_300_tools_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent sends them with each request."""

    def compiled() -> list[str]:
        return [
            grammar.of_json_schema({"type": "object", "properties": {f"tool_{i}": {}}})
            for i in range(300)
        ]

    first = compiled()

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(LimitedProcess, "ask", asked)
    assert compiled() == first
