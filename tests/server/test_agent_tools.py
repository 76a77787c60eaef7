"""The tools of agents are enforced; with `auto`, no schema makes a request fail.

data/agent_tools.json has parameters as aider 0.86.2, autogen-ext 0.7.5, crewai-tools 1.15.30,
langchain-community 0.4.2, openhands-tools 1.58.2, mistral-vibe 3.0.3 and smolagents 1.26.0 send
them, without descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from chat_formats import TEMPLATES
from server.dialects import CALL, DIALECTS, HELLO, INPUT, SCHEMA, TEMPLATE, TOOL
from server.formats.test_grammars import allows
from serving import Live, serving

import ggufspec
from ggufspec.engine.answer_syntax import syntax_of
from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.engine import Engine
from ggufspec.server.formats.grammar import GrammarMaker

AGENTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("data").joinpath("agent_tools.json").read_text(encoding="utf-8")
)


FAULTS = {"transcriber": "transcriber #/properties/audio: type"}  # there is no type "audio"


def tool(name: str, parameters: object, **more: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def tools_of(agent: str) -> list[Any]:
    return [tool(name, parameters) for name, parameters in AGENTS[agent].items()]


def value_of(schema: Mapping[str, Any], root: Mapping[str, Any], *, is_full: bool) -> Any:
    """A value that a schema of an agent allows; `is_full`: with all that may be left out."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return value_of(root["$defs"][name], root, is_full=is_full)
    if "anyOf" in schema:
        return value_of(schema["anyOf"][0 if is_full else -1], root, is_full=is_full)
    if "enum" in schema:
        return schema["enum"][-1]
    if schema.get("type") == "array":
        return [value_of(schema.get("items", {}), root, is_full=is_full)] * (1 + is_full)
    if schema.get("type") == "object":
        required = schema.get("required", ())
        properties = schema.get(
            "properties", {} if not is_full else {"any name": {"type": "string"}}
        )
        return {
            name: value_of(part, root, is_full=is_full)
            for name, part in properties.items()
            if is_full or name in required
        }
    if schema.get("format") == "uri":
        return "https://example.org/a?b=c"
    values = {"integer": schema.get("maximum", 100), "number": -1.5, "boolean": True, "null": None}
    return values.get(schema.get("type", "string"), "base" if "pattern" in schema else 'é "x"\n')


def maker_of(name: str) -> GrammarMaker:
    template = ChatTemplate(TEMPLATES[name], bos_text="", eos_text="")
    return GrammarMaker(syntax_of(template), {}, [])


