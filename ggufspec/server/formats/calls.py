"""Parses one tool call, in each syntax that templates use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ggufspec.decoding.tree import n_equal
from ggufspec.engine.answer_syntax import (
    ID,
    INDEX,
    KEY,
    NAME,
    CallSyntax,
    ParameterSyntax,
    parts,
    words,
)
from ggufspec.server.formats.deltas import (
    MAX_NAME,
    MAX_UNCERTAIN,
    Deltas,
    Marks,
    NoCallError,
    Parsing,
    Reader,
    Write,
)
from ggufspec.server.formats.values import (
    decoded,
    escaped,
    json_of,
    json_text,
    nested_value,
    object_text,
    types_of,
    value_of,
)

_NAME = re.compile(r"[^\s<>\"'{}()\[\]=,]*")
_WORD = re.compile(r"[^\s<>\"'{}()\[\],]*")
_DIGITS = re.compile("[0-9]*")
_IDENTIFIER = re.compile(r"[^\s<>\"'{}()\[\]=,:]*")
_GEMMA_SCALAR = re.compile(r"[^{}\[\],:]*")
_LITERAL_MARKS = Marks("\"'[]{}(),")  # in Python literals
_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")
_ID_KEYS = ("id", "tool_call_id")
_CALL_KEYS = (*_NAME_KEYS, *_ID_KEYS, "type", "function", "index")

Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of each tool, by its name


class CallParser:
    """Parses one call after its opener. Raises NoCallError until the call has begun."""

    def __init__(
        self, reader: Reader, deltas: Deltas, schemas: Schemas, syntax: CallSyntax
    ) -> None:
        self._reader, self._deltas = reader, deltas
        self._syntax, self._schemas = syntax, schemas
        # Without a mark before it, any JSON could be a call, so its name must be a tool's.
        self.is_bare, self.kind = not words(syntax.opener), syntax.kind
        self.closers = _closers(syntax)
        self._parse = {
            "json": self._json_call,
            "named": self._named_call,
            "tagged": self._tagged_call,
            "python": self._python_call,
            "gemma": self._named_call,
        }[syntax.kind]

    def call(self, id: str | None) -> Parsing[None]:
        """Parse a call; `id`: the id in its opener, if any."""
        yield from self._reader.spaces()
        yield from self._parse(id)

    def pattern(self, text: str) -> Parsing[tuple[str, str]]:
        """Skip a pattern with any white space; returns the id and the index found in it."""
        reader, id, index = self._reader, "", ""
        for word in words(text):
            yield from reader.spaces()
            for part in parts(word):
                if part == INDEX:
                    index = yield from reader.matching(_DIGITS)
                elif part in (ID, NAME):
                    found = yield from reader.matching(_WORD)
                    id = found if part == ID else id
                elif not (yield from reader.accept(part)):
                    raise NoCallError
        return id, index

    def _name(self) -> Parsing[str]:
        name = yield from self._reader.matching(_NAME)
        if not 0 < len(name) <= MAX_NAME:
            raise NoCallError
        return name

    def _json_call(self, id: str | None) -> Parsing[None]:
        reader, syntax = self._reader, self._syntax
        yield from reader.accept("[")
        if not (yield from reader.next_word("{")):
            raise NoCallError
        name: str | None = None
        arguments: str | None = None  # until the call has begun
        # Qwen 2.5's template shows calls to the model in double braces.
        depth = 2 if (yield from reader.accept("{")) else 1
        has_begun, waits_for_id = False, ID in syntax.tail
        while depth:
            if (found := (yield from reader.next_word("}", ",", '"'))) == "}":
                depth -= 1
            if found in ("}", ","):
                continue
            key = decoded((yield from reader.bounded('"')) or "") if found else ""
            if not found or not (yield from reader.next_word(":")):
                if has_begun:
                    return
                raise NoCallError
            yield from reader.spaces()
            following = yield from reader.peek()
            value: list[str] = []
            if syntax.name_key is None and not has_begun:
                if following != "{":
                    raise NoCallError
                self._begin(key, id)
                has_begun = True
                yield from reader.json_value(self._deltas.write)
            elif key == "function" and following == "{":
                yield from reader.accept("{")
                depth += 1
            elif key in (syntax.arguments_key, *_ARGUMENTS_KEYS) and arguments is None:
                if following not in ("{", '"', "n"):
                    raise NoCallError
                if name is not None and following == "{" and not waits_for_id:
                    self._begin(name, id)
                    has_begun = True
                    yield from reader.json_value(self._deltas.write)
                else:
                    yield from reader.json_value(value.append)
                    self._check_length()
                arguments = object_text("".join(value))
            else:
                if self.is_bare and key not in (syntax.name_key, *_CALL_KEYS):
                    raise NoCallError
                yield from reader.json_value(value.append)
                text = "".join(value)
                self._check_length()
                if key in (syntax.name_key, *_NAME_KEYS) and text.startswith('"'):
                    name = decoded(text[1:-1])
                elif key in _ID_KEYS and not has_begun:
                    id = decoded(text.strip('"'))
        if has_begun:
            return
        if not name or (self.is_bare and arguments is None):
            raise NoCallError
        self._begin(name, id)
        self._deltas.write(arguments or "{}")

    def _check_length(self) -> None:
        if self._reader.n_kept > MAX_UNCERTAIN:  # 0 once the call has begun
            raise NoCallError

    def _begin(self, name: str, id: str | None) -> None:
        if not 0 < len(name) <= MAX_NAME or (self.is_bare and name not in self._schemas):
            raise NoCallError
        self._reader.forget()  # the text is no longer kept as possible content
        self._deltas.begin(name, id)

    def _named_call(self, id: str | None) -> Parsing[None]:
        name = yield from self._name()
        middle = self._syntax.middle
        if middle.startswith(":" + INDEX):  # Kimi's ids consist of name and number
            name, _, index = name.rpartition(":")
            id = f"functions.{name}:{index}"
            middle = middle.removeprefix(":" + INDEX)
        name = name.removesuffix(":")
        own_id, _ = yield from self.pattern(middle)
        yield from self._reader.spaces()
        if (yield from self._reader.peek()) != "{" or not name:
            raise NoCallError
        self._begin(name, own_id or id)
        if self.kind == "named":
            yield from self._reader.json_value(self._deltas.write)
        else:
            yield from self._gemma_value()

    def _tagged_call(self, id: str | None) -> Parsing[None]:
        reader, parameter = self._reader, self._syntax.parameter
        assert parameter is not None
        name = yield from self._name()
        yield from self.pattern(self._syntax.middle)
        begin, *more = words(parameter.begin)
        schema = self._schemas.get(name, {})
        has_begun = False
        while (found := (yield from reader.next_word(begin, *self.closers))) == begin:
            for word in more:
                yield from reader.next_word(word)
            key, is_string = yield from self._key(parameter)
            if key is None:
                break
            if not has_begun:
                self._begin(name, id)
                has_begun = True
            self._deltas.key(key)
            types = types_of(schema, key)
            if is_string is not None:
                types = {"string"} if is_string else types - {"string"} or {"any"}
            if not (yield from self._value(parameter, key, types)):
                return
        if found and found != begin:
            reader.at -= len(found)
        if not has_begun:
            if found in (None, begin):
                raise NoCallError
            self._begin(name, id)
        self._deltas.end_object()

    def _key(self, parameter: ParameterSyntax) -> Parsing[tuple[str | None, bool | None]]:
        """The key (None: there is none), and whether it is marked as a string (None: no marks)."""
        reader = self._reader
        string, other = parameter.string_middle, parameter.other_middle
        if string == other:
            first, *rest = words(string)
            key = yield from reader.bounded(first)
            for word in rest:
                yield from reader.next_word(word)
            is_string = None
        else:
            n, n_end = n_equal(string, other), n_equal(string[::-1], other[::-1])
            key = yield from reader.bounded(string[:n])
            kind = yield from reader.bounded(string[len(string) - n_end :])
            is_string = kind == string[n : len(string) - n_end]
        return key and key.strip(), is_string

    def _value(self, parameter: ParameterSyntax, key: str, types: set[str]) -> Parsing[bool]:
        """Write a value as JSON; False if the text ends in it."""
        reader = self._reader
        if parameter.string_middle.endswith("\n"):
            yield from reader.accept("\n")
        end = parameter.end.strip().replace(KEY, key)
        if (yield from reader.accept("<![CDATA[")):
            end = "]]>" + end
        # If the format has a line break before the end, it is not part of the value.
        marks = Marks([end, "\n" + end] if parameter.end.startswith("\n") else [end])
        if types == {"string"}:
            return (yield from self._string(marks))
        pieces: list[str] = []
        found = yield from reader.until(marks, pieces.append)
        text = "".join(pieces)
        if text.lstrip().startswith(parameter.begin.strip()):
            self._deltas.write(json_text(nested_value(text, parameter)))
        else:
            self._deltas.write(json_of(text, types))
        return found is not None

    def _string(self, marks: Marks) -> Parsing[bool]:
        """Write the text before a mark as a JSON string; False if the text ends in it."""
        write = self._deltas.write
        write('"')
        if (yield from self._reader.until(marks, lambda text: write(escaped(text)))) is None:
            return False
        write('"')
        return True

    def _python_call(self, id: str | None) -> Parsing[None]:
        reader = self._reader
        name = yield from self._name()
        if not (yield from reader.next_word("(")):
            raise NoCallError
        self._begin(name, id)
        while True:
            if (yield from reader.next_word(",")):
                continue
            if (yield from reader.accept(")")) or not (yield from reader.peek()):
                break
            key = yield from reader.matching(_IDENTIFIER)
            yield from reader.spaces()
            value: list[str] = []
            if key and not (yield from reader.accept("=")):
                value, key = [key], ""
            is_whole = yield from self._literal(value.append)
            self._deltas.key(key or str(self._deltas.n_members))
            self._deltas.write(json_text(value_of("".join(value).strip())))
            if not is_whole:
                return
        self._deltas.end_object()

    def _literal(self, write: Write) -> Parsing[bool]:
        """Write the source of a literal, up to the comma or parenthesis after it."""
        reader, depth = self._reader, 0
        while (mark := (yield from reader.until(_LITERAL_MARKS, write))) is not None:
            if not depth and mark in ",)":
                reader.at -= 1
                return True
            write(mark)
            if mark in "\"'":
                if not (yield from reader.string(write, mark)):
                    return False
            elif mark != ",":
                depth += 1 if mark in "[{(" else -1
        return False

    def _gemma_value(self) -> Parsing[None]:
        """Write a value with bare keys and marked quotes as JSON."""
        reader, quote, write = self._reader, self._syntax.quote, self._deltas.write
        quotes = Marks([quote])
        nested: list[str] = []
        is_key = False
        while True:
            found = yield from reader.next_word(quote, '"', *"{}[],:")
            if found is None:
                if not (yield from reader.peek()):
                    return
                scalar = yield from reader.matching(_IDENTIFIER if is_key else _GEMMA_SCALAR)
                if not scalar:  # an unexpected character
                    reader.at += 1
                    continue
                write(json_text(scalar) if is_key else json_of(scalar.strip(), {"any"}))
            elif found == quote:
                if not (yield from self._string(quotes)):
                    return
            elif found == '"':
                write(found)
                if not (yield from reader.string(write)):
                    return
            else:
                write({",": ", ", ":": ": "}.get(found, found))
                if found in "{[":
                    nested.append(found)
                elif found in "}]" and nested:
                    nested.pop()
                is_key = found in "{," and nested[-1:] == ["{"]
            if not nested:
                return


def _closers(syntax: CallSyntax) -> tuple[str, ...]:
    """The words that may occur between and after calls."""
    between = words(syntax.joint or "")
    opening = words(syntax.opener)
    while between and opening and between[-1] == opening[-1]:
        del between[-1], opening[-1]
    found = []
    for word in [*words(syntax.closer), *between]:
        # Split "]</end>" and "```<end>", since the model may leave out one part.
        found += re.split(r"(?<=[^>\]\[<])(?=<)|(?<=^\])(?=</)", word)
    return tuple(dict.fromkeys(word for word in found if word not in (",", ";")))
