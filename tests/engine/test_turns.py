"""Conversations reach each template, also one that allows only some orders of roles."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from ggufspec.engine.chat_template import ChatTemplate, TemplateProcess
from ggufspec.engine.template_probe import Message

WRITES = "[{{ m.role }}:{{ m.content }}]"
FREE = "{% for m in messages %}" + WRITES + "{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be first') }}{% endif %}" + WRITES + "{% endfor %}"
)
# As Mistral's: calls and results do not count, and no message is empty.
ALTERNATES = (
    "{% if messages[0].role == 'system' %}[system:{{ messages[0].content }}]"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set ns = namespace(i=0) %}{% for m in rest %}"
    "{% if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% elif m.role not in ('assistant', 'tool') %}"
    "{{ raise_exception('unknown role') }}{% endif %}[{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}]{% endfor %}"
)
NO_SYSTEM = ALTERNATES.replace("messages[0].role == 'system'", "false")
LEAVES_OUT = FREE.replace(WRITES, "{% if m.role == 'user' %}" + WRITES + "{% endif %}")

U, A, S = "user", "assistant", "system"
TWO = ((S, "one"), (S, "two"), (U, "a"))
LATER = ((U, "a"), (A, "b"), (S, "c"), (U, "d"))
AGAIN = ((U, "a"), (U, "b"))
REMINDER = "<system-reminder>\nc\n</system-reminder>"


def messages_of(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture
def render(process: TemplateProcess) -> Any:
    def run(source: str, messages: Sequence[Message], **more: Any) -> str:
        template = ChatTemplate(source, bos_text="", eos_text="", process=process)
        return template.render(messages, **more)

    return run


@pytest.mark.parametrize(
    ("source", "turns", "text"),
    [
        (FREE, TWO, "[system:one][system:two][user:a]"),
        (FREE, ((A, "a"), (U, "b")), "[assistant:a][user:b]"),
        (SYSTEM_FIRST, TWO, "[system:one\n\ntwo][user:a]"),
        (SYSTEM_FIRST, LATER, f"[user:a][assistant:b][user:{REMINDER}\n\nd]"),
        (SYSTEM_FIRST, AGAIN, "[user:a][user:b]"),
        (ALTERNATES, AGAIN, "[user:a\n\nb]"),
        (
            ALTERNATES,
            ((U, "a"), (A, "b"), (A, "c"), (U, "d")),
            "[user:a][assistant:b\n\nc][user:d]",
        ),
        (ALTERNATES, ((U, "a"), (S, "c")), f"[user:a\n\n{REMINDER}]"),
        (ALTERNATES, ((S, "a"), (A, "b"), (U, "d")), "[system:a][user: ][assistant:b][user:d]"),
        (ALTERNATES, ((A, "b"), (U, "d")), "[user: ][assistant:b][user:d]"),
        (NO_SYSTEM, TWO, "[user:one\n\ntwo\n\na]"),
        (LEAVES_OUT, ((S, "one"), (U, "a"), (S, "c")), f"[user:one\n\na\n\n{REMINDER}]"),
    ],
)
@pytest.mark.parametrize("named", ["system", "developer"])
def test_turns_come_in_an_order_that_the_template_allows(
    render: Any, source: str, turns: tuple[tuple[str, str], ...], text: str, named: str
) -> None:
    messages = messages_of(*((named if role == S else role, said) for role, said in turns))
    assert render(source, messages) == text


def test_a_template_with_developers_at_the_start_only_gets_one(render: Any) -> None:
    known = SYSTEM_FIRST.replace("m.role == 'system'", "m.role in ('system', 'developer')")
    messages = messages_of(("developer", "a"), ("developer", "b"), (U, "x"), ("developer", "c"))
    assert render(known, messages) == f"[developer:a\n\nb][user:x\n\n{REMINDER}]"


def test_parts_are_joined_with_the_texts_of_other_messages(render: Any) -> None:
    parts = [{"type": "text", "text": text} for text in "ab"]
    messages = [{"role": U, "content": parts}, *messages_of((U, "c"))]
    assert render(ALTERNATES, messages) == "[user:a\nb\nc]"
    listed = ALTERNATES.replace(
        "{{ m.role }}:{{ m.content }}",
        "{{ m.role }}:{% for p in m.content %}<{{ p.text }}>{% endfor %}",
    )
    assert render(listed, messages) == "[user:<a><b><c>]"


def test_a_user_may_speak_after_a_result(render: Any) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        *messages_of((U, "a")),
        {"role": A, "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "call00001"},
        *messages_of((S, "c"), (U, "d")),
    ]
    wanted = f"[user:a][assistant:f{{}}][tool:r][assistant: ][user:{REMINDER}\n\nd]"
    assert render(ALTERNATES, messages) == wanted
    assert render(SYSTEM_FIRST, messages).endswith(f"[tool:r][user:{REMINDER}\n\nd]")


def test_a_joined_last_message_is_continued(render: Any) -> None:
    messages = messages_of((U, "a"), (A, "b"), (A, "c"))
    text = render(ALTERNATES, messages, continue_final_message=True)
    assert text == "[user:a][assistant:b\n\nc"


def test_long_conversations_take_linear_time(render: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    n = 8000
    calls = [{**call, "id": str(i)} for i in range(n)]
    results = [{"role": "tool", "content": "", "tool_call_id": str(n - i)} for i in range(n)]
    said: Message = {"role": A, "content": "", "tool_calls": calls}
    single = (
        "{% for m in messages %}{% for c in (m.tool_calls or [])[:1] %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    began = time.process_time()
    render(ALTERNATES, [{"role": U, "content": "x" * 20}] * 40_000)
    render(single, [*messages_of((U, "a")), said, *results])
    assert time.process_time() - began < 2  # some 0.3 s; quadratic: more than 10 s
