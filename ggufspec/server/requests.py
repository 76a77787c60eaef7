"""Turns request bodies into requests for the worker: token ids and checked options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ggufspec.decoding.sampling_options import NUMBERS
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.errors import OptionError, PromptError
from ggufspec.server.adapters import check_scales
from ggufspec.server.chat import AnswerPlan, plan_answer, tools_of
from ggufspec.server.events import ParsedRequest
from ggufspec.server.formats.values import sent_arguments
from ggufspec.server.options import ServerOptions
from ggufspec.server.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    PredictRequest,
    joined,
)

# Fields with the name and the meaning of an option of the engine.
_OPTIONS = (
    *(name for name in NUMBERS if name not in ("top_k", "top_p")),
    *(
        "dry_sequence_breakers",
        "stop",
        "ignore_eos",
        "min_tokens",
        "n_keep",
        "drafter",
        "tree",
        "verify",
    ),
)
_OF_WHOLE_TEXT = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_FIELDS_OF_TEMPLATES = {"messages", "tools", "add_generation_prompt"}  # set by the server
_MOST_SCORED = 400_000  # 64 prompts of 3,000 tokens, each with one alternative
_LEAST_TOP_P = 1e-6  # keeps only the most likely token


def parse_request(
    body: CompletionRequest | ChatRequest | PredictRequest, engine: Engine, server: ServerOptions
) -> ParsedRequest:
    """Raises PromptError, OptionError."""
    n, n_top, echo, plan = body.n or 1, None, None, AnswerPlan({}, None)
    constraint = _constraint_of(body)
    if isinstance(body, ChatRequest):
        tools = tools_of(body, engine)
        prompt = _chat_prompt(body, tools, engine)
        plan = plan_answer(body, tools, prompt, constraint, engine)
        prompts: Sequence[str | Sequence[int]] = [prompt]
        n_top = (body.top_logprobs or 0) if body.logprobs else None
    elif isinstance(body, CompletionRequest):
        if body.best_of not in (None, n):
            raise OptionError(
                f"best_of is {body.best_of}; all choices are returned: leave it out, or send n"
            )
        is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        prompts = cast("Sequence[str | Sequence[int]]", [body.prompt] if is_one else body.prompt)
        n_top = body.logprobs
        if body.echo:
            echo = [_text_of(prompt, engine) for prompt in prompts]
        if not body.add_special_tokens:
            prompts = [_without_bos(prompt, engine) for prompt in prompts]
    else:
        prompts = [body.prompt]
    if body.lora:
        check_scales(body.lora, engine)
    options = _options_of(body, engine, server, {**constraint, **plan.options})
    # Compiled here, so that an error ends this request and not the thread that runs all texts.
    engine.check(options)
    tokens = [engine.tokenize(prompt) for prompt in prompts]
    seed = options.seed if body.seed in (None, -1) else body.seed
    n_scored = sum(map(len, tokens)) * n * ((n_top or 0) + 1)
    if echo is not None and n_top is not None and n_scored > _MOST_SCORED:
        raise OptionError(
            f"'echo' with 'logprobs' would return {n_scored:,} log-probabilities, more than "
            f"{_MOST_SCORED:,}; send fewer prompts, or a smaller 'logprobs'"
        )
    writes = _limit_of(body) != 0
    if not writes and echo is None:
        raise OptionError("max_tokens is 0; it must be at least 1, or -1, unless 'echo' is true")
    return ParsedRequest(tokens, options, n, seed, n_top, plan.parser, echo, writes)


def default_options(engine: Engine, server: ServerOptions) -> GenerateOptions:
    """The options for a request that sets no options."""
    return {**engine.file_sampling.options, **server.defaults}


def _text_of(prompt: str | Sequence[int], engine: Engine) -> str:
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(engine.vocab.piece, prompt)).decode("utf-8", "replace")


def _without_bos(prompt: str | Sequence[int], engine: Engine) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    return engine.vocab.tokenize(prompt, add_special=False, parse_special=True)


def _limit_of(body: GenerationBody) -> int | None:
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _chat_prompt(
    body: ChatRequest, tools: Sequence[Mapping[str, object]], engine: Engine
) -> Sequence[int]:
    if engine.chat_template is None:
        raise PromptError("this model has no chat template; use /v1/completions")
    if body.top_logprobs and not body.logprobs:
        raise OptionError("top_logprobs needs 'logprobs': true")
    return engine.render(
        [_for_template(message) for message in body.messages],
        tools=tools,
        variables=variables_of(body),
        continue_final_message=continues_final_message(body),
    )


def _for_template(message: ChatMessage) -> dict[str, Any]:
    made = message.model_dump(exclude_none=True)
    if called := made.pop("function_call", None):
        made["tool_calls"] = [{"id": called["name"], "type": "function", "function": called}]
    for call in made.get("tool_calls", ()):
        if isinstance(arguments := call["function"]["arguments"], str):
            call["function"]["arguments"] = sent_arguments(arguments)
    if message.role == "function":
        made |= {"role": "tool", "tool_call_id": made.get("name", "")}
    return {"content": "", **made} if made["role"] == "tool" else made


def variables_of(body: ChatRequest) -> dict[str, Any]:
    """The variables of the chat template that a request sets. Raises OptionError."""
    effort = body.reasoning_effort
    if found := _FIELDS_OF_TEMPLATES & (body.chat_template_kwargs or {}).keys():
        name = min(found)
        raise OptionError(
            f"chat_template_kwargs has {name!r}, which is a field of the request; send it there"
        )
    return {
        **({} if effort is None else {"reasoning_effort": effort}),
        **(body.chat_template_kwargs or {}),
    }


def continues_final_message(body: ChatRequest) -> bool:
    """Whether the text continues the last message instead of beginning one. Raises OptionError."""
    *_, before, last = None, *body.messages
    is_begun = last.role == "assistant" and bool(last.text) and not last.tool_calls
    wanted = body.continue_final_message
    if wanted and not is_begun:
        raise OptionError(
            "continue_final_message needs a last message of the assistant that has a text, and no "
            "tool calls"
        )
    is_set = "add_generation_prompt" in body.model_fields_set
    is_new = body.add_generation_prompt if is_set else None
    continues = is_begun and is_new is not True if wanted is None else wanted
    if is_new == continues:
        raise OptionError(
            "one of add_generation_prompt and continue_final_message must be true, and the other "
            "false; leave out add_generation_prompt"
        )
    if continues and before is not None and before.role == "assistant":
        raise OptionError(
            "the last two messages are the assistant's, and the last one would be continued; send "
            "one message, or 'continue_final_message': false"
        )
    return continues


def _options_of(
    body: GenerationBody, engine: Engine, server: ServerOptions, changes: Mapping[str, Any]
) -> CheckedOptions:
    options: dict[str, Any] = {**default_options(engine, server)}
    given = {name: value for name in body.model_fields_set if (value := getattr(body, name))}
    if any(given.get(name) for name in _OF_WHOLE_TEXT):
        options["repeat_last_n"] = -1  # as in OpenAI's and vLLM's servers
    options |= {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
    if "repetition_penalty" in given:
        options["repeat_penalty"] = given["repetition_penalty"]
    if body.top_k is not None:
        options["top_k"] = max(body.top_k, 0)
    if body.top_p is not None:
        options["top_p"] = max(body.top_p, _LEAST_TOP_P)
    if body.samplers is not None:  # xtc is off: xtc_probability is refused
        options["samplers"] = [name for name in body.samplers if name != "xtc"]
    if body.logit_bias:
        options["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.stop_token_ids:
        options["stop_tokens"] = body.stop_token_ids
    if not body.skip_special_tokens:
        options["shown_tokens"] = range(engine.vocab.n_tokens)
    if body.draft_n:
        options["n_draft"] = body.draft_n
    if not body.speculative or body.draft_n == 0:
        options["drafter"] = "none"
    if isinstance(body, ChatRequest) and body.prediction is not None:
        options["prediction"] = joined(body.prediction.content, "")
    limits = [n for n in (_limit_of(body), server.max_tokens) if n is not None and n > 0]
    options["max_tokens"] = min(limits, default=None)
    return CheckedOptions.of(cast("GenerateOptions", options | dict(changes)))


def _constraint_of(body: GenerationBody) -> dict[str, object]:
    """The constraint of a request, as an option of the engine. Raises OptionError for several."""
    found = list(_constraints_of(body))
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise OptionError(f"{names} are given; give one of them")
    return {option: value for _, option, value in found}


def _constraints_of(body: GenerationBody) -> Iterator[tuple[str, str, object]]:
    """Yields, for each constraint, its field, the option of the engine, and the value."""
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and (
        (form.json_schema and form.type != "json_schema")
        or (form.schema_ and form.type != "json_object")
    ):
        raise OptionError(
            f"response_format of type {form.type!r} has no such schema; send it as json_schema: "
            "{schema: {...}} of type 'json_schema'"
        )
    if form is not None and form.type == "json_object":
        yield "response_format", "json_schema", form.schema_ or {"type": "object"}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise OptionError(
                "response_format 'json_schema' has no schema; send it as "
                "json_schema: {schema: {...}}"
            )
        yield "response_format", "json_schema", form.json_schema.schema_
    if outputs is not None:
        for name, option, value in (
            ("json", "json_schema", outputs.json_),
            ("json_object", "json_schema", {"type": "object"} if outputs.json_object else None),
            ("regex", "regex", outputs.regex),
            ("choice", "choices", outputs.choice),
            ("grammar", "grammar", outputs.grammar),
        ):
            if value is not None:
                yield f"structured_outputs.{name}", option, value
    for name, option in (
        ("json_schema", "json_schema"),
        ("grammar", "grammar"),
        ("guided_json", "json_schema"),
        ("guided_regex", "regex"),
        ("guided_grammar", "grammar"),
        ("guided_choice", "choices"),
    ):
        if getattr(body, name) not in (None, ""):
            yield name, option, getattr(body, name)
