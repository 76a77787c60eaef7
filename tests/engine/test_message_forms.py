"""Messages and tools reach a template in the form that it expects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ggufspec.engine.chat_template import ChatTemplate, TemplateProcess
from ggufspec.engine.template_probe import Message
from ggufspec.errors import PromptError

USER = {"role": "user", "content": "hi"}
EACH = "{% for m in messages %}[{{ m.role }}:"
END = "]{% endfor %}"


def each_call(body: str) -> str:
    return "{% for c in m.tool_calls or [] %}(" + body + "){% endfor %}"


@pytest.fixture
def render(process: TemplateProcess) -> Any:
    def run(
        body: str, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
    ) -> str:
        template = ChatTemplate(EACH + body + END, bos_text="", eos_text="", process=process)
        return template.render(messages, tools=tools)

    return run


def said(content: object = None, **more: object) -> Message:
    return {"role": "assistant", "content": content, **more}


def calls(*ids: str, arguments: object = '{"a": "é"}') -> list[dict[str, object]]:
    return [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for each in ids
    ]


def result(of: str, content: object = "r") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": of}


def test_parts_are_joined_unless_the_template_takes_them(render: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, said("c")]
    listed = "{% for p in m.content %}{{ p.text }};{% endfor %}"
    either = "{% if m.content is string %}{{ m.content }}{% else %}" + listed + "{% endif %}"
    first = (
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    )
    assert render("{{ m.content }}", messages) == "[user:a\nb][assistant:c]"
    assert render("{{ m.content | tojson }}", messages) == '[user:"a\\nb"][assistant:"c"]'
    assert render(listed, messages) == "[user:a;b;][assistant:c;]"
    assert render(either, messages) == "[user:a;b;][assistant:c]"
    assert render(first, messages) == "[user:a\nb][assistant:c]"
    with pytest.raises(PromptError, match="message 0 needs a text 'content'"):
        render("", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_a_developer_is_the_system_where_the_template_has_none(render: Any) -> None:
    messages = [{"role": "developer", "content": "be brief"}, USER]
    assert render("{{ m.content }}", messages) == "[system:be brief][user:hi]"
    known = "{% if m.role == 'developer' %}D{% endif %}{{ m.content }}"
    assert render(known, messages) == "[developer:Dbe brief][user:hi]"
    left_out = "{% if m.role != 'developer' %}{{ m.content }}{% endif %}"
    assert render(left_out, messages) == "[system:be brief][user:hi]"


def test_arguments_are_objects_or_json(render: Any) -> None:
    for arguments in ('{"a": "é"}', {"a": "é"}):
        messages = [USER, said("", tool_calls=calls("1", arguments=arguments)), result("1")]
        as_json = render(each_call("{{ c.function.arguments | tojson }}"), messages)
        as_text = render(each_call("{{ c.function.arguments }}"), messages)
        joined = render(each_call("{{ '' + c.function.arguments }}"), messages)
        items = render(each_call("{{ (c.function.arguments | items | list)[0][1] }}"), messages)
        assert as_json == as_text == joined == '[user:][assistant:({"a": "é"})][tool:]'
        assert items == "[user:][assistant:(é)][tool:]"
    compact = [USER, said("", tool_calls=calls("1", arguments='{"a":1}')), result("1")]
    text = render(each_call("{{ '' + c.function.arguments }}"), compact)
    assert text == '[user:][assistant:({"a":1})][tool:]'
    empty = [USER, said("", tool_calls=calls("1", arguments="")), result("1")]
    assert "({})" in render(each_call("{{ c.function.arguments | tojson }}"), empty)
    wrong = [USER, said("", tool_calls=calls("1", arguments='{"a": ')), result("1")]
    with pytest.raises(PromptError, match="needs a list of calls"):
        render("", [USER, said("", tool_calls=["f"])])
    with pytest.raises(PromptError, match="not valid JSON"):
        render(each_call("{{ c.function.arguments | tojson }}"), wrong)


WRITES_CALLS = each_call("{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}")


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_an_empty_content_is_what_the_template_allows(render: Any, content: str | None) -> None:
    message = said(content, tool_calls=calls("1", arguments={}))
    if content == "absent":
        message = {key: value for key, value in message.items() if key != "content"}
    messages = [USER, message]
    assert render("{{ m.content }}" + WRITES_CALLS, messages) == "[user:hi][assistant:(1f{})]"
    only_null = "{% if m.content is none %}" + WRITES_CALLS + "{% else %}{{ m.content }}{% endif %}"
    assert render(only_null, messages) == "[user:hi][assistant:(1f{})]"
    assert render("{{ m.content }}", [USER, said(None)]) == "[user:hi][assistant:]"


def test_calls_are_kept_where_a_template_writes_text_or_calls(render: Any) -> None:
    either = "{% if m.content is none %}" + WRITES_CALLS + "{% else %}{{ m.content }}{% endif %}"
    messages = [USER, said("I look", tool_calls=calls("1", arguments={}))]
    assert render(either, messages) == "[user:hi][assistant:(1f{})]"
    assert render("{{ m.content }}" + WRITES_CALLS, messages) == "[user:hi][assistant:I look(1f{})]"


def test_reasoning_has_the_names_that_templates_use(render: Any) -> None:
    body = "{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert render(body, [USER, said("a", **{name: "b"})]) == "[user:||hi][assistant:b|b|a]"
    one = (
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('one') }}{% endif %}"
        + body
        + WRITES_CALLS
    )
    message = said("a", thinking="b", tool_calls=calls("1", arguments={}))
    assert render(one, [USER, message]) == "[user:||hi][assistant:b\n\na|b\n\na|(1f{})]"


def test_a_template_for_single_calls_gets_a_message_for_each(render: Any) -> None:
    messages = [
        USER,
        said("I look", tool_calls=calls("1", "2", arguments={})),
        result("2", "second"),
        result("1", "first"),
        said("done"),
    ]
    refuses = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    body = "{{ m.content }}" + WRITES_CALLS
    split = "[user:hi][assistant:I look(1f{})][tool:first][assistant:(2f{})][tool:second]"
    split += "[assistant:done]"
    assert render(refuses + "{% endif %}" + body, messages) == split
    body = "{{ m.content }}" + WRITES_CALLS.replace("or []", "and m.tool_calls[:1]")
    assert render(body, messages) == split
    body = "{{ m.content }}" + WRITES_CALLS
    assert "[assistant:I look(1f{})(2f{})][tool:second]" in render(body, messages)


NINE = (
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}{{ c.id }}{{ c.function.arguments | tojson }}{{ c.function.name }}{% endfor %}"
)


def test_ids_that_a_template_refuses_are_shortened(render: Any) -> None:
    body = NINE
    text = render(
        body + "{{ m.tool_call_id }}",
        [
            USER,
            said("", tool_calls=calls("call_0123456789", arguments={})),
            result("call_0123456789"),
        ],
    )
    written = text.removeprefix("[user:][assistant:")[:9]
    assert written.isalnum()
    assert text == f"[user:][assistant:{written}{{}}f][tool:{written}]"
    kept = [USER, said("", tool_calls=calls("abcdefghi", arguments={})), result("abcdefghi")]
    assert render(body, kept) == "[user:][assistant:abcdefghi{}f][tool:]"
    free = render(
        "{{ m.tool_call_id }}" + WRITES_CALLS, [USER, said("", tool_calls=calls("x")), result("x")]
    )
    assert free == '[user:][assistant:(xf{"a": "é"})][tool:x]'


def called(*names: str, **ids: object) -> Message:
    """Calls of these functions without ids, but for those in `ids`."""
    made = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    for name in ids:
        made[names.index(name)]["id"] = ids[name]
    return said(None, tool_calls=made)


def answered(content: str, **more: object) -> Message:
    return {"role": "tool", "content": content, **more}


@pytest.mark.parametrize(
    ("messages", "ids"),
    [
        ([called("f"), answered("1")], "00"),
        ([called("f", f=None), answered("1", tool_call_id=None)], "00"),
        ([called("f", f=""), answered("1", tool_call_id="")], "00"),
        ([called("f", "g"), answered("1"), answered("2")], "0101"),
        ([called("f", "g"), answered("2", name="g"), answered("1", name="f")], "0110"),
        ([called("f"), answered("1"), said("a"), USER, called("f"), answered("2")], "0011"),
        ([called("f"), answered("2", tool_call_id="x")], "00"),
    ],
)
def test_calls_without_ids_get_some_and_their_results_the_same(
    render: Any, messages: list[Message], ids: str
) -> None:
    tool = "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('9') }}"
    body = "{{ m.tool_call_id }}" + NINE + tool + "{% endif %}"
    assert "".join(re.findall("call0000([0-9])", render(body, [USER, *messages]))) == ids
    free = render("{{ m.tool_call_id }}" + WRITES_CALLS, [USER, *messages])
    assert "".join(re.findall("call0000([0-9])", free)) == ids


def test_an_id_has_the_name_where_the_template_writes_no_other(render: Any) -> None:
    body = "{{ m.tool_call_id }}" + each_call("{{ c.id }}{{ c.function.arguments | tojson }}")
    own = {"g": "functions.g:7"}
    for id in ({}, {"f": "call_1"}, {"f": None}):
        ids = {"tool_call_id": id["f"]} if "f" in id else {}
        messages = [USER, called("f", "g", **id, **own), answered("1", **ids)]
        wanted = "[user:][assistant:(functions.f:0{})(functions.g:7{})][tool:functions.f:0]"
        assert render(body, messages) == wanted


def test_tools_are_completed_where_the_template_needs_it(render: Any) -> None:
    bare = {"type": "function", "function": {"name": "f"}}
    assert json.loads(render("{{ tools[0] | tojson }}", [USER], [bare])[6:-1]) == bare
    body = "{{ tools[0].function.name }}{{ tools[0].function.parameters.properties | tojson }}"
    assert render(body, [USER], [bare]) == "[user:f{}]"
    with pytest.raises(PromptError, match="a tool is of type str"):
        render(body, [USER], ["f"])


def test_the_template_for_tools_is_used_with_tools(process: TemplateProcess) -> None:
    template = ChatTemplate(
        "plain", bos_text="", eos_text="", source_for_tools="tools", process=process
    )
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"type": "function"}]) == "tools"
