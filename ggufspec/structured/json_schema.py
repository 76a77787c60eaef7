"""Converts a JSON schema to a grammar (GBNF) for JSON that the schema accepts.

A grammar may be narrower than its schema, but not wider, except that a text may match several
schemas of a `oneOf`. Properties come in the schema's order; properties that the schema does not
name are added only if it allows them explicitly. A schema that a grammar cannot guarantee is
refused, and nothing is downloaded. See README.md on why llama-cpp-python's converter is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from ggufspec.errors import OptionError
from ggufspec.structured import gbnf as notation

Schema = Mapping[str, object]

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "$schema", "$id", "$comment", "$defs", "definitions", "discriminator"),
    }
)
_KEYWORDS = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum"}),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_N_DIGITS = 16  # of an integer; a double is not exact beyond

_ESCAPED = r'"\\" (["\\/bfnrt] | "u" ([0-9a-cefA-CEF] hex | [dD] [0-7]) hex hex)'
_BUILT_IN = {
    # Bounded, because a model may otherwise write spaces for ever.
    "ws": r'(" " | "\n" [ \t]{0,20})?',
    "hex": "[0-9a-fA-F]",
    # All characters but ", \\, control characters and surrogates. Written as ranges, because
    # llama.cpp lets some [^x] match bytes that are not UTF-8.
    "plain": r"[ !#-\[\]-~\x80-\uD7FF\uE000-\U0010FFFF]",
    "char": f"plain | {_ESCAPED}",  # without surrogate pairs: one character each
    "string": r'"\"" char* "\""',
    "whole": f'"0" | [1-9] [0-9]{{0,{_N_DIGITS - 1}}}',
    "fraction": f'"." [0-9]{{1,{_N_DIGITS}}}',
    "integer": '"-"? whole',
    "number": '"-"? whole fraction? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "member": 'string ":" ws value',
    "object": '"{" ws (member ("," ws member)* ws)? "}"',
    "array": '"[" ws (value ("," ws value)* ws)? "]"',
    "digits2": "[0-9] [0-9]",
    "date": '[0-9]{4} "-" (month31 "-" (day28 | "29" | "30" | "31") '
    '| month30 "-" (day28 | "29" | "30") | "02-" day28)',
    "day28": '"0" [1-9] | "1" [0-9] | "2" [0-8]',
    "month30": '"0" [469] | "11"',
    "month31": '"0" [13578] | "10" | "12"',
    "clock": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]',
    "time": 'clock ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [+-] clock)',
    "byte": '"25" [0-5] | "2" [0-4] [0-9] | "1" [0-9] [0-9] | [1-9]? [0-9]',
    "label": "[a-zA-Z0-9] ([a-zA-Z0-9-]{0,30} [a-zA-Z0-9])?",
}
_FORMATS = {
    "date": "date",
    "time": "time",
    "date-time": 'date "T" time',
    "uuid": ' "-" '.join(f"hex{{{n}}}" for n in (8, 4, 4, 4, 12)),
    "ipv4": 'byte "." byte "." byte "." byte',
    "email": '[a-zA-Z0-9_+-]{1,30} ("." [a-zA-Z0-9_+-]{1,20})? "@" label ("." label){1,3}',
    "uri": '("http" "s"? | "ftp") "://" label ("." label)* (":" [0-9]{1,4})? '
    '("/" [a-zA-Z0-9._~-]{0,60}){0,9}',
}


def gbnf_of_schema(schema: str | Mapping[str, object]) -> str:
    """The grammar, with the rule `root`, of the JSON that a schema (or its text) accepts.

    Raises OptionError for what is not a JSON schema, and for what a grammar cannot guarantee.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(dict(schema))
        parsed = json.loads(text, parse_constant=_no_constant)
        grammar = _Converter(parsed).convert()
    except RecursionError as error:
        raise OptionError("the JSON schema is nested too deeply; make it flatter") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f'the JSON schema is not JSON: {error}; give a JSON object such as {{"type": "object"}}'
        ) from error
    notation.check(grammar, lambda token: False)
    return grammar


