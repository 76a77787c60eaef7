"""Makes the grammar of answers that must call tools, or whose calls must match schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ggufspec.engine.answer_syntax import ID, INDEX, KEY, NAME, CallSyntax, Syntax, parts, words
from ggufspec.engine.reasoning import ReasoningMarks
from ggufspec.errors import OptionError
from ggufspec.server.formats.values import escaped, json_text, types_of
from ggufspec.structured.grammar import of_json_schema, of_schema_of_tool
from ggufspec.structured.keys import JsonStart
from ggufspec.structured.limits import JSON_START

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_AT = "the JSON schema at "  # before the path of what cannot be used
_MAX_DEPTH = 16  # of schemas whose values are not written as JSON
_PLACES = {ID: "CALL_ID", INDEX: "NUMBER"}
_TERMINALS = (
    "CALL_ID: /[a-zA-Z0-9]{9}/\nNUMBER: /[0-9]{1,3}/\nTEXT: /(?s:.+)/\nSPACE: /[ \\n]{1,2}/\n"
)


class GrammarMaker:
    """Collects the rules of one grammar, in llguidance's Lark syntax."""

    def __init__(self, syntax: Syntax, specials: Mapping[str, int], ends: Collection[int]) -> None:
        """`specials`: control tokens in marks, by name; `ends`: tokens that end a text."""
        self._syntax, self._specials = syntax, specials
        self._ends = [name for name, token in specials.items() if token in ends]
        names = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._names: dict[str, str] = {}  # names of rules and terminals, by their bodies
        self.not_enforced: list[str] = []  # parts of schemas, with their tools and places

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        reasoning: ReasoningMarks | None,
        *,
        is_required: bool = False,
        is_parallel: bool = False,
        strict: Collection[str] = (),
        is_loose: bool = False,
        answer: str | None = None,
    ) -> str:
        """The grammar of an answer that calls `tools` or, unless `is_required`, is content.

        `strict`: names of tools whose calls have to match their whole schema: raises OptionError
        if that cannot be guaranteed. `not_enforced` gets what is left out for other tools and,
        unless `is_required`, for all tools: then a schema that cannot be used allows any values.
        `is_loose`: all schemas do.
        `answer`: the grammar for content, from structured.grammar; it is required without tools.
        """
        call = self._syntax.call
        content = ""
        if answer is not None and not is_required:
            content = self._rule("answer", answer.removeprefix("start: "))
        if call is None or not tools:
            return self._whole(content, reasoning, is_json=True)
        if NAME in call.opener:
            call = replace(call, opener="", head=call.opener.lstrip() + call.head, joint=None)
        if is_loose:
            tools = [_loosened(call, tool) for tool in tools]
        enforced = strict if is_required else None
        opener, calls = call.opener.lstrip(), self._calls(call, tools, is_parallel, enforced)
        if is_required:
            body = f"{self._literal(opener)} {calls}"
        elif content:
            body = f"({self._literal(opener)} {calls} | {content})"
        else:
            body = self._or_content(opener, calls)
        is_json = (is_required or bool(content)) and call.kind in ("json", "named", "python")
        return self._whole(body, reasoning, is_json=is_json)

    def _whole(self, body: str, reasoning: ReasoningMarks | None, *, is_json: bool) -> str:
        """The grammar of reasoning and a body. `is_json`: any quotes and brackets are JSON's."""
        start, json_start = body, JsonStart()
        if reasoning is not None:
            space = reasoning.end[: len(reasoning.end) - len(reasoning.end.lstrip())]
            is_token = self._pieces(reasoning.end.strip())[0] in self._specials
            end = reasoning.end.strip() if is_token else space + reasoning.end.strip()
            begin = "" if reasoning.is_open else reasoning.begin
            json_start = JsonStart(begin.encode(), end.encode())
            thought = self._until("THOUGHT", reasoning.end)
            if not reasoning.is_open:
                thought = f"({self._literal(reasoning.begin)} {thought})?"
            start = f"{thought} SPACE? {body}"
        rules = [f"{name}: {body}" for body, name in self._names.items()]
        comment = json_start.comment if is_json else ""
        return comment + "\n".join([f"start: {start}", *rules, _TERMINALS])

    def _calls(
        self,
        call: CallSyntax,
        tools: Sequence[Mapping[str, Any]],
        is_parallel: bool,
        strict: Collection[str] | None,
    ) -> str:
        """Calls of tools; `strict`: see `grammar`, None: any schema is accepted."""
        alternatives, arguments = [], dict[str, str]()
        head, middle, tail = call.head, call.middle, call.tail
        is_shared = NAME not in head + middle + tail  # once for all tools: there may be hundreds
        between = self._rule("middle", self._literal(middle)) if is_shared else ""
        for i, tool in enumerate(tools):
            name = tool["function"]["name"]
            schema = tool["function"].get("parameters") or _ANY_OBJECT
            shown = escaped(name) if call.kind == "json" else name
            try:
                if strict is None or name not in strict:
                    schema = self._enforceable(name, schema)
                if (key := json_text(schema)) not in arguments:
                    arguments[key] = self._arguments(call, f"args_{i}", schema)
            except OptionError as error:
                if strict is not None:
                    raise OptionError(f"the schema of the tool {name!r}: {error}") from error
                self.not_enforced.append(f"{name} {str(error).removeprefix(_AT)}")
                schema = _loosened(call, tool)["function"]["parameters"]
                if (key := json_text(schema)) not in arguments:
                    arguments[key] = self._arguments(call, f"args_{i}", schema)
            if is_shared:
                alternatives.append(f"{self._literal(shown)} {between} {arguments[key]}")
            else:
                before = self._literal(head + shown + middle, name)
                alternatives.append(f"{before} {arguments[key]} {self._literal(tail, name)}")
        before, after = (self._literal(head), self._literal(tail)) if is_shared else ("", "")
        one = self._rule("one_call", f"{before} ({' | '.join(alternatives)}) {after}")
        closer = call.closer
        closer = closer[: min((at for at in map(closer.find, self._ends) if at >= 0), default=None)]
        joint = call.joint
        more = ""
        if is_parallel and joint is not None and not any(end in joint for end in self._ends):
            more = f"({self._literal(joint)} {one})*"
            gap = joint.removeprefix(closer)
            if closer and joint != gap and (space := gap[: len(gap) - len(gap.lstrip())]):
                # The end may also follow the space before a next call, else a call would be forced.
                return f"{one} {more} ({self._literal(closer)} | {self._literal(closer + space)})"
        return f"{one} {more} {self._literal(closer)}"

    def _enforceable(self, name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema of a tool without keywords that cannot be guaranteed; these are noted."""
        lark, dropped = of_schema_of_tool(schema)
        self.not_enforced += [f"{name} {each}" for each in dropped]
        return json.loads(lark.removeprefix(JSON_START)) if dropped else schema

    def _or_content(self, opener: str, calls: str) -> str:
        """Calls after content, or content alone, which may have marks around it."""
        around = [mark for mark in self._syntax.dropped if mark not in self._ends]
        marks = "".join(f" | {self._literal(mark)}" for mark in around if mark in self._specials)
        if not opener:  # a JSON object
            content = self._rule("CONTENT", "/[^{ \\n](?s:.*)/")
            return f"({_repeated(content + marks)} | {calls})"
        first = words(opener)[0]
        if self._pieces(first)[0] in self._specials:
            text = _repeated("TEXT" + marks)
            return f"({text} | ({text})? {self._literal(opener)} {calls})"
        content = self._rule("CONTENT", f"/(?s:.+)/ & ~/(?s:.*){_as_regex(first)}(?s:.*)/")
        before = f"({marks[3:]})* " if marks else ""
        rest = self._literal(opener.removeprefix(first))
        text = _repeated(content + marks)
        return f"({text} | {before}{self._until('OPENER', first)} {rest} {calls})"

    def _rule(self, name: str, body: str) -> str:
        """Add a rule or terminal; returns its name, or that of an earlier one with this body."""
        return self._names.setdefault(body, name)

    def _until(self, name: str, end: str) -> str:
        """A text up to and including `end`; adds a terminal with this name if it needs one.

        Terminals match greedily, so the terminal of the text has to include the end.
        """
        first, *rest = self._pieces(end.strip())
        if first in self._specials:  # a control token
            return f"TEXT? {self._literal(end.strip())}"
        space = end[: len(end) - len(end.lstrip())]
        inside = _as_regex(space + first)
        text = self._rule(name, f"/(?s:.*){inside}/ & ~/(?s:.*){inside}(?s:.+)/")
        return f"{text} {self._literal(''.join(rest))}"

    def _pieces(self, text: str) -> list[str]:
        return [each for each in (self._split.split(text) if self._split else [text]) if each]

    def _literal(self, text: str, name: str = "") -> str:
        """A literal for a pattern; names of control tokens in it match these tokens."""
        found = []
        for part in parts(text.replace(NAME, name)):
            if part in _PLACES:
                found.append(_PLACES[part])
                continue
            for piece in self._pieces(part):
                token = self._specials.get(piece)
                found.append(_quoted(piece) if token is None else f"<[{token}]>")
        return " ".join(found)

    def _arguments(self, call: CallSyntax, rule: str, schema: Mapping[str, Any]) -> str:
        if call.kind in ("json", "named"):
            return self._json_rule(rule, schema)
        of_json_schema(schema)  # refuses the same schemas of strict tools as other kinds of calls
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        if call.kind == "gemma":
            return self._gemma(rule, schema, schema, call.quote, _MAX_DEPTH)
        made: list[str] = []
        for i, key in enumerate(properties):
            own = properties[key] if isinstance(properties[key], Mapping) else {}
            part = {**_definitions(schema), **own}
            gap, begin = ", ", f"{key}="
            if call.parameter is None:
                value = self._json_rule(f"{rule}_{i}", part)
            else:
                gap = call.parameter.gap
                begin, value = self._tagged(call, f"{rule}_{i}", key, part, types_of(schema, key))
            # Joined with the following text in one literal, because terminals match greedily.
            before = self._literal(begin)
            if made and gap:
                before = f"({before} | {self._literal(gap + begin)})"
            argument = self._rule(f"{rule}_{i}_argument", f"{before} {value}")
            made.append(argument + ("" if key in names else "?"))
        text = " ".join(made)
        return f'"(" {text} ")"' if call.kind == "python" else text

    def _json_rule(self, rule: str, schema: Mapping[str, Any]) -> str:
        return self._rule(rule, of_json_schema(schema).removeprefix("start: "))

    def _tagged(
        self, call: CallSyntax, rule: str, key: str, schema: Mapping[str, Any], types: set[str]
    ) -> tuple[str, str]:
        """The text before the value of a tagged argument, and the grammar of value and end."""
        parameter = call.parameter
        assert parameter is not None
        is_string = "string" in types or types == {"any"}
        end = parameter.end.replace(KEY, key)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if is_string and not isinstance(values, list):
            value = self._until(rule.upper(), end)
        else:
            value = " | ".join(_quoted(str(each)) for each in values or ())
            value = value if is_string else self._json_rule(rule, schema)
            value = f"({value}) {self._literal(end)}"
        middle = parameter.string_middle if is_string else parameter.other_middle
        return parameter.begin + key + middle, value

    def _gemma(
        self, rule: str, schema: object, root: Mapping[str, Any], quote: str, depth: int
    ) -> str:
        types = types_of({"properties": {"x": schema}, **_definitions(root)}, "x")
        found = schema if isinstance(schema, Mapping) else {}
        if types == {"string"}:
            mark = self._literal(quote)
            values = found.get("enum")
            if isinstance(values, list):
                return f"{mark} ({' | '.join(_quoted(str(value)) for value in values)}) {mark}"
            return f"{mark} {self._until('QUOTED', quote)}"
        if types == {"object"} and isinstance(found.get("properties"), Mapping) and depth:
            required = found.get("required")
            names = required if isinstance(required, list) else []
            made: list[str] = []
            for i, key in enumerate(sorted(found["properties"])):  # the template's order
                value = self._gemma(f"{rule}_{i}", found["properties"][key], root, quote, depth - 1)
                separator = '","? ' if made else ""
                argument = f"{separator}{_quoted(key + ':')} {value}"
                made.append(argument if key in names else f"({argument})?")
            return self._rule(rule, f'"{{" {" ".join(made)} "}}"')
        if types == {"array"} and depth:
            item = self._gemma(f"{rule}_item", found.get("items"), root, quote, depth - 1)
            return self._rule(rule, f'"[" ({item} ("," {item})*)? "]"')
        if types & {"any", "object", "array", "string"}:
            text = f"{self._literal(quote)} {self._until('QUOTED', quote)}"
            self._rule("SCALAR", "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?|true|false|null/")
            self._rule("GEMMA_KEY", "/[A-Za-z0-9_]+/")
            self._rule("gemma_member", 'GEMMA_KEY ":" gemma_value')
            self._rule("gemma_object", '"{" (gemma_member ("," gemma_member)*)? "}"')
            items = '"[" (gemma_value ("," gemma_value)*)? "]"'
            self._rule("gemma_value", f"{text} | SCALAR | {items} | gemma_object")
            return "gemma_object" if types == {"object"} else "gemma_value"
        return self._json_rule(rule, found)


def _loosened(call: CallSyntax, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool whose parameters may have any values and, where calls have JSON, any names."""
    function = tool["function"]
    properties = (function.get("parameters") or {}).get("properties")
    names = properties if isinstance(properties, Mapping) else ()
    is_json = call.kind in ("json", "named")
    parameters = (
        _ANY_OBJECT if is_json else {**_ANY_OBJECT, "properties": {name: {} for name in names}}
    )
    return {**tool, "function": {**function, "parameters": parameters}}


def _repeated(alternatives: str) -> str:
    return f"({alternatives})+" if " | " in alternatives else alternatives


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {name: root[name] for name in ("$defs", "definitions") if name in root}


def _quoted(text: str) -> str:
    return json_text(text).replace("\x7f", "\\u007f")


def _as_regex(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)
