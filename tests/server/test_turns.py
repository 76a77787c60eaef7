"""All APIs bring a conversation into one form, also for a template that allows few of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from server.dialects import DIALECTS, TOOL
from serving import Live, serving

import ggufspec

# As Mistral's: the system first, users and assistants in turn, ids of nine letters or digits.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(i=0) %}"
    "{% for m in rest %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% elif m.role not in ('assistant', 'tool') %}"
    "{{ raise_exception('no such role') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}{{ m.tool_call_id }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}<call>{{ c.function | tojson }}{{ c.id }}</call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("models") / "strict.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=TEMPLATE, n_ctx_train=1024)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


@pytest.mark.parametrize(
    "roles",
    [
        ("user", "assistant", "system", "user"),
        ("user", "assistant", "developer", "user"),
        ("system", "system", "user"),
        ("user", "user"),
    ],
)
def test_roles_in_any_order_are_answered_alike(strict: Live, roles: tuple[str, ...]) -> None:
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]
    wanted = len(strict.engine.render(messages))
    for name, dialect in DIALECTS.items():
        turns, n_less = messages, 0
        if name == "messages":  # what becomes one message is in lines, not paragraphs
            turns = [{**m, "role": m["role"].replace("developer", "system")} for m in messages]
            n_less = roles[0] == roles[1]
        assert dialect.ask(strict, turns, limit=1).n_prompt == wanted - n_less
    told = DIALECTS["responses"].ask(strict, messages, instructions="x", limit=1)
    as_system = strict.engine.render([{"role": "system", "content": "x"}, *messages])
    assert told.n_prompt == len(as_system)


def test_calls_without_ids_are_answered(strict: Live) -> None:
    def messages(**id: object) -> list[dict[str, Any]]:
        calls = [{**id, "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}]
        return [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": calls * 2},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ]

    wanted = len(strict.engine.render(messages(), tools=[TOOL]))
    for id in ({}, {"id": None}, {"id": ""}):
        for name in ("chat", "ollama"):
            said = DIALECTS[name].ask(strict, messages(**id), tools=[TOOL], limit=1)
            assert said.n_prompt == wanted
    old = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    ]
    DIALECTS["chat"].ask(strict, old, tools=[TOOL], limit=1)


def test_a_result_with_a_text_behind_it_is_answered(strict: Live) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1"}
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    DIALECTS["messages"].ask(strict, turns, tools=[TOOL], limit=1)