class _Converter:
    """Collects rules; methods return the body or the name of a rule for a part of the schema."""

    def __init__(self, schema: object) -> None:
        self._schema = schema
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}  # by body: equal bodies become one rule
        self._refs: dict[str, str] = {}

    def convert(self) -> str:
        root = self._refs["#"] = notation.ROOT
        self._rules[root] = self._value(self._schema, "#")
        return "\n".join(f"{name} ::= {body}" for name, body in self._rules.items()) + "\n"

    def _rule(self, body: str) -> str:
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = f"r{len(self._names)}"
            self._rules[name] = body
        return name

    def _built_in(self, body: str) -> str:
        """`body`, after adding the built-in rules that it names."""
        bare = re.sub(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\{[^}]*\}', " ", body)
        for name in re.findall(r"[a-z]+[0-9]*", bare):
            if name in _BUILT_IN and name not in self._rules:
                self._rules[name] = ""
                self._rules[name] = self._built_in(_BUILT_IN[name])
        return body

    def _value(self, schema: object, at: str) -> str:
        """The body of the rule for the schema at the JSON pointer `at`."""
        if schema is True:
            return self._built_in("value")
        if not isinstance(schema, dict):
            raise _wrong(at, f"{json.dumps(schema)[:40]} accepts nothing, or is no schema")
        keywords = set(schema) - _ANNOTATIONS
        if not keywords:
            return self._built_in("value")
        for combining in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum"):
            if combining in keywords:
                others = keywords - {combining}
                if others - ({"type"} if combining in ("const", "enum") else set()):
                    raise _wrong(at, f"{combining!r} beside {_listed(others)} cannot be combined")
                return self._combined(combining, schema, at)
        return self._typed(schema, keywords, at)

    def _combined(self, keyword: str, schema: Schema, at: str) -> str:
        found = schema[keyword]
        if keyword == "$ref":
            return self._ref(found, at)
        if keyword == "const":
            return self._one_of([found], schema.get("type"), at)
        if not isinstance(found, list) or not found:
            raise _wrong(at, f"{keyword!r} needs a list of at least one")
        if keyword == "enum":
            return self._one_of(found, schema.get("type"), at)
        if keyword == "allOf" and len(found) > 1:
            raise _wrong(at, "'allOf' of several cannot be combined; write one schema")
        parts = (self._value(part, f"{at}/{keyword}/{i}") for i, part in enumerate(found))
        return " | ".join(dict.fromkeys(map(self._rule, parts)))

    def _one_of(self, values: Sequence[object], types: object, at: str) -> str:
        wanted = _types(types, at) if types is not None else list(_KEYWORDS)
        fitting = [value for value in values if any(_is_a(value, name) for name in wanted)]
        if not fitting:
            raise _wrong(at, f"none of its values is of the type {_listed(wanted)}")
        return " | ".join(dict.fromkeys(_literal(_dumped(value)) for value in fitting))

    def _ref(self, ref: object, at: str) -> str:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise _wrong(
                at,
                f"$ref {ref!r} points outside the schema, and nothing is fetched; copy what it "
                "names to $defs, and use #/$defs/...",
            )
        if ref not in self._refs:
            target = self._schema
            for step in ref.split("/")[1:]:
                step = unquote(step).replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                    target = target[int(step)]
                elif isinstance(target, dict) and step in target:
                    target = target[step]
                else:
                    raise _wrong(at, f"$ref {ref!r} points to nothing: there is no {step!r}")
            name = self._refs[ref] = f"ref{len(self._refs)}"
            self._rules[name] = ""
            self._rules[name] = self._value(target, ref)
        return self._refs[ref]

    def _typed(self, schema: Schema, keywords: set[str], at: str) -> str:
        keywords = keywords - {"type"}
        if "type" in schema:
            types = _types(schema["type"], at)
        else:  # the types that the keywords are about; the schema accepts others, too
            types = [name for name, own in _KEYWORDS.items() if own & keywords]
            if "integer" in types and "number" in types:
                types.remove("integer")
        unknown = keywords - frozenset().union(*(_KEYWORDS[name] for name in types))
        if unknown:
            raise _wrong(at, f"{_listed(unknown)} cannot be expressed in a grammar; leave it out")
        parts = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
        }
        bodies = [
            parts[name](schema, at) if name in parts else self._built_in(name) for name in types
        ]
        return bodies[0] if len(bodies) == 1 else " | ".join(map(self._rule, bodies))

    def _object(self, schema: Schema, at: str) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", not (properties or required))
        named = isinstance(required, list) and all(isinstance(name, str) for name in required)
        if not isinstance(properties, dict) or not isinstance(required, list) or not named:
            raise _wrong(at, "'properties' needs an object, 'required' a list of names")
        missing = [name for name in required if name not in properties]
        if missing and schema.get("additionalProperties") is False:
            raise _wrong(at, f"requires {_listed(missing)}, which it does not allow")
        value_of = dict(properties) | {
            name: schema.get("additionalProperties", True) for name in missing
        }
        if not value_of and others is True:
            return self._built_in("object")
        self._built_in("ws")
        first, rest = "", ""
        if others is not False:
            value = self._rule(self._value(others, f"{at}/additionalProperties"))
            member = self._rule(f'"\\"" {self._other_name(value_of)} "\\"" ":" ws {value}')
            more = self._rule(f'"," ws {member}')
            first, rest = f"({member} {more}*)?", f"{more}*"
        # From the last to the first: the rest after a member (`rest`), and without one (`first`).
        for name, value_schema in reversed(value_of.items()):
            value = self._rule(self._value(value_schema, f"{at}/properties/{name}"))
            member = self._rule(f'{_literal(_dumped(name))} ":" ws {value}')
            after = f"{self._rule(rest)}" if rest else ""
            if name in required:
                first, rest = f"{member} {after}", f'"," ws {member} {after}'
            else:
                instead = f" | {self._rule(first)}" if first else ' | ""'
                first = f"{member} {after}{instead}"
                rest = f'("," ws {member})? {after}'
        return f'"{{" ws ({first}) ws "}}"' if first else '"{" ws "}"'

    def _other_name(self, names: Iterable[str]) -> str:
        """A rule for the content of a string without escapes that is none of `names`."""
        self._built_in("plain")
        names = list(names)
        starts = sorted({name[0] for name in names if name and _is_plain(name)})
        branches = [f"{_class_of(_minus(_PLAIN, [(ord(c), ord(c)) for c in starts]))} plain*"]
        for start in starts:
            ends = [name[1:] for name in names if _is_plain(name) and name[:1] == start]
            branches.append(f"{_literal(start)} {self._other_name(ends)}")
        return self._rule(" | ".join(branches + ([] if "" in names else ['""'])))

    def _array(self, schema: Schema, at: str) -> str:
        least, most = self._bounds(schema, "minItems", "maxItems", at)
        prefix, items = schema.get("prefixItems", []), schema.get("items")
        if isinstance(items, list):  # in drafts before 2020-12
            prefix, items = items, None
        if not isinstance(prefix, list):
            raise _wrong(at, "'prefixItems' needs a list of schemas")
        if items is None:
            items = not prefix
        self._built_in("ws")
        parts = [
            self._rule(self._value(part, f"{at}/prefixItems/{i}")) for i, part in enumerate(prefix)
        ]
        least -= len(parts)
        if most is not None:
            most -= len(parts)
        if (most is not None and most < 0) or (items is False and least > 0):
            raise _wrong(at, f"minItems or maxItems does not allow {len(parts)} prefixItems")
        written = ' "," ws '.join(parts)
        if items is not False and most != 0:
            item = self._rule(self._value(items, f"{at}/items"))
            more = self._rule(f'"," ws {item}')
            if parts:
                written += f" {more}{_times(max(least, 0), most)}"
            else:
                written = f"{item} {more}{_times(max(least - 1, 0), most and most - 1)}"
                written = written if least > 0 else f"({written})?"
        return f'"[" ws {written} ws "]"'

    def _string(self, schema: Schema, at: str) -> str:
        own = _KEYWORDS["string"] & set(schema)
        if len(own) > 1 and own != {"minLength", "maxLength"}:
            raise _wrong(at, f"{_listed(own)} cannot be combined; keep one")
        if "pattern" in own:
            body = self._pattern(schema["pattern"], at)
        elif "format" in own:
            if schema["format"] not in list(_FORMATS):
                raise _wrong(at, f"format {schema['format']!r} is none of {_listed(_FORMATS)}")
            body = _FORMATS[str(schema["format"])]
        elif own:
            body = f"char{_times(*self._bounds(schema, 'minLength', 'maxLength', at))}"
        else:
            return self._built_in("string")
        return f'"\\"" {self._built_in(body)} "\\""'

    def _pattern(self, pattern: object, at: str) -> str:
        """A regular expression as GBNF, which has nearly the same syntax."""
        if not isinstance(pattern, str):
            raise _wrong(at, "'pattern' needs a text")
        begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern)
        inside = pattern[1 if begins else 0 : -1 if ends else len(pattern)]
        if (begins or ends) and "|" in re.sub(r"\\.|\[[^\]]*\]|\(.*\)", "", inside):
            raise _wrong(at, f"pattern {pattern!r}: put the part between ^ and $ in brackets")
        parts, place = [], 0
        while place < len(inside):
            found = _PATTERN_PART.match(inside, place)
            if not found:
                raise _wrong(at, f"pattern {pattern!r}: {inside[place:][:10]!r} cannot be used")
            part = _gbnf_of_part(found)
            if part == "[]":
                raise _wrong(at, f"pattern {pattern!r}: {found.group()} leaves no character")
            parts.append(part)
            place = found.end()
        try:
            shape = " ".join(parts) or '""'
            notation.check(f"root ::= {shape}\nplain ::= [a]", lambda token: False)
        except OptionError as error:
            raise _wrong(at, f"pattern {pattern!r} cannot be used: {error}") from error
        body = f"({' '.join(parts)})" if parts else ""
        return f"{'' if begins else 'plain*'} {body} {'' if ends else 'plain*'}".strip() or '""'

    def _integer(self, schema: Schema, at: str) -> str:
        least, most = _limit(schema, "minimum", at), _limit(schema, "maximum", at)
        above, below = (
            _limit(schema, "exclusiveMinimum", at),
            _limit(schema, "exclusiveMaximum", at),
        )
        if above is not None:
            least = above + 1 if least is None else max(least, above + 1)
        if below is not None:
            most = below - 1 if most is None else min(most, below - 1)
        if least is None and most is None:
            return self._built_in("integer")
        return self._rule(_between(*_ordered(least, most, at)))

    def _number(self, schema: Schema, at: str) -> str:
        least, most = _limit(schema, "minimum", at), _limit(schema, "maximum", at)
        if least is None and most is None:
            return self._built_in("number")
        low, high = _ordered(least, most, at)
        parts = []
        self._built_in("fraction")
        if low < 0:
            far, near = -low, max(0, -high)
            if far > near:
                parts.append(f'"-" ({_digits_between(near, far - 1)}) fraction?')
            parts.append(f'"-" "{far}"')
        if high >= 0:
            near, far = max(0, low), high
            if far > near:
                parts.append(f"({_digits_between(near, far - 1)}) fraction?")
            parts.append(f'"{far}"')
        return self._rule(" | ".join(parts))

    def _bounds(self, schema: Schema, low: str, high: str, at: str) -> tuple[int, int | None]:
        least, most = schema.get(low, 0), schema.get(high)
        for name, value in ((low, least), (high, most)):
            if value is not None and not (_is_a(value, "integer") and int(value) >= 0):  # type: ignore[call-overload]
                raise _wrong(at, f"{name!r} needs a number of at least 0, not {value!r}")
            if value is not None and int(value) > notation.N_REPEATED:  # type: ignore[call-overload]
                raise _wrong(at, f"{name!r} is {value}, at most {notation.N_REPEATED} can be used")
        least = int(least)  # type: ignore[call-overload]
        most = None if most is None else int(most)  # type: ignore[call-overload]
        if most is not None and most < least:
            raise _wrong(at, f"{low!r} is {least}, more than {high!r}, {most}")
        return least, most


