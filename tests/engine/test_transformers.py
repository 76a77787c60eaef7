"""Chat templates give the prompts that transformers makes of them.

GGUFSPEC_CHAT_TEMPLATES names a folder of further templates, such as models/templates in the source
of llama.cpp.
"""

from __future__ import annotations

import json
import os
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ggufspec.engine.chat_template import ChatTemplate, TemplateProcess
from ggufspec.errors import PromptError

FOLDER = os.environ.get("GGUFSPEC_CHAT_TEMPLATES")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def tool(name: str, **properties: str) -> dict[str, Any]:
    of = {each: {"type": kind, "description": f"The {each}"} for each, kind in properties.items()}
    parameters = {"type": "object", "properties": of, "required": list(of)}
    return {
        "type": "function",
        "function": {"name": name, "description": "Is <é>", "parameters": parameters},
    }


def called(which: int, name: str, **arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{which}", "type": "function", "function": function}


TOOLS = [tool("get_weather", city="string", days="integer"), tool("stop")]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Weather in <Röm>?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
REASONED = {**ANSWER, "reasoning_content": "It shines."}
WEATHER = called(1, "get_weather", city="Röm", days=2)
CALL = {"role": "assistant", "content": "", "tool_calls": [WEATHER]}
NULL = {**CALL, "content": None}
SPOKEN = {**CALL, "content": "I look."}
TWO = {**CALL, "tool_calls": [WEATHER, called(2, "stop")]}
RESULT = {"role": "tool", "name": "get_weather", "content": "sunny", "tool_call_id": "call00001"}
SECOND = {"role": "tool", "name": "stop", "content": '{"ok": true}', "tool_call_id": "call00002"}
THANKS = {"role": "user", "content": "Thanks"}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "user": ([USER], []),
    "system": ([SYSTEM, USER, ANSWER, THANKS], []),
    "reasoning": ([USER, REASONED, THANKS], []),
    "tools": ([USER], TOOLS),
    "tools and system": ([SYSTEM, USER], TOOLS),
    "call": ([USER, CALL, RESULT], TOOLS),
    "call without content": ([USER, NULL, RESULT], TOOLS),
    "call beside text": ([USER, SPOKEN, RESULT, ANSWER, THANKS], TOOLS),
    "two calls": ([SYSTEM, USER, TWO, RESULT, SECOND, ANSWER, THANKS], TOOLS),
}

OWN = {
    "plain": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=1, sort_keys=true) }}"
    "{{ messages[0] | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "blocks": "{% for m in messages -%}\n  {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
    "  {% generation %}\n    {% set x = m.role %}{{ x }}\n  {% endgeneration %}\n  {{ x }}\n"
    "  {% if loop.index > 2 %}{% break %}{% endif %}\n{% endfor %}",
    "names": "{{ unk_token }}{{ documents is none }}{{ tools is none }}{{ strftime_now('%d%%') }}"
    "{% set n = namespace(a=dict(b=1)) %}{% set n.c = n.a.b %}{{ n.c }}{{ messages[0].thinking }}",
    "alternates": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content | trim }}{% endfor %}",
    "calls": "{% for m in messages %}{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}"
    "{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}{{ m.name }}{{ m.content }}{% endfor %}",
    "calls as text": "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ '<' + c.function.arguments + '>' }}{% endfor %}{{ m.content }}{% endfor %}",
    "calls beside null": "{% for m in messages %}{% if m.content is none %}"
    "{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "parts": "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}\n"
    "{% endfor %}",
}

# Prompts that differ on purpose.
_ONE_CALL = "it writes one call of a message only: each call gets a message of its own"
_NO_SYSTEM = "it refuses a system message: its text begins the message of the user"
_NOT_BOTH = "it writes the text or the calls of a message: the calls are kept"
DIFFERENT = {
    ("GigaChat3-10B-A1.8B", "two calls"): _ONE_CALL,
    ("GigaChat3.1-10B-A1.8B", "two calls"): _ONE_CALL,
    ("openai-gpt-oss-120b", "two calls"): _ONE_CALL,
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "call beside text"): _NOT_BOTH,
    ("calls beside null", "call beside text"): _NOT_BOTH,
    ("alternates", "system"): _NO_SYSTEM,
    ("alternates", "tools and system"): _NO_SYSTEM,
}


def ours(process: TemplateProcess, source: str, conversation: str) -> str | None:
    """The prompt of messages as clients send them: arguments are JSON text. None: an error."""
    messages, tools = deepcopy(CONVERSATIONS[conversation])
    for call in calls_of(messages):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        call["function"]["arguments"] = arguments
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>", process=process)
    try:
        return template.render(messages, tools=tools)
    except PromptError:
        return None


@cache
def utils() -> Any:
    """Imported by the tests themselves, since that takes a second in each process."""
    return pytest.importorskip("transformers.utils.chat_template_utils")


def theirs(source: str, conversation: str) -> list[str]:
    """The prompts of transformers, for messages in each form that its user could have to choose."""
    made, render = [], utils().render_jinja_template
    for text, other, parts in product((False, True), repeat=3):
        messages, tools = deepcopy(CONVERSATIONS[conversation])
        for call in calls_of(messages):
            if text:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"]["arguments"] = arguments
        for message in messages:
            if other and not message["content"]:
                message["content"] = None if message["content"] == "" else ""
            if parts and message["content"] is not None:
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            made += render(
                [messages], tools or None, None, source, add_generation_prompt=True, **TOKENS
            )[0]
        except Exception:
            continue  # a template may raise anything
    return made


def calls_of(messages: list[dict[str, Any]]) -> list[Any]:
    return [call for message in messages for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("name", OWN)
def test_own_templates_give_the_same_prompts(process: TemplateProcess, name: str) -> None:
    for conversation in CONVERSATIONS:
        expected = theirs(OWN[name], conversation)
        prompt = ours(process, OWN[name], conversation)
        if (name, conversation) not in DIFFERENT:
            assert prompt in expected if expected else prompt is None, conversation


@pytest.mark.parametrize("name", ["plain", "alternates", "parts"])
def test_a_last_message_is_continued_as_theirs(process: TemplateProcess, name: str) -> None:
    messages = [USER, {"role": "assistant", "content": "It is \n"}]
    template = ChatTemplate(OWN[name], bos_text="<s>", eos_text="</s>", process=process)
    if name == "parts":
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    expected = utils().render_jinja_template(
        [deepcopy(messages)], None, None, OWN[name], continue_final_message=True, **TOKENS
    )[0][0]
    assert template.render(messages, continue_final_message=True) == expected


@pytest.mark.skipif(not FOLDER, reason="GGUFSPEC_CHAT_TEMPLATES names no folder of templates")
def test_templates_of_others_give_the_same_prompts(process: TemplateProcess) -> None:
    paths = sorted(Path(FOLDER or "").glob("*.jinja"))
    assert paths
    wrong = []
    for path, conversation in product(paths, CONVERSATIONS):
        source = path.read_text(encoding="utf-8")
        expected, prompt = theirs(source, conversation), ours(process, source, conversation)
        if expected and prompt not in expected and (path.stem, conversation) not in DIFFERENT:
            wrong.append((path.stem, conversation))
    assert not wrong
