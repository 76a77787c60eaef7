"""Chat templates are rendered as by transformers, with limits, in a process of their own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from patience import child_seconds

from ggufspec.engine.chat_template import (
    ChatTemplate,
    TemplateProcess,
    check_template,
    conversation,
)
from ggufspec.engine.template_probe import Message
from ggufspec.errors import OptionError, PromptError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI: list[Message] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def render(process: TemplateProcess) -> Any:
    def run(source: str, messages: Sequence[Message] = HI, **options: Any) -> str:
        template = ChatTemplate(source, bos_text="<s>", eos_text="</s>", process=process)
        return template.render(messages, **options)

    return run


def test_a_template_is_rendered_up_to_the_answer(render: Any) -> None:
    assert render(CHATML, conversation(["Hi <b>"], "Be brief.")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


# What a template may use, and its text: those of transformers are equal.
FEATURES = {
    "{{ bos_token }}{{ {'a': 'é<', 'b': [1]} | tojson }}": '<s>{"a": "é<", "b": [1]}',
    "{{ {'b': 1, 'a': 'é'} | tojson(separators=(',', ':'), ensure_ascii=True) }}": (
        '{"b":1,"a":"\\u00e9"}'
    ),
    "{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}": '{\n  "a": 2,\n  "b": 1\n}',
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}"
    "{% endif %}{{ i }}{% endfor %}": "023",
    "{% set x = 1 %}{%- generation -%} {% set x = 2 %}{{ x }} {%- endgeneration %}{{ x }}": "21",
    "{% for m in messages %}\n  {% generation %}\n{{ m.content }}\n{% endgeneration %}\n"
    "{% endfor %}": "hi\n",
    "{{ strftime_now('%%') }}{{ documents is none }}{{ tools is none }}": "%TrueTrue",
    "{% set ns = namespace(self=1) %}{% set ns.a = dict(b=2).b %}{{ ns.a }}{{ ns.self }}": "21",
    "{{ messages[0].missing }}{{ missing is defined }}{{ ' a'|trim }}": "Falsea",
    "{{ messages | map(attribute='role') | join(',') }}\n": "user",
}


@pytest.mark.parametrize("source", FEATURES)
def test_templates_have_what_transformers_gives_them(render: Any, source: str) -> None:
    assert render(source) == FEATURES[source]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__html__ = 1 %}",
        "{{ raise_exception('\x1b[31m\nin red') }}",
    ],
)
def test_a_template_that_fails_says_so_in_a_line(render: Any, source: str) -> None:
    with pytest.raises(PromptError, match="chat template") as caught:
        render(source)
    assert str(caught.value).isprintable()


def test_variables_and_special_tokens_reach_the_template(process: TemplateProcess) -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ pad_token }}{{ enable_thinking }}{{ documents[0] }}",
        bos_text="<s>",
        eos_text="",
        variables={"pad_token": "<pad>"},
        process=process,
    )
    variables = {"enable_thinking": False, "documents": ["d"], "messages": []}
    assert template.render(HI, variables=variables) == "<s><pad>Falsed"
    with pytest.raises(PromptError, match="not JSON"):
        template.render(HI, variables={"x": object()})


def peak_memory() -> int:
    resource = pytest.importorskip("resource")
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


# Each of them stalled or ended the process that generates.
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nests": "{{" + "(" * 5000 + ")" * 5000 + "}}",
    "allocates": "{{ 'a' * 10**10 }}",
    "doubles a list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "writes much": "{{ 'a' * 3000000 }}",
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[TemplateProcess]:
    made = TemplateProcess(seconds=0.5)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(impatient: TemplateProcess, name: str) -> None:
    process, n_before, began = impatient, peak_memory(), child_seconds()
    with pytest.raises(PromptError, match="chat template") as caught:
        ChatTemplate(HOSTILE[name], bos_text="", eos_text="", process=process).render(HI)
    assert child_seconds() - began < 2
    assert peak_memory() - n_before < 32 * 2**20
    assert "Errno" not in str(caught.value)
    assert len(str(caught.value)) < 200
    assert ChatTemplate("fine", bos_text="", eos_text="", process=process).render(HI) == "fine"


def test_a_message_that_cannot_be_continued_says_so(render: Any) -> None:
    last: list[Message] = [*HI, {"role": "assistant", "content": "I"}]
    assert render(CHATML, last, continue_final_message=True).endswith("assistant\nI")
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    only_call = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    writes_calls = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    for source, messages in ((writes_calls, only_call), ("{{ messages[0].content }}", last)):
        with pytest.raises(PromptError, match="last message cannot be continued"):
            render(source, messages, continue_final_message=True)


def test_threads_share_a_process(process: TemplateProcess) -> None:
    template = ChatTemplate(CHATML, bos_text="", eos_text="", process=process)
    wrong: list[str] = []

    def work(name: str) -> None:
        for i in range(50):
            text = template.render([{"role": "user", "content": f"{name}{i}"}])
            if f"{name}{i}<" not in text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_process_ends_with_its_owner_and_starts_again() -> None:
    process = TemplateProcess()
    template = ChatTemplate(CHATML, bos_text="", eos_text="", process=process)
    text = template.render(HI)
    process.close()
    process.close()
    assert template.render(HI) == text
    process.close()


def test_a_template_is_checked_before_it_is_used() -> None:
    check_template(CHATML)
    with pytest.raises(OptionError, match=r"not valid: Expected .*line 1"):
        check_template("{% for %}")
    with pytest.raises(OptionError, match="empty"):
        check_template("")
