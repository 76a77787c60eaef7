"""Derives from a chat template how it writes reasoning and tool calls, by rendering samples."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from ggufspec.decoding.tree import n_equal
from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.template_probe import LimitError
from ggufspec.errors import PromptError

# Placeholders in a pattern for a call's id, its index, its name, and a key.
ID, INDEX, NAME, KEY = "\0i", "\0n", "\0f", "\0k"
_PLACES = re.compile("(\0[infk])")
_WORDS = re.compile(r"(?:\[[A-Z ]+\]|\S)+")
_TOKENS = re.compile(r"\s+|\]<[^<>\s]*>\[|<[^<>\s]*>|\[/?[A-Z_]+\]|[^\s<>\[\]]+|.")

Kind = Literal["json", "named", "tagged", "python", "gemma"]


class ParameterSyntax(NamedTuple):
    """How a tagged argument is written: begin, key, a `middle`, the value, end."""

    begin: str
    string_middle: str
    other_middle: str  # for values that are not strings; equal if strings are not marked
    end: str
    gap: str  # white space before the next argument


@dataclass(frozen=True)
class CallSyntax:
    """Calls as `opener head NAME middle ARGUMENTS tail (joint head NAME ... tail)* closer`.

    `kind` is the form of the arguments: "json": in an object that also has the name; "named":
    a JSON object after the name; "tagged": a tag for each; "python": f(a=1); "gemma": f{a:1}.
    """

    kind: Kind
    opener: str = ""
    head: str = ""
    middle: str = ""
    tail: str = ""
    closer: str = ""
    joint: str | None = None  # None: the template writes one call per message
    parameter: ParameterSyntax | None = None  # if "tagged"
    quote: str = '"'  # if "gemma"
    name_key: str | None = "name"  # if "json"; None: the name is the key of the arguments
    arguments_key: str = "arguments"


@dataclass(frozen=True)
class Syntax:
    header: str  # before an answer
    reasoning: tuple[str, str] | None  # begin and end; an empty begin: the prompt opened it
    dropped: tuple[str, ...]  # other marks around the content
    call: CallSyntax | None
    is_harmony: bool = False


def words(text: str) -> list[str]:
    """The words of a text; adjacent tags are separate words."""
    return [word for part in _WORDS.findall(text) for word in re.split(r"(?<=>)(?=\]?<)", part)]


def parts(text: str) -> list[str]:
    """A pattern split at its placeholders."""
    return [part for part in _PLACES.split(text) if part]


@lru_cache(maxsize=4)
def syntax_of(template: ChatTemplate) -> Syntax:
    """The syntax of a template, derived once; no marks if its conversations cannot be rendered."""
    try:
        return _derived(template)
    except LimitError:
        raise
    except PromptError:
        return Syntax("", None, (), None)


def _derived(template: ChatTemplate) -> Syntax:
    sample, source = _Sample(template), template.source_for_tools
    prompt = sample.prompt()
    before, _, after = sample.answer(_CONTENT).rpartition(_CONTENT)
    common = _common(prompt, before) if before else prompt
    header = common[len(_common(common, sample.prompt(header=False))) :] or common
    reasoning = _reasoning(sample, header, source)
    for mark in reasoning or ():
        header = header.partition(mark)[0] if mark else header
    opening = {*words(_after(before, header)), *(reasoning or ())}
    is_harmony = "<|channel|>" in source and "<|message|>" in source
    call = HARMONY_CALL if is_harmony else _call(sample, header, after, opening)
    call = call or _known_call(sample, source)
    if call and call.joint and not call.opener and header.endswith(call.joint):
        header = header.removesuffix(call.joint)  # it also comes before content
        call = replace(call, opener=call.joint)
        opening = {call.opener + word for word in opening}
    around = {*words(header), *opening, *words(after)} - set(reasoning or ())
    around = {word for word in around if re.search(r"[<>\[]", word)}
    if "<|python_tag|>" in source:
        around.add("<|python_tag|>")
    return Syntax(
        header=header.strip(),
        reasoning=reasoning,
        dropped=tuple(sorted(around)),
        call=call,
        is_harmony=is_harmony,
    )


# The calls that gpt-oss writes, which differ slightly from earlier calls in its template.
HARMONY_CALL = CallSyntax(
    "named",
    opener="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    closer="<|call|>",
)
_NAMES = ("funcAlpha", "funcBeta")
_KEYS = ("keyAlpha", "keyBeta")
_VALUES = (("textAlpha", 4217), ("textBeta", 4218))
_ARGUMENTS = [dict(zip(_KEYS, values, strict=True)) for values in _VALUES]
_IDS = ("callIdOne", "callIdTwo")  # Mistral's templates require nine characters
_CONTENT, _REASONING, _USER = "contentAlpha", "reasonAlpha", "userAlpha"
_TOOL = {"type": "object", "properties": {"other": {"type": "string", "description": "x"}}}


class _Sample:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.ids = _IDS

    def prompt(self, *, header: bool = True) -> str:
        return self.whole([], header=header).rpartition(_USER)[2]

    def answer(self, content: str = "", *, n_calls: int = 0, reasoning: str | None = None) -> str:
        """What the template writes for this answer; empty if it cannot render it."""
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            answer["reasoning_content"] = reasoning
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in zip(self.ids, _NAMES, _ARGUMENTS, strict=True)
        ]
        if n_calls:
            answer["tool_calls"] = calls[:n_calls]
        return self.whole([answer], tools=n_calls > 0, header=False).rpartition(_USER)[2]

    def whole(
        self, answers: Sequence[dict[str, Any]] = (), *, tools: bool = False, header: bool = True
    ) -> str:
        """The conversation with its prompt; empty if the template cannot render it."""
        function = {"name": "otherTool", "description": "x", "parameters": _TOOL}
        given = [{"type": "function", "function": function}]
        messages = [{"role": "user", "content": _USER}, *answers]
        try:
            return self._template.render(
                messages, tools=given if tools else (), add_generation_prompt=header
            )
        except LimitError:
            raise
        except PromptError:  # some templates need tools, or a list
            return "" if tools else self.whole(answers, tools=True, header=header)


def _common(a: str, b: str) -> str:
    tokens = _TOKENS.findall(a)
    return "".join(tokens[: n_equal(tokens, _TOKENS.findall(b))])


def _after(text: str, header: str) -> str:
    """The text after the header of an answer; the last words of the header may differ."""
    tokens = _TOKENS.findall(header)
    while tokens and "".join(tokens) not in text:
        del tokens[-1]
    return text.rpartition("".join(tokens))[2] if tokens else text


def _without_end(text: str, end: str) -> str:
    if end and text.endswith(end):
        return text.removesuffix(end)
    tokens = _spaced_words(text)
    n_common = n_equal(reversed(tokens), reversed(_spaced_words(end)))
    return "".join(tokens[: len(tokens) - n_common])


def _spaced_words(text: str) -> list[str]:
    return [word for part in re.split(r"(\s+)", text) for word in (words(part) or [part])]


_KNOWN_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def _reasoning(sample: _Sample, header: str, source: str) -> tuple[str, str] | None:
    for n_calls in (0, 1):  # some templates keep reasoning only before calls
        text = sample.answer(_CONTENT, reasoning=_REASONING, n_calls=n_calls)
        before, found, after = text.partition(_REASONING)
        if found and (following := words(after.partition(_CONTENT)[0])):
            begin = _after(before, header).strip() or _after(sample.prompt(), header).strip()
            return begin or words(before)[-1], following[0]
    return next((pair for pair in _KNOWN_REASONING if all(m in source for m in pair)), None)


def _call(sample: _Sample, header: str, end: str, opening: set[str]) -> CallSyntax | None:
    text = sample.answer(n_calls=1)
    if text and _NAMES[0] not in text and _IDS[0] in text:  # Kimi's id contains the name
        sample.ids = (f"functions.{_NAMES[0]}:0", f"functions.{_NAMES[1]}:1")
        text = sample.answer(n_calls=1)
    start = text.find(header) + len(header) if header in text else len(_common(text, header))
    while (word := (words(text[start:]) or [""])[0]) in opening:
        start = text.index(word, start) + len(word)
    key_at = text.find(_KEYS[0], start)
    name_at = text.rfind(_NAMES[0], start, max(key_at, 0))
    if min(key_at, name_at) < 0:
        return None
    spots = text, start, name_at, name_at + len(_NAMES[0]), key_at
    made = _object_call(spots) or _literal_call(spots) or _tagged_call(spots)
    if made is None:
        return None
    call, i_end = made
    call = replace(call, closer=_without_end(text[i_end:], end))
    several = sample.answer(n_calls=2)
    if several.startswith(text[:i_end]) and _NAMES[1] in several[i_end:]:
        joined = _with_joint(call, several[i_end:])
        between = joined.joint or ""
        if not (header.strip() in between and end.strip() in between):  # else: two messages
            call = joined
            one, two = (  # the text after the last value
                each.rpartition(str(value))[2]
                for each, (_, value) in zip((text, several), _VALUES, strict=True)
            )
            if two.startswith(one):  # the section is closed only after several calls
                call = replace(call, closer=call.closer + _without_end(two[len(one) :], end))
    return call


def _with_joint(call: CallSyntax, rest: str) -> CallSyntax:
    key_at = rest.find(_KEYS[0])
    name_at = rest.rfind(_NAMES[1], 0, key_at)
    head, middle = (re.sub(r"\d+", INDEX, each, count=1) for each in (call.head, call.middle))
    pattern = re.escape(head).replace(re.escape(INDEX), r"\d+")
    found = re.search(pattern + "$", _placed(rest[:name_at]))
    if found is None:
        return call
    if not _placed(rest[name_at + len(_NAMES[1]) :]).startswith(call.middle):
        call = replace(call, middle=middle)
    if not _placed(rest[:name_at]).endswith(call.head):
        call = replace(call, head=head)
    return replace(call, joint=_placed(rest[:name_at])[: found.start()])


# A text with a call, and where in it the call starts, its name starts and ends, and its first key.
_Spots = tuple[str, int, int, int, int]


def _object_call(spots: _Spots) -> tuple[CallSyntax, int] | None:
    """The syntax of a call whose arguments are a JSON object, and the end of the call."""
    text, start, name_at, name_end, key_at = spots
    # Some templates write the JSON text as a JSON string.
    for mark, wanted in (("{", _ARGUMENTS[0]), ('"{', json.dumps(_ARGUMENTS[0]))):
        at = text.rfind(mark, name_end, key_at)
        arguments, end = _decoded(text, at) if at > 0 else (None, 0)
        if arguments == wanted:
            break
    else:
        return None
    middle = _placed(text[name_end:at])
    for i in (i for i in range(start, name_at) if text[i] == "{"):
        outer, outer_end = _decoded(text, i)
        if isinstance(outer, dict) and outer_end > end:
            keys = {json.dumps(value): key for key, value in outer.items()}
            call = CallSyntax(
                "json",
                opener=text[start:i],
                head=_placed(text[i:name_at]),
                middle=middle,
                tail=_placed(text[end:outer_end]),
                name_key=keys.get(json.dumps(_NAMES[0])),
                arguments_key=keys.get(json.dumps(arguments), "arguments"),
            )
            return call, outer_end
    return CallSyntax("named", opener=_placed(text[start:name_at]), middle=middle), end


def _literal_call(spots: _Spots) -> tuple[CallSyntax, int] | None:
    """The syntax of a call like f(a="x", b=1) or f{a:"x",b:1}, and the end of the call."""
    text, start, name_at, name_end, key_at = spots
    if key_at != name_end + 1 or text[name_end] not in "({":
        return None
    value_at = text.find(_VALUES[0][0], key_at)
    quote = text[key_at + len(_KEYS[0]) + 1 : value_at]
    kind: Kind = "python" if text[name_end] == "(" else "gemma"
    end = text.find(")" if kind == "python" else "}", value_at) + 1
    return CallSyntax(kind, opener=_placed(text[start:name_at]), quote=quote), end


def _tagged_call(spots: _Spots) -> tuple[CallSyntax, int] | None:
    """The syntax of a call with a tag for each argument, and the end of the call."""
    text, start, name_at, name_end, key_at = spots
    value_at = text.find(_VALUES[0][0], key_at)
    value_end = value_at + len(_VALUES[0][0])
    next_at = text.find(_KEYS[1], value_end)
    other_at = text.find(str(_VALUES[0][1]), next_at)
    if not key_at < value_at < next_at < other_at:
        return None
    between = text[value_end:next_at]  # end, gap and begin
    first = (words(between) or [""])[0]
    end = between[: between.find(first) + len(first)]
    begin = between[len(end) :].lstrip()
    head = text[name_end:key_at]
    if not first or not begin or not head.endswith(begin):
        return None
    parameter = ParameterSyntax(
        begin=begin,
        string_middle=text[key_at + len(_KEYS[0]) : value_at],
        other_middle=text[next_at + len(_KEYS[1]) : other_at],
        end=end.replace(_KEYS[0], KEY),
        gap=between[len(end) : len(between) - len(begin)],
    )
    i_end = other_at + len(str(_VALUES[0][1])) + len(end.replace(_KEYS[0], _KEYS[1]))
    call = CallSyntax(
        "tagged",
        opener=_placed(text[start:name_at]),
        middle=_placed(head.removesuffix(begin)),
        parameter=parameter,
    )
    return call, i_end


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, and its end; None and the place if there is no value."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None, at


def _placed(text: str) -> str:
    for found, place in zip((*_IDS, *_NAMES), (ID, ID, NAME, NAME), strict=True):
        text = text.replace(found, place)
    return text


_JSON_CALL = CallSyntax("json", head='{"name": "', middle='", "arguments": ', tail="}")
# Templates that show tools to the model, but do not render earlier calls.
_KNOWN_CALLS = {
    **dict.fromkeys(
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),  # LFM2
        CallSyntax(
            "python", opener="<|tool_call_start|>[", closer="]<|tool_call_end|>", joint=", "
        ),
    ),
    "<|tool_call|>": replace(_JSON_CALL, opener="<|tool_call|>[", joint=", ", closer="]"),
    "<TOOLCALL>": replace(_JSON_CALL, opener="<TOOLCALL>[", joint=", ", closer="]</TOOLCALL>"),
    "<tool_call>": replace(
        _JSON_CALL,
        opener="<tool_call>\n",
        joint="\n</tool_call>\n<tool_call>\n",
        closer="\n</tool_call>",
    ),
}


def _known_call(sample: _Sample, source: str) -> CallSyntax | None:
    if sample.whole(tools=True) in ("", sample.whole()):
        return None
    return next((call for mark, call in _KNOWN_CALLS.items() if mark in source), None)
