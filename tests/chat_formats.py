"""Templates of a few lines, one for each way in which models write calls, and their parsing."""

from __future__ import annotations

from typing import Any, NamedTuple

from ggufspec.server.formats.deltas import CallDelta, ChatParser

_WHOLE = (
    "{{% if tools %}}<tools>{{{{ tools | tojson }}}}</tools>{{% endif %}}"
    "{{% for m in messages %}}<|turn|>{{{{ m.role }}}}\n"
    "{{% if m.reasoning_content %}}<think>\n{{{{ m.reasoning_content }}}}\n</think>\n\n"
    "{{% endif %}}"
    "{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}<|end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|turn|>assistant\n{{% endif %}}"
)
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_COMMA = "{{ ', ' if not loop.last }}{% endfor %}"
_JSON = "{{ f.arguments | tojson }}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": ' + _JSON
_TEXT = "{{ v if v is string else v | tojson }}"


def _arguments(text: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + text + "{% endfor %}"


CALLS = {
    "hermes": f"{_EACH}\n<tool_call>\n{_OBJECT}}}\n</tool_call>{{% endfor %}}",
    "list": f"<calls>[{_EACH}{_OBJECT}}}{_COMMA}]</calls>",
    "id_last": f'[TOOL_CALLS][{_EACH}{_OBJECT}, "id": "{{{{ c.id }}}}"}}{_COMMA}]',
    "bare": f'{_EACH}{{"name": "{{{{ f.name }}}}", "parameters": {_JSON}}}{{% endfor %}}',
    "keyed": f'<|calls|>[{_EACH}{{"{{{{ f.name }}}}": {_JSON}}}{_COMMA}]<|calls_end|>',
    "marks": f"{_EACH}[CALL]{{{{ f.name }}}}[ID]{{{{ c.id }}}}[ARGS]{_JSON}{{% endfor %}}",
    "numbered": (
        f"<|calls|>{_EACH}<|call|>functions.{{{{ f.name }}}}:{{{{ loop.index0 }}}}<|args|>{_JSON}"
        "<|call_end|>{% endfor %}<|calls_end|>"
    ),
    "fenced": (
        f"<|calls|>{_EACH}<|call|>function<|sep|>{{{{ f.name }}}}\n```json\n{_JSON}\n```"
        "<|call_end|>{% endfor %}<|calls_end|>"
    ),
    "function": f"{_EACH}<function={{{{ f.name }}}}>{_JSON}</function>{{% endfor %}}",
    "tagged": (
        f"{_EACH}\n<tool_call>\n<function={{{{ f.name }}}}>\n"
        + _arguments(f"<parameter={{{{ k }}}}>\n{_TEXT}\n</parameter>\n")
        + "</function>\n</tool_call>{% endfor %}"
    ),
    "keys": (
        f"{_EACH}\n<tool_call>{{{{ f.name }}}}\n"
        + _arguments(f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_TEXT}</arg_value>\n")
        + "</tool_call>{% endfor %}"
    ),
    "typed": (
        f'\n\n<calls>\n{_EACH}<invoke name="{{{{ f.name }}}}">\n'
        + _arguments(
            '<parameter name="{{ k }}" string="{{ (v is string) | tojson }}">'
            f"{_TEXT}</parameter>\n"
        )
        + "</invoke>\n{% endfor %}</calls>"
    ),
    "key_tags": (
        f']<]x[>[<calls>\n{_EACH}]<]x[>[<invoke name="{{{{ f.name }}}}">'
        + _arguments(f"]<]x[>[<{{{{ k }}}}>{_TEXT}]<]x[>[</{{{{ k }}}}>")
        + "]<]x[>[</invoke>\n{% endfor %}]<]x[>[</calls>"
    ),
    "python": (
        f"<|calls|>[{_EACH}{{{{ f.name }}}}("
        "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
        f"{{% endfor %}}){_COMMA}]<|calls_end|>"
    ),
    "gemma": (
        f"{_EACH}<|call>call:{{{{ f.name + '{{' }}}}"
        "{% for k, v in f.arguments.items() %}{{ k }}:"
        """{% if v is string %}<|"|>{{ v }}<|"|>{% else %}"""
        "{{ v | tojson | replace(', ', ',') }}{% endif %}"
        "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<call|>{% endfor %}"
    ),
}
TEMPLATES = {name: _WHOLE.format(calls=calls) for name, calls in CALLS.items()}

HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

USER: dict[str, Any] = {"role": "user", "content": "hello"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": parameters},
    }


class Parsed(NamedTuple):
    """All that a parser found."""

    content: str
    reasoning: str
    calls: list[tuple[str | None, str]]  # name and arguments
    ids: list[str | None]


def parsed(parser: ChatParser, text: str, size: int) -> Parsed:
    """What a parser makes of a text that comes in pieces."""
    deltas = [delta for i in range(0, len(text), size) for delta in parser.push(text[i : i + size])]
    deltas += parser.finish()
    calls: list[list[str]] = []
    ids: list[str | None] = []
    names: list[str | None] = []
    texts = {"text": "", "reasoning": ""}
    for delta in deltas:
        if not isinstance(delta, CallDelta):
            texts[delta.kind] += delta.text
        else:
            if delta.call_index == len(calls):
                calls.append([])
                ids.append(delta.id)
                names.append(delta.name)
            else:
                assert delta.name is None
            calls[delta.call_index].append(delta.text)
    return Parsed(
        texts["text"],
        texts["reasoning"],
        list(zip(names, ("".join(call) for call in calls), strict=True)),
        ids,
    )
