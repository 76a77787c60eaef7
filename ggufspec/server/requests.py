"""What clients ask -> what the worker is asked. Knows the engine's options; no HTTP, no queue.

Everything that can be wrong with a request is found here, before it waits for its turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.errors import OptionError, PromptError
from ggufspec.server.errors import Problem
from ggufspec.server.schema import (
    N_PROMPTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    PredictRequest,
    ResponseFormat,
)
from ggufspec.server.tools import OPENING, can_call
from ggufspec.server.worker import Task
from ggufspec.structured.json_schema import gbnf_of_schema

Generation = CompletionRequest | ChatRequest | PredictRequest

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and what it gets where it does not say."""

    max_tokens: int | None
    defaults: GenerateOptions


def completion_task(asked: CompletionRequest, engine: Engine, limits: Limits) -> Task:
    """Raises PromptError, OptionError, Problem."""
    prompts = _prompts_of(asked.prompt)
    return _task(asked, [engine.tokenize(each) for each in prompts], limits, asked.logprobs)


def predict_task(asked: PredictRequest, engine: Engine, limits: Limits) -> Task:
    """Raises PromptError, OptionError, Problem."""
    return _task(asked, [engine.tokenize(asked.prompt)], limits, None)


def chat_task(asked: ChatRequest, engine: Engine, limits: Limits) -> Task:
    """Raises PromptError, OptionError, Problem."""
    template = engine.target.model.chat_template
    if template is None:
        raise PromptError(
            "this model has no chat template: it was not made for chat; use /v1/completions"
        )
    tools = [] if asked.tool_choice == "none" else asked.tools or []
    if tools and not can_call(template):
        raise PromptError(
            "the chat template of this model takes no tools, or has calls written in a form that "
            f"is not read here (that with {OPENING} is); leave `tools` out"
        )
    if tools and asked.response_format and asked.response_format.type != "text":
        raise OptionError("tools and a response_format exclude each other; leave one of them out")
    prompt = engine.render(
        [_message_of(message) for message in asked.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
    )
    n_top = (asked.top_logprobs or 0) if asked.logprobs else None
    if asked.top_logprobs and not asked.logprobs:
        raise OptionError("top_logprobs needs logprobs to be true")
    return _task(asked, [engine.tokenize(prompt)], limits, n_top)


def refuse(body: Mapping[str, Any], refused: Mapping[str, tuple[object, ...]]) -> None:
    """Raise Problem for a field that would change the answer, and cannot be had."""
    for name, harmless in refused.items():
        if name in body and body[name] not in harmless:
            raise Problem(400, f"{name!r} is not supported here; leave it out", param=name)


def _task(asked: Generation, prompts: list[list[int]], limits: Limits, n_top: int | None) -> Task:
    options: dict[str, Any] = dict(limits.defaults)
    for name in (*_SAMPLING, *_PENALTIES):
        if getattr(asked, name) is not None:
            options[name] = getattr(asked, name)
    if any(options.get(name) for name in _PENALTIES):
        options["repeat_last_n"] = -1  # OpenAI's look at all of the text
    if asked.logit_bias:
        options["logit_bias"] = {int(token): bias for token, bias in asked.logit_bias.items()}
    if asked.stop is not None:
        options["stop"] = asked.stop
    if asked.response_format is not None:
        schema = _schema_of(asked.response_format)
        if schema is not None:
            gbnf_of_schema(schema)
            options["json_schema"] = schema
    if not asked.speculative:
        options["drafter"] = "none"
    wanted = asked.max_tokens
    if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
        wanted = asked.max_completion_tokens
    known = [n for n in (wanted, limits.max_tokens) if n is not None]
    options["max_tokens"] = min(known) if known else None
    checked = CheckedOptions.of(cast("GenerateOptions", options))
    return Task(prompts, checked, asked.n or 1, asked.seed, n_top)


def _prompts_of(prompt: str | Sequence[Any]) -> Sequence[str | Sequence[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [cast("str | Sequence[int]", prompt)]
    if len(prompt) > N_PROMPTS:
        raise OptionError(f"there are {len(prompt)} prompts; give at most {N_PROMPTS}")
    return prompt


def _schema_of(wanted: ResponseFormat) -> Mapping[str, object] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise OptionError("response_format json_schema needs json_schema: {schema: {...}}")
    return wanted.json_schema.schema_


def _message_of(message: ChatMessage) -> dict[str, Any]:
    """As templates know messages: the developer is the system, arguments are no text."""
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments_of(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return made


def _arguments_of(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError("the arguments of a tool call are not JSON; send them as such") from error