# Patterns: the parts of a regular expression; only characters that JSON writes without escapes

_QUOTED = r"[.*+?^$|(){}\[\]/-]"
_PATTERN_PART = re.compile(
    rf"(?P<class>\[\^?(?:[^\]\\\"\x00-\x1F\x7F\[]|\\{_QUOTED}|\\[dw])+\])"
    rf"|(?P<known>\\[dw]|\.)|\\(?P<quoted>{_QUOTED})"
    r"|(?P<open>\((?:\?:)?)(?!\?)|(?P<as_is>[)|]|[*+?](?![*+?{])|\{[0-9]+(?:,[0-9]*)?\}(?![*+?{]))"
    r'|(?P<char>[^\\"\x00-\x1F\x7F^$*+?{}\[\]().|])'
)
_Range = tuple[int, int]  # of code points, both ends included
_PLAIN = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF)]
_DIGITS = (0x30, 0x39)
_KNOWN_RANGES = {r"\d": [_DIGITS], r"\w": [_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]}
_KNOWN = {r"\d": "[0-9]", r"\w": "[a-zA-Z0-9_]", ".": "plain"}


def _gbnf_of_part(found: re.Match[str]) -> str:
    if found["class"]:
        inside = found["class"][1:-1]
        without = _minus(_PLAIN, _ranges_of(inside.removeprefix("^")))
        return _class_of(without if inside.startswith("^") else _minus(_PLAIN, without))
    if found["known"]:
        return _KNOWN[found["known"]]
    if found["open"]:
        return "("
    return found["as_is"] or _literal(found["quoted"] or found["char"])