@pytest.mark.parametrize("agent", AGENTS)
def test_a_call_of_each_tool_is_guaranteed_and_what_agents_expect_is_allowed(agent: str) -> None:
    maker = maker_of("hermes")
    strict = {*AGENTS[agent]} - FAULTS.keys()
    made = maker.grammar(tools_of(agent), None, is_required=True, strict=strict)
    assert maker.not_enforced == [FAULTS[name] for name in AGENTS[agent] if name in FAULTS]
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    for name, schema in AGENTS[agent].items():
        for is_full in (False, True):
            arguments = value_of(schema, schema, is_full=is_full)
            written = json.dumps(arguments, ensure_ascii=False)
            assert allows(made, call.format(name, written)), written
            for key in schema.get("required", ())[:1]:
                less = {k: value for k, value in arguments.items() if k != key}
                assert not allows(made, call.format(name, json.dumps(less)))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Random weights, and a template that shows the names of tools only: some are large."""
    path = tmp_path_factory.mktemp("models") / "named.gguf"
    template = TEMPLATE.replace("{{ tool | tojson }}", "{{ tool.function.name }}")
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=template, n_ctx_train=2048)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as running:
        yield running


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("api", DIALECTS)
def test_each_api_accepts_the_tools_of_agents(named: Live, agent: str, api: str) -> None:
    for more in ({}, {"reasoning_budget_tokens": 0}):
        body = DIALECTS[api].body(HELLO, tools=tools_of(agent), limit=2, **more)
        response = named.post(DIALECTS[api].path, **body)
        assert response.status_code == 200, response.text
        assert "x-ggufspec-not-enforced" not in response.headers


MANY = {f"property_{i}": {"enum": [f"{i:0200}"]} for i in range(1500)}
# What no grammar can guarantee, and what is wrong or too much.
HOPELESS: dict[str, tuple[object, str]] = {
    "pattern": ({"x": {"type": "string", "pattern": "("}}, "#/properties/x"),
    "type": ({"x": {"type": "text"}}, "#/properties/x"),
    "reference": ({"x": {"$ref": "#/$defs/no"}}, "#/"),
    "elsewhere": ({"x": {"$ref": "https://example.org/x.json"}}, "#/"),
    "no list": ({"x": {"enum": "a"}}, "#/properties/x"),
    "list": ([1], "#"),
    "bounds": ({"x": {"type": "array", "minItems": 5, "maxItems": 2}}, "#"),
    "large": (MANY, "bytes"),
}


def hopeless(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": HOPELESS[name][0], "required": ["x"]}
    return tool("bad", parameters, **more)


@pytest.mark.parametrize("name", HOPELESS)
def test_auto_accepts_any_schema_and_says_what_is_not_enforced(named: Live, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}
    for bad in (hopeless(name), hopeless(name, strict=True)):
        for more in ({"parallel_tool_calls": False}, {"response_format": form}):
            body = {**asked, **more, "tools": [TOOL, bad]}
            response = named.post("/v1/chat/completions", **body)
            assert response.status_code == 200, response.text
            header = response.headers["x-ggufspec-not-enforced"]
            assert header.startswith("bad ")
            assert HOPELESS[name][1] in header
    free = named.post("/v1/chat/completions", **asked, tools=[TOOL, hopeless(name)])
    assert free.status_code == 200
    strict = hopeless(name, strict=True)
    refused = named.post("/v1/chat/completions", **asked, tools=[strict], tool_choice="required")
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith("the schema of the tool 'bad': ")
    assert HOPELESS[name][1] in message


def test_calls_that_no_schema_restricts_are_read_all_the_same(
    chat_pair: Engine, tmp_path: Path
) -> None:
    properties = {"city": {"type": "string", "pattern": "("}, "days": {"type": "days"}}
    bad = tool("weather", {"type": "object", "properties": properties})
    script = [*tiny.BPE.spell(f"I say\n{CALL}\n{CALL}"), tiny.BPE.id_of("<|im_end|>")]
    how: Any = {"vocab": tiny.BPE, "chat_template": TEMPLATE, "n_ctx_train": 1024}
    n_prompt = len(chat_pair.render(HELLO, TEMPLATE, tools=[bad]))
    path = tiny.write_timed(tmp_path / "caller.gguf", script, n_prompt=n_prompt, **how)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        for is_parallel in (False, True):
            said = DIALECTS["chat"].ask(live, tools=[bad], parallel_tool_calls=is_parallel)
            assert said.calls == [("weather", INPUT)] * (1 + is_parallel)


@pytest.mark.parametrize("name", ["hermes", "tagged", "gemma"])
def test_a_tool_that_is_not_enforced_takes_any_values(name: str) -> None:
    large = {"enum": [f"{i:0200}" for i in range(700)]}
    parameters = {"type": "object", "properties": {"x": large, "y": large}, "required": ["x"]}
    calls = {
        "hermes": '<tool_call>\n{"name": "bad", "arguments": {"y": [1], "z": null}}\n</tool_call>',
        "tagged": "<tool_call>\n<function=bad>\n<parameter=y>\n[1]\n</parameter>\n</function>\n"
        "</tool_call>",
        "gemma": "<|call>call:bad{y:[1]}<call|>",
    }
    maker = maker_of(name)
    made = maker.grammar([TOOL, tool("bad", parameters)], None, is_parallel=False)
    assert len(maker.not_enforced) == 1
    assert maker.not_enforced[0].startswith("bad the JSON schema of a tool has ")
    assert allows(made, calls[name])
    assert not allows(made, calls[name].replace("bad", "weather"))


def test_more_tools_than_a_grammar_can_hold_are_not_enforced_with_auto(named: Live) -> None:
    texts = [[f"{n:06}{'.' * 100}" for n in range(100 * i, 100 * i + 100)] for i in range(60)]
    tools = [
        tool(f"f{i}", {"type": "object", "properties": {"x": {"enum": each}}, "required": ["x"]})
        for i, each in enumerate(texts)
    ]
    asked: dict[str, Any] = {"messages": HELLO, "tools": tools, "max_tokens": 2}
    response = named.post("/v1/chat/completions", **asked, parallel_tool_calls=False)
    assert response.status_code == 200, response.text
    assert response.headers["x-ggufspec-not-enforced"].startswith("all tools: the grammar has ")
    refused = named.post("/v1/chat/completions", **asked, tool_choice="required")
    assert refused.status_code == 400
