"""Calls in llama.cpp's templates come back; GGUFSPEC_CHAT_TEMPLATES names the folder of these."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_formats import USER, parsed, tool

from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.reasoning import begun_answer
from ggufspec.server.formats.chat_format import ChatFormat

FOLDER = Path(os.environ.get("GGUFSPEC_CHAT_TEMPLATES", "/nonexistent"))
PATHS = sorted(FOLDER.glob("*.jinja"))
TOOLS = [
    tool(
        "weather",
        a={"type": "string", "description": "x"},
        b={"type": "integer", "description": "x"},
        c={"type": "array", "items": {"type": "string"}, "description": "x"},
        d={"type": "boolean", "description": "x"},
        e={"type": "object", "additionalProperties": {"type": "string"}, "description": "x"},
    ),
    tool(
        "add_2",
        a={"type": "string", "description": "x"},
        b={"type": "integer", "description": "x"},
    ),
]
ARGUMENTS: list[dict[str, Any]] = [
    {"a": 'a "b" & <b>: é', "b": 42, "c": ["x y", "z"], "d": True, "e": {"k": [1, 2.5], "l": "v"}},
    {"a": "q", "b": 7},
]
# They show no tools to the model.
WITHOUT_TOOLS = {
    *("google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct", "llama-cpp-rwkv-world"),
    "HuggingFaceTB-SmolLM3-3B",  # has a variable of its own for them
    "fireworks-ai-llama-3-firefunction-v2",  # needs variables of its own
}
# They do not write the calls of earlier messages; the form of these is known.
SILENT = {"LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"}
# It writes content before a call as a reasoning that does not end.
WITHOUT_CONTENT = {"NVIDIA-Nemotron-Nano-v2"}


@pytest.mark.skipif(not PATHS, reason="GGUFSPEC_CHAT_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_calls_and_reasoning_come_back(
    path: Path,
    template: Callable[[str], ChatTemplate],
    chat_format: Callable[[str], ChatFormat],
) -> None:
    source = path.read_text(encoding="utf-8")
    found, used = chat_format(source), template(source)
    assert found.tools == (path.stem not in WITHOUT_TOOLS)
    if not found.tools or path.stem in SILENT:
        return
    assert found.syntax.call is not None
    is_numbered = found.syntax.call.opener.endswith("functions.")
    ids = (
        ("functions.weather:0", "functions.add_2:1") if is_numbered else ("abcdefgh1", "abcdefgh2")
    )
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in zip(ids, ("weather", "add_2"), ARGUMENTS, strict=True)
    ]
    for n_calls in (1, 2):
        for content, reasoning in (("", ""), ("Some text.", ""), ("", "I think")):
            if content and path.stem in WITHOUT_CONTENT:
                continue
            answer: dict[str, Any] = {"role": "assistant", "content": content}
            answer["tool_calls"] = calls[:n_calls]
            if reasoning:
                answer["reasoning_content"] = reasoning
            text = used.render([USER, answer], tools=TOOLS, add_generation_prompt=False)
            begun = begun_answer(found.syntax, used.render([USER], tools=TOOLS))
            text = text.rpartition(USER["content"])[2].partition(found.syntax.header)[2]
            begin = found.syntax.reasoning[0] if found.syntax.reasoning else ""
            if begin in text or not reasoning or reasoning not in text:
                begun = ""  # else only the prompt writes the begin
            for size in (1, 3, 7, len(text)):
                made = parsed(found.parser(begun, TOOLS), text, size)
                assert [(name, json.loads(text)) for name, text in made.calls] == list(
                    zip(("weather", "add_2"), ARGUMENTS, strict=True)
                )[:n_calls]
                if reasoning and reasoning in text:
                    assert made.reasoning == reasoning
                elif content and content in text and not made.reasoning:
                    assert content in made.content
                if ids[0] in text:
                    assert made.ids == list(ids[:n_calls])
