"""What a template writes is read again, however it comes; what is no call is content."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from chat_formats import HARMONY, TEMPLATES, USER, parsed, tool

from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.reasoning import begun_answer
from ggufspec.server.formats.chat_format import ChatFormat
from ggufspec.server.formats.deltas import CallDelta

FormatOf = Callable[[str], ChatFormat]
TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}, more={"type": "object"}),
    tool("add_2", x={"type": "array"}, is_on={"type": "boolean"}),
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": 'New "York"\n<b> {é}, \\', "days": 3, "more": {"a": [1, 2.5, None], "b": "x"}},
    {"x": ["a b", "c"], "is_on": True},
]
IDS = ("abcdefgh1", "abcdefgh2")
SINGLE = ("bare",)  # templates that write one call in a message
WITH_IDS = ("id_last", "marks")


def answer(n_calls: int, content: str = "", reasoning: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": IDS[i], "type": "function", "function": {"name": name, "arguments": ARGUMENTS[i]}}
        for i, name in enumerate(("weather", "add_2")[:n_calls])
    ]
    made: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    return made if reasoning is None else {**made, "reasoning_content": reasoning}


def text_of(template: ChatTemplate, message: dict[str, Any]) -> str:
    """What the template writes for an answer, without the prompt and what ends it."""
    prompt = template.render([USER], tools=TOOLS)
    whole = template.render([USER, message], tools=TOOLS, add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt).removesuffix("<|end|>\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_come_back_as_the_template_writes_them(
    name: str, template: Callable[[str], ChatTemplate], chat_format: FormatOf
) -> None:
    source = TEMPLATES[name]
    found = chat_format(source)
    assert found.tools
    for n_calls in (1,) if name in SINGLE else (1, 2):
        for content, reasoning in (("", None), ("Some text.", None), ("", "So\n\nwhat?")):
            if name in SINGLE and content:
                continue  # JSON without a mark is a call at the beginning of an answer only
            text = text_of(template(source), answer(n_calls, content, reasoning))
            for size in (1, 7, len(text)):
                made = parsed(found.parser("", TOOLS), text, size)
                assert (made.content, made.reasoning) == (content, reasoning or "")
                assert [(name, json.loads(text)) for name, text in made.calls] == list(
                    zip(("weather", "add_2"), ARGUMENTS, strict=True)
                )[:n_calls]
                assert len(set(made.ids)) == n_calls
                if name in WITH_IDS:
                    assert made.ids == list(IDS[:n_calls])
                elif name == "numbered":
                    assert made.ids == ["functions.weather:0", "functions.add_2:1"][:n_calls]
                else:
                    assert all(str(id).startswith("call_") for id in made.ids)
    call = text_of(template(source), answer(1))
    before = "" if name in SINGLE else "First"
    for size in (1, len(call)):
        made = parsed(found.parser("", TOOLS), f"{before} {call}\n\nthen {{}} < [ <tool", size)
        assert [name for name, _ in made.calls] == ["weather"]
        assert made.content == f"{before}then {{}} < [ <tool"
    assert parsed(found.parser(""), call.strip(), 5) == (call.strip(), "", [], [])


@pytest.mark.parametrize("name", [*TEMPLATES, "harmony"])
def test_no_text_is_lost_and_none_raises(
    name: str, template: Callable[[str], ChatTemplate], chat_format: FormatOf
) -> None:
    source = HARMONY if name == "harmony" else TEMPLATES[name]
    text = text_of(template(source), answer(1 if name in (*SINGLE, "harmony") else 2, ""))
    rng = random.Random(name)
    for _ in range(30):
        at, n = rng.randrange(len(text)), rng.randrange(12)
        spoilt = text[:at] + rng.choice(["", "x", "<", '"', "}", "\n", text]) + text[at + n :]
        spoilt = spoilt[: rng.randrange(len(spoilt) + 1)]
        results = [
            parsed(chat_format(source).parser("", TOOLS), spoilt, size)[:3]
            for size in (1, max(len(spoilt), 1))
        ]
        assert results[0] == results[1]
        content, _, calls = results[0]
        if not calls and name != "harmony":
            assert "".join(content.split()) == "".join(spoilt.split())


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>\n",
        "a < b <tool",
        "<tool_call><tool_call>",
        '<tool_call>{"name": "' + 300 * "x" + '"}</tool_call>',
        '<tool_call>{"arguments": {"a": "' + 5000 * "x" + '"}, "name": "f"}</tool_call>',
    ],
    ids=["broken", "unnamed", "opened", "begun", "twice", "long name", "long before"],
)
def test_what_is_no_call_is_content(text: str, chat_format: FormatOf) -> None:
    for size in (1, 7, len(text)):
        made = parsed(chat_format(TEMPLATES["hermes"]).parser("", TOOLS), text, size)
        assert made == (text if text.strip() != "<tool_call>" else made.content, "", [], [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
            [("f", '{"a": 1}')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
        ("list", '<calls>{"name": "f", "arguments": {}}</calls>', [("f", "{}")]),
        ("tagged", "<function=f>\n</function>", [("f", "{}")]),
        ("tagged", "<tool_call><function=f><parameter=a>1</parameter>", [("f", '{"a": 1}')]),
        ("tagged", "<tool_call><function=f><parameter=a>x\ny", [("f", '{"a": "x\\ny"')]),
        (
            "python",
            "<|calls|>[f(), g(a='it', b=None)]",
            [("f", "{}"), ("g", '{"a": "it", "b": null}')],
        ),
        ("bare", '{"name": "weather", "parameters": {"a": 1}}', [("weather", '{"a": 1}')]),
        ("bare", '{"name": "Bob", "parameters": {}}', []),
        ("bare", '{"name": "weather"}', []),
        ("bare", 'See {"name": "weather", "parameters": {}}', []),
    ],
)
def test_variants_of_calls_are_parsed(
    name: str, text: str, calls: list[tuple[str, str]], chat_format: FormatOf
) -> None:
    for size in (1, 6, len(text)):
        made = parsed(chat_format(TEMPLATES[name]).parser("", TOOLS), text, size)
        assert made.calls == calls
        assert made.content == ("" if calls else text)


def test_arguments_are_streamed(chat_format: FormatOf) -> None:
    for name, text in (
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris'),
        ("tagged", "<tool_call>\n<function=weather>\n<parameter=city>\nParis"),
    ):
        parser = chat_format(TEMPLATES[name]).parser("", TOOLS)
        deltas = [delta for letter in text for delta in parser.push(letter)]
        calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
        assert "".join(call.text for call in calls) == '{"city": "Paris'
        assert calls[-1].text == "s"


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content"),
    [
        ("", "<think>a\nb</think>\n\nc", "a\nb", "c"),
        ("<think>\n", "a\n</think>c", "a", "c"),
        ("\n<think>\n\n</think>\n\n", "a <think> b", "", "a <think> b"),
        ("", "a <think>b</think>", "", "a <think>b</think>"),
        ("<think>", "a", "a", ""),
        ("", "</think>a", "", "a"),
        ("", "<thin", "", "<thin"),
        ("<think>a", "b</think> c ", "b", "c "),
    ],
)
def test_reasoning_is_separate(
    begun: str, text: str, reasoning: str, content: str, chat_format: FormatOf
) -> None:
    for size in (1, 3, len(text)):
        for tools in (None, TOOLS):
            made = parsed(chat_format(TEMPLATES["hermes"]).parser(begun, tools), text, size)
            assert (made.reasoning, made.content) == (reasoning, content)


def test_a_prompt_says_what_it_has_of_the_answer(chat_format: FormatOf) -> None:
    found = chat_format(TEMPLATES["hermes"])
    prompt = "<|turn|>assistant\n<think>a</think>b<|end|>\n<|turn|>assistant\n<think>\n"
    assert begun_answer(found.syntax, prompt).strip() == "<think>"
    assert begun_answer(found.syntax, "<|turn|>user\n<think>") == ""


def test_harmony_has_channels(chat_format: FormatOf) -> None:
    found = chat_format(HARMONY)
    assert found.tools
    text = (
        "<|channel|>analysis<|message|>Hm <x>.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I call.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Oslo"}<|call|><|start|>assistant<|channel|>final'
        "<|message|>It rains."
    )
    for size in (1, 3, 7, len(text)):
        made = parsed(found.parser("", TOOLS), text, size)
        assert made[:3] == ("I call.It rains.", "Hm <x>.", [("weather", '{"city": "Oslo"}')])
        made = parsed(
            found.parser("<|channel|>final<|message|>It ", TOOLS), "rains <|channel", size
        )
        assert made[:2] == ("rains <|channel", "")


@pytest.mark.parametrize(
    "text",
    [
        20_000 * "<",
        4_000 * "<tool",
        "<tool_call>" + 20_000 * " ",
        '<tool_call>{"arguments": {"a": "' + 20_000 * "x",
        2_000 * '<tool_call>{"',
        "<think>" + 20_000 * "<",
        "<think>" + 20_000 * " ",
        "<function=f><parameter=a>" + 20_000 * "\n",
        "<function=f>" + 2_000 * "<parameter=",
        2_000 * '```json\n{"',
    ],
    ids=lambda text: text[:12] + "..." + text[-3:],
)
def test_hostile_texts_take_linear_time(text: str, chat_format: FormatOf) -> None:
    found = chat_format(TEMPLATES["tagged" if "<function" in text else "hermes"])
    start = time.thread_time()
    parsed(found.parser("", TOOLS), text, 1)
    assert time.thread_time() - start < 2  # some 0.1 s; quadratic: more than 4 s


@pytest.mark.parametrize("name", ["id_last", "marks", "numbered", "hermes"])
def test_no_two_calls_have_one_id(
    name: str, template: Callable[[str], ChatTemplate], chat_format: FormatOf
) -> None:
    said = answer(2)
    said["tool_calls"] = [{**said["tool_calls"][0], "id": id} for id in IDS]
    text = text_of(template(TEMPLATES[name]), said).replace(*reversed(IDS)).replace(":1", ":0")
    first, second = parsed(chat_format(TEMPLATES[name]).parser("", TOOLS), text, 3).ids
    assert first != second
    assert first == IDS[0] or name not in WITH_IDS
    assert len(str(second)) == len(IDS[0]) or name not in WITH_IDS
    known = chat_format(TEMPLATES[name]).parser("", TOOLS, known_ids=[first])
    again = parsed(known, text, 3).ids
    assert len({*again, first}) == 3


BARE = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("text", "n_calls", "content"),
    [
        (BARE, 1, ""),
        (f"\n<think>So.</think>\n{BARE}", 1, ""),
        (f"```json\n{BARE}\n{BARE}\n```", 2, ""),
        (f"```json\n{BARE}\n```\n\n```json\n{BARE}\n```", 2, ""),
        (f"```xml\n<tool_call>\n{BARE}\n</tool_call>\n```", 1, ""),
        (f"```json\n[{BARE}, {BARE}]\n```", 2, ""),
        (f"{{{BARE}}}\n{{{BARE}}}", 2, ""),
        (f"<tool_call>\n{{{BARE}}}\n</tool_call>", 1, ""),
        ("{{x}} is a place", 0, "{{x}} is a place"),
        (f"{BARE}\n```python\nx = 1\n```", 1, "```python\nx = 1\n```"),
        (f"```json\n{BARE}\n```\n```python\n{{}}\n```", 1, "```python\n{}\n```"),
        (f"Such as {BARE}", 0, f"Such as {BARE}"),
        (BARE.replace("weather", "other"), 0, BARE.replace("weather", "other")),
        (f"```json\n{BARE[:18]}}}\n```\n", 0, f"```json\n{BARE[:18]}}}\n```\n"),
        ('{"city": {"name": "Oslo"}}', 0, '{"city": {"name": "Oslo"}}'),
        ("\n```python\nprint(1)\n```\n", 0, "\n```python\nprint(1)\n```\n"),
        ("```json\n[1, 2]\n```", 0, "```json\n[1, 2]\n```"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "bare", "python"])
def test_calls_without_marks_are_read_at_the_beginning(
    chat_format: FormatOf, name: str, text: str, n_calls: int, content: str
) -> None:
    """Small models write JSON where their template has marks around it."""
    if "<tool_call>" in text and name != "hermes":
        return
    found = chat_format(TEMPLATES[name])
    for size in (1, 7, len(text)):
        made = parsed(found.parser("", TOOLS), text, size)
        assert made.content == content
        assert made.calls == [("weather", '{"city": "Oslo"}')] * n_calls
    made = parsed(found.parser("", TOOLS, is_parallel=False), text, 3)
    assert len(made.calls) == min(n_calls, 1)


def test_calls_without_marks_are_streamed(chat_format: FormatOf) -> None:
    parser = chat_format(TEMPLATES["hermes"]).parser("", TOOLS)
    deltas = [delta for letter in "```json\n" + BARE[:-5] for delta in parser.push(letter)]
    assert deltas[0]._replace(id=None) == CallDelta(0, "{", None, "weather")
    assert deltas[-1] == CallDelta(0, "s")
