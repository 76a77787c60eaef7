"""Turns request bodies into what the worker runs: token ids and checked options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.errors import OptionError, PromptError
from ggufspec.server.options import ServerOptions
from ggufspec.server.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    PredictRequest,
    ResponseFormat,
    Tool,
)
from ggufspec.server.tool_calls import OPENING
from ggufspec.server.worker import ParsedRequest

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty")


def parse_request(
    body: CompletionRequest | ChatRequest | PredictRequest, engine: Engine, server: ServerOptions
) -> ParsedRequest:
    """Raises PromptError, OptionError."""
    options = _options_of(body, engine, server)
    # An error of the constraint is the request's, not that of the thread which runs all texts.
    engine.check(options)
    n, n_top, has_tools = body.n or 1, None, False
    if isinstance(body, ChatRequest):
        tools = [] if body.tool_choice == "none" else body.tools or []
        has_tools = bool(tools)
        prompts: Sequence[str | Sequence[int]] = [_chat_prompt(body, tools, engine)]
        n_top = (body.top_logprobs or 0) if body.logprobs else None
    elif isinstance(body, CompletionRequest):
        is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        prompts = cast("Sequence[str | Sequence[int]]", [body.prompt] if is_one else body.prompt)
        n_top = body.logprobs
    else:
        prompts = [body.prompt]
    tokens = [engine.tokenize(prompt) for prompt in prompts]
    return ParsedRequest(tokens, options, n, body.seed, n_top, has_tools)


def _chat_prompt(body: ChatRequest, tools: Sequence[Tool], engine: Engine) -> Sequence[int]:
    if (template := engine.chat_template) is None:
        raise PromptError("this model has no chat template; use /v1/completions")
    source = template.source_for_tools
    if tools and not ("tools" in source and OPENING in source):
        raise PromptError(
            f"the chat template of this model does not support tools with {OPENING}, the only "
            "format that this server parses; leave out 'tools'"
        )
    if tools and body.response_format and body.response_format.type != "text":
        raise OptionError("'tools' and 'response_format' cannot be combined; leave out one of them")
    if body.top_logprobs and not body.logprobs:
        raise OptionError("top_logprobs needs 'logprobs': true")
    return engine.render(
        [message.model_dump(exclude_none=True) for message in body.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
    )


def _options_of(body: GenerationBody, engine: Engine, server: ServerOptions) -> CheckedOptions:
    options: dict[str, Any] = {**engine.file_sampling.options, **server.defaults}
    for name in (*_SAMPLING, *_PENALTIES):
        if getattr(body, name) is not None:
            options[name] = getattr(body, name)
    if any(options.get(name) for name in _PENALTIES):
        options["repeat_last_n"] = -1  # OpenAI's penalties apply to the whole text
    if body.logit_bias:
        options["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.stop is not None:
        options["stop"] = body.stop
    if body.response_format and (schema := _schema_of(body.response_format)) is not None:
        options["json_schema"] = schema
    if not body.speculative:
        options["drafter"] = "none"
    max_tokens = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    options["max_tokens"] = min(
        (n for n in (max_tokens, server.max_tokens) if n is not None), default=None
    )
    return CheckedOptions.of(cast("GenerateOptions", options))


def _schema_of(wanted: ResponseFormat) -> Mapping[str, object] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise OptionError(
            "response_format 'json_schema' has no schema; send it as json_schema: {schema: {...}}"
        )
    return wanted.json_schema.schema_