def _ranges_of(inside: str) -> list[_Range]:
    """The characters of a regular expression's class."""
    ranges: list[_Range] = []
    chars = re.findall(r"\\?.", inside)
    i = 0
    while i < len(chars):
        if chars[i] in _KNOWN_RANGES:
            ranges += _KNOWN_RANGES[chars[i]]
            i += 1
            continue
        step = 3 if i + 2 < len(chars) and chars[i + 1] == "-" else 1
        ranges.append((ord(chars[i][-1]), ord(chars[i + step - 1][-1])))
        i += step
    return ranges


def _minus(ranges: Iterable[_Range], taken: Iterable[_Range]) -> list[_Range]:
    left = list(ranges)
    for low, high in taken:
        parts = [((a, min(b, low - 1)), (max(a, high + 1), b)) for a, b in left]
        left = [part for pair in parts for part in pair if part[0] <= part[1]]
    return left


def _class_of(ranges: Iterable[_Range]) -> str:
    def char(code: int) -> str:
        return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08X}"

    return f"[{''.join(char(a) if a == b else f'{char(a)}-{char(b)}' for a, b in ranges)}]"


# Integers between two others, digit by digit


def _between(low: int, high: int) -> str:
    parts = []
    if low < 0:
        parts.append(f'"-" ({_digits_between(max(1, -high), -low)})')
    if high >= 0:
        parts.append(_digits_between(max(0, low), high))
    return " | ".join(parts)


