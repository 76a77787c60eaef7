"""Chat with real models: templates, roles, tools, the ends of turns, and the server."""

from __future__ import annotations

import itertools
import json
from typing import Any

import llama_cpp
import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from real_models import FILES, Load, MakeLlama, PathOf
from serving import serving

from ggufspec.engine.engine import Engine

# Of Gemma 3 Instruct: the system message becomes part of the first turn. The file has none.
GEMMA = (
    "{{ bos_token }}{% set prefix = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}"
    "{% set prefix = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ prefix if loop.first }}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
USER = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TURNS = [
    {"role": "system", "content": "You are a librarian. Be brief."},
    {"role": "user", "content": "Grüße! Is “1984” <here>?"},
    {"role": "assistant", "content": "Yes, on shelf 7 & 8."},
    {"role": "user", "content": "And 東京物語? 🎬"},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather in <°C> & words", "parameters": CITY}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
CALL: Any = {
    "id": "1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
}
CALLED: list[Any] = [
    {"role": "user", "content": "How is the weather in Zürich?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": '{"sky": "rain", "degrees": 11}'},
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(FILES, ("user", "turns")), ("qwen", "called"), ("qwen-draft", "called")],
)
def test_conversations_are_rendered_as_by_llama_cpp_python(
    load: Load, path_of: PathOf, name: str, kind: str
) -> None:
    engine = load(name)
    template = GEMMA if name == "gemma" else engine.pair.target.model.chat_template
    assert template is not None
    messages = {"user": USER, "turns": TURNS, "called": CALLED}[kind]
    tools = TOOLS if kind == "called" else []
    tokens = engine.render(messages, GEMMA if name == "gemma" else None, tools=tools)
    bos, eos = map(engine.vocab.name, (engine.vocab.bos, engine.vocab.eos))
    formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
    text = formatter(messages=messages, tools=tools or None).prompt
    judge = llama_cpp.Llama(str(path_of(name)), vocab_only=True, verbose=False)
    assert tokens == judge.tokenize(text.encode(), add_bos=False, special=True)
    judge.close()
    shown = b"".join(map(engine.vocab.shown, tokens)).decode()
    assert shown == text
    assert all(turn["content"] in shown for turn in messages if turn["content"])
    assert shown.count("<bos>") == (name == "gemma")
    assert ('"city": "Zürich"' in shown) == (kind == "called")


def test_an_answer_is_that_of_llama_cpp_python(load: Load, llama: MakeLlama) -> None:
    engine = load("smollm", flash_attention="off")
    for messages in (USER, TURNS):
        wanted = llama(engine).create_chat_completion(messages, temperature=0, max_tokens=32)
        done = engine.chat(messages, temperature=0, drafter="none", max_tokens=32)
        assert done.text == wanted["choices"][0]["message"]["content"]
        assert done.finish_reason == wanted["choices"][0]["finish_reason"]


def test_the_end_of_a_turn_ends_the_text(load: Load) -> None:
    engine = load("gemma", "gemma")
    prompt = engine.render(TURNS, GEMMA)
    _, end = engine.tokenize("<end_of_turn>")
    assert prompt.count(end) == 3
    forced = {end: 200.0}
    for drafter in ("none", "model"):
        done = engine.generate(prompt, logit_bias=forced, drafter=drafter, max_tokens=8)
        assert (done.text, done.tokens, done.finish_reason) == ("", (), "stop")
        options: Any = {"logit_bias": forced, "ignore_eos": True, "max_tokens": 8}
        done = engine.generate(prompt, drafter=drafter, **options)
        assert (len(done.tokens), done.finish_reason) == (8, "length")


# The server


@pytest.fixture
def pair(load: Load) -> Engine:
    return load("qwen", "qwen-draft", n_ctx=512)


def test_the_server_answers_whole_and_in_a_stream(pair: Engine) -> None:
    import openai

    asked: dict[str, Any] = {"model": "x", "messages": USER, "temperature": 0, "max_tokens": 16}
    defaults = {"n_draft": 3}
    with (
        serving(pair, defaults=defaults) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", timeout=300) as client,
    ):
        whole = client.chat.completions.create(**asked)
        chunks = [*client.chat.completions.create(**asked, stream=True)]
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    assert choice.message.content.strip(".") == "Paris"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (
        choice.message.content
    )
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(pair.render(USER))


def test_the_server_passes_tools_and_their_results_on(pair: Engine) -> None:
    import openai

    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    prompt = pair.render(CALLED, tools=TOOLS)
    wanted = pair.generate(prompt, n_draft=3, **options).text
    pair.forget()
    function = {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}
    called = {**CALLED[1], "tool_calls": [{**CALL, "function": function}]}
    messages: Any = [CALLED[0], called, CALLED[2]]
    with (
        serving(pair, defaults={"n_draft": 3}) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", timeout=300) as client,
    ):
        done = client.chat.completions.create(model="x", messages=messages, tools=TOOLS, **options)
    assert done.choices[0].message.content == wanted
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(prompt)
