"""Grammars for calls allow what the template writes, and nothing that the tools' schemas do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chat_formats import HARMONY, TEMPLATES, USER, tool

from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.reasoning import reasoning_after
from ggufspec.errors import OptionError
from ggufspec.server.formats.chat_format import ChatFormat
from ggufspec.server.formats.grammar import GrammarMaker
from ggufspec.structured.constraint import GrammarConstraint, TokenTable
from ggufspec.structured.grammar import of_grammar, of_json_schema

FormatOf = Callable[[str], ChatFormat]
TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}),
    tool("add_2", x={"type": "array", "items": {"type": "integer"}}),
]
TAGGED = ("tagged", "keys", "typed", "key_tags", "gemma")  # not in JSON
ARGUMENTS: list[dict[str, Any]] = [{"city": "Paris <b>", "days": 3}, {"x": [1, 22]}]


def allows(grammar: str, text: str, specials: Sequence[str] = ()) -> bool:
    """Whether a text, in bytes and these special tokens, matches a grammar from end to end."""
    pieces = [*(bytes([i]) for i in range(256)), *(name.encode() for name in specials), b"<end>"]
    end = len(pieces) - 1
    table = TokenTable(
        pieces, special=range(256, end + 1), stop_tokens=[end], tokenize=lambda _, text: []
    )
    tokens: list[int] = []
    pattern = "|".join(map(re.escape, specials)) or r"\Z"
    for piece in re.split(f"({pattern})", text):
        tokens += [256 + specials.index(piece)] if piece in specials else piece.encode()
    constraint = GrammarConstraint(table, of_grammar(grammar), 0)
    if constraint.n_allowed((), tokens) < len(tokens):
        return False
    return constraint.is_over(tokens) or constraint.n_allowed(tokens, [end]) == 1


def called(
    template: ChatTemplate,
    n_calls: int,
    tools: Sequence[dict[str, Any]] = TOOLS,
    arguments: Sequence[dict[str, Any]] = ARGUMENTS,
) -> str:
    """What the template writes for these calls."""
    calls = [
        {
            "id": f"abcdefgh{i}",
            "type": "function",
            "function": {"name": tools[i]["function"]["name"], "arguments": arguments[i]},
        }
        for i in range(n_calls)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt = template.render([USER], tools=tools)
    whole = template.render([USER, message], tools=tools, add_generation_prompt=False)
    return whole.removeprefix(prompt).removesuffix("<|end|>\n").strip()


def grammar_of(
    found: ChatFormat,
    tools: Sequence[dict[str, Any]],
    begun: str,
    *,
    specials: dict[str, int],
    ends: Sequence[int],
    **how: Any,
) -> str:
    maker = GrammarMaker(found.syntax, specials, ends)
    return maker.grammar(tools, reasoning_after(found.syntax, begun), **how)


def specials_of(found: ChatFormat) -> list[str]:
    return sorted(set(re.findall(r"<\|?\w+\|?>|\[[A-Z_]+\]", found.text)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_of_the_template_are_allowed(
    name: str, template: Callable[[str], ChatTemplate], chat_format: FormatOf
) -> None:
    found = chat_format(TEMPLATES[name])
    one = called(template(TEMPLATES[name]), 1)
    for names in ([], specials_of(found)):
        specials = {name: 256 + i for i, name in enumerate(names)}
        how: dict[str, Any] = {"specials": specials, "ends": []}
        made = grammar_of(found, TOOLS, "", is_required=True, is_parallel=True, **how)
        assert allows(made, one, names)
        assert allows(made, f"<think>So <b>.</think>\n\n{one}", names)
        assert not allows(made, "Text.", names)
        assert not allows(made, one.replace("3", "x"), names)
        assert not allows(made, one.replace("weather", "whether"), names)
        several = one
        if name != "bare":
            several = called(template(TEMPLATES[name]), 2)
            assert allows(made, several, names)
            single = grammar_of(found, TOOLS, "", is_required=True, is_parallel=False, **how)
            assert allows(single, one, names)
            assert not allows(single, several, names)
        auto = grammar_of(found, TOOLS, "", is_required=False, is_parallel=True, **how)
        assert allows(auto, "Text, no call: < [", names)
        assert allows(auto, several, names)
        if name != "bare":
            assert allows(auto, f"Text.\n{several}", names)
        assert not allows(auto, one.replace("3", "x"), names)


def test_content_may_have_to_be_json(chat_format: FormatOf) -> None:
    made = grammar_of(
        chat_format(TEMPLATES["hermes"]),
        TOOLS,
        "",
        is_required=False,
        is_parallel=True,
        specials={},
        ends=[],
        answer=of_json_schema({"enum": [1, 2]}),
    )
    assert allows(made, "1")
    assert allows(made, "<think>a</think>2")
    assert allows(made, '<tool_call>\n{"name": "add_2", "arguments": {"x": [1]}}\n</tool_call>')
    assert not allows(made, "3")


def test_an_opened_reasoning_is_closed_first(chat_format: FormatOf) -> None:
    found = chat_format(TEMPLATES["hermes"])
    reasoning = reasoning_after(found.syntax, "<think>\n")
    assert reasoning is not None
    assert reasoning.is_open
    made = grammar_of(
        found, (), "<think>\n", answer=of_json_schema({"enum": [1]}), specials={}, ends=[]
    )
    assert allows(made, "So.</think>\n\n1")
    assert not allows(made, "1")
    assert reasoning_after(found.syntax, "<think>a</think>") is None


def test_harmony_calls_after_its_analysis(chat_format: FormatOf) -> None:
    made = grammar_of(
        chat_format(HARMONY),
        TOOLS,
        "",
        is_required=True,
        is_parallel=True,
        specials={"<|call|>": 256},
        ends=[256],
    )
    call = '<|channel|>commentary to=functions.add_2 <|constrain|>json<|message|>{"x": [1]}'
    assert allows(made, call)
    assert not allows(made, call.replace("[1]", "1"))


def test_texts_of_tagged_arguments_may_be_one_of_several(chat_format: FormatOf) -> None:
    tools = [tool("f", unit={"enum": ["C", "F"]}, note={"type": ["string", "null"]})]
    for name in ("tagged", "keys", "gemma"):
        found = chat_format(TEMPLATES[name])
        made = grammar_of(
            found, tools, "", is_required=True, is_parallel=False, specials={}, ends=[]
        )
        assert found.syntax.call is not None
        texts = {
            "tagged": "<tool_call>\n<function=f>\n<parameter=unit>\n{}\n</parameter>\n"
            "</function>\n</tool_call>",
            "keys": "<tool_call>f\n<arg_key>unit</arg_key>\n<arg_value>{}</arg_value>\n"
            "</tool_call>",
            "gemma": '<|call>call:f{{unit:<|"|>{}<|"|>}}<call|>',
        }
        assert allows(made, texts[name].format("C"))
        assert not allows(made, texts[name].format("K"))


def test_what_a_schema_cannot_guarantee_is_refused_for_strict_tools_and_named_for_others(
    chat_format: FormatOf,
) -> None:
    tools = [
        tool("g", y={"type": "integer"}),
        tool(
            "f", x={"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, no={"not": {}}
        ),
    ]
    texts = {
        "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"x": [{}]}}}}\n</tool_call>',
        "tagged": "<tool_call>\n<function=f>\n<parameter=x>\n[{}]\n</parameter>\n</function>\n"
        "</tool_call>",
        "gemma": "<|call>call:f{{x:[{}]}}<call|>",
    }
    for name, text in texts.items():
        found = chat_format(TEMPLATES[name])
        maker = GrammarMaker(found.syntax, {}, [])
        with pytest.raises(OptionError, match="uniqueItems"):
            maker.grammar(tools, None, is_required=True, strict={"f"})
        maker = GrammarMaker(found.syntax, {}, [])
        made = maker.grammar(tools, None, is_required=True, strict={"g"})
        assert maker.not_enforced == ["f #/properties/x: uniqueItems"]
        assert allows(made, text.format("1,2" if name == "gemma" else "1, 2"))
        assert not allows(made, text.format('"a"')) or name == "gemma"


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in TAGGED])
def test_no_object_in_a_call_or_an_answer_repeats_a_key(
    name: str, template: Callable[[str], ChatTemplate], chat_format: FormatOf
) -> None:
    found, tools = chat_format(TEMPLATES[name]), [tool("f", x={"type": "object"})]
    call = called(template(TEMPLATES[name]), 1, tools, [{"x": {"a": 1, "b": 2}}])
    thought = '<think>{"a": 1, "a": 2}</think>\n\n'
    for names in ([], specials_of(found)):
        specials = {name: 256 + i for i, name in enumerate(names)}
        how: dict[str, Any] = {"specials": specials, "ends": []}
        made = grammar_of(found, tools, "", is_required=True, is_parallel=True, **how)
        answer = of_json_schema({"type": "array"})
        either = grammar_of(found, tools, "", answer=answer, **how)
        answered = '[{"a": 1, "b": 2}]'  # of an object, "bare" could take its { for a call's
        for grammar, text in ((made, call), (either, call), (either, answered)):
            assert allows(grammar, text, names)
            assert allows(grammar, thought + text, names)
            assert not allows(grammar, text.replace('"b"', '"a"'), names)
            assert not allows(grammar, thought + text.replace('"b"', '"a"'), names)


def test_a_model_may_end_after_the_line_break_between_calls(chat_format: FormatOf) -> None:
    template = TEMPLATES["hermes"].replace("\n<tool_call>", "{{ '\\n' }}<tool_call>")
    grammar = grammar_of(
        chat_format(template),
        [{"type": "function", "function": {"name": "now"}}],
        "",
        is_required=True,
        is_parallel=True,
        specials={},
        ends=[],
    )
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text in (call, f"{call}\n", f"{call}\n{call}\n"):
        assert allows(grammar, text), text


@pytest.mark.parametrize("name", ["hermes", "tagged", "gemma"])
def test_hundreds_of_tools_share_their_syntax(
    name: str, template: Callable[[str], ChatTemplate], chat_format: FormatOf
) -> None:
    """Whether all of them have their own parameters, or the same."""
    described = {"type": "string", "description": "What the tool has to search for. " * 20}
    own = [tool(f"search_{i}", **{f"city_{i}": described, "days": {}}) for i in range(150)]
    same = [tool(f"search_{i}", city=described, days={"type": "integer"}) for i in range(150)]
    found = chat_format(TEMPLATES[name])
    one = called(template(TEMPLATES[name]), 1)
    for tools, key in ((own, "city_121"), (same, "city")):
        made = grammar_of(found, tools, "", specials={}, ends=[], is_required=True)
        text = one.replace("weather", "search_121").replace("city", key)
        assert allows(made, text)
        assert not allows(made, text.replace("search_121", "search_1211"))
        assert not allows(made, text.replace(key, "city_1"))