def _digits_between(low: int, high: int) -> str:
    parts = []
    for n_digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (n_digits - 1) if n_digits > 1 else 0)
        parts.append(_same_length(str(first), str(min(high, 10**n_digits - 1))))
    return " | ".join(parts)


def _same_length(low: str, high: str) -> str:
    n_digits = len(low)
    if not n_digits:
        return '""'
    if low == "0" * n_digits and high == "9" * n_digits:
        return f"[0-9]{{{n_digits}}}"
    if low[0] == high[0]:
        return f'"{low[0]}" ({_same_length(low[1:], high[1:])})'
    lowest, highest = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(f'"{lowest}" ({_same_length(low[1:], "9" * (n_digits - 1))})')
        lowest += 1
    if high[1:].strip("9"):
        parts.append(f'"{highest}" ({_same_length("0" * (n_digits - 1), high[1:])})')
        highest -= 1
    if lowest <= highest:
        parts.append(f"[{lowest}-{highest}] [0-9]{{{n_digits - 1}}}")
    return " | ".join(parts)


def _ordered(least: int | None, most: int | None, at: str) -> tuple[int, int]:
    widest = 10**_N_DIGITS - 1
    low = -widest if least is None else least
    high = widest if most is None else most
    if low > high or max(-low, high) > widest:
        raise _wrong(at, f"no number of up to {_N_DIGITS} digits lies between {low} and {high}")
    return low, high


def _limit(schema: Schema, keyword: str, at: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if not _is_a(value, "integer"):
        raise _wrong(at, f"{keyword!r} is {value!r}; only whole numbers can be used")
    return int(value)  # type: ignore[call-overload,no-any-return]


# Small parts


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _types(types: object, at: str) -> list[str]:
    names = types if isinstance(types, list) else [types]
    for name in names:
        if not isinstance(name, str) or name not in _KEYWORDS:
            raise _wrong(at, f"the type {name!r} is none of {_listed(_KEYWORDS)}")
    if not names:
        raise _wrong(at, "'type' is an empty list; name at least one")
    return list(dict.fromkeys(names))


def _is_a(value: object, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, float) and value.is_integer():
        return name in ("integer", "number")
    kinds = {str: {"string"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}}
    return name in kinds.get(type(value), {"object"})


def _dumped(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # A lone surrogate can only be written with an escape.
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


def _literal(text: str) -> str:
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def _is_plain(text: str) -> bool:
    return not re.search(r'["\\\x00-\x1F\x7F\ud800-\udfff]', text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _wrong(at: str, what: str) -> OptionError:
    return OptionError(f"the JSON schema at {at}: {what}")
