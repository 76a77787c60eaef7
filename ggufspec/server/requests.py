"""Turns request bodies into requests for texts: token ids and checked options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from ggufspec.common.progress import NamedProgress
from ggufspec.decoding.sampling_options import NUMBERS
from ggufspec.engine.engine import Engine
from ggufspec.engine.images import Images
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.engine.prepared import PreparedText
from ggufspec.engine.reasoning import begun_in, reasoning_after
from ggufspec.errors import OptionError, PromptError
from ggufspec.server.dialects.llama_cpp import MEDIA_MARK
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ParsedRequest
from ggufspec.server.formats.chat_format import format_of
from ggufspec.server.formats.deltas import ChatParser
from ggufspec.server.formats.grammar import GrammarMaker
from ggufspec.server.prompts import Prompt, echo_of, prompts_of
from ggufspec.server.remote_images import with_images
from ggufspec.server.schema import (
    AdapterScale,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    NamedTool,
    PredictRequest,
    ResponseFormat,
    StructuredOutputs,
    joined,
)
from ggufspec.server.service import ServerOptions, default_options
from ggufspec.server.strict_json import sent_arguments
from ggufspec.structured.grammar import of_json_schema

# Fields that mean an option of the engine: of the same name, or of another.
_OPTIONS = {
    name: name
    for name in (
        *(name for name in NUMBERS if name not in ("top_k", "top_p")),
        *("samplers", "dry_sequence_breakers", "stop", "banned_strings", "ignore_eos"),
        *("min_tokens", "n_keep", "drafter", "tree", "verify"),
    )
} | {"repetition_penalty": "repeat_penalty", "reasoning_budget_tokens": "reasoning_budget"}
_OF_WHOLE_TEXT = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_FIELDS_OF_TEMPLATES = {"messages", "tools", "add_generation_prompt"}  # set by the server
_MOST_SCORED = 400_000  # 64 prompts of 3,000 tokens, each with one alternative
_LEAST_TOP_P = 1e-6  # keeps only the most likely token
_OBJECT: dict[str, Any] = {"type": "object"}  # the schema of any object


class AnswerPlan(NamedTuple):
    options: Mapping[str, Any] = {}  # they replace options of the request
    parser: Callable[[], ChatParser] | None = None  # None: the whole text is content
    not_enforced: Sequence[str] = ()  # parts of the tools' schemas
    # Without the tools' schemas; None: they have to be enforced, or are not.
    loosened: Callable[[], AnswerPlan] | None = None


def parse_request(
    body: CompletionRequest | ChatRequest | PredictRequest,
    engine: Engine,
    server: ServerOptions,
    progress: NamedProgress | None = None,
) -> ParsedRequest:
    """`progress`: as for Engine.generate. Raises PromptError, OptionError, ApiError."""
    n, n_top, echoed, plan = body.n or 1, None, None, AnswerPlan()
    constraint = _constraint_of(body)
    if isinstance(body, ChatRequest):
        conversation = _conversation_of(body, engine, server)
        if body.top_logprobs and not body.logprobs:
            raise OptionError("top_logprobs needs 'logprobs': true")
        prompt = engine.render(**conversation)
        plan = plan_answer(body, conversation["tools"], prompt, constraint, engine)
        prompts: Sequence[Prompt] = [prompt]
        n_top = (body.top_logprobs or 0) if body.logprobs else None
    elif isinstance(body, CompletionRequest):
        if body.best_of not in (None, n):
            raise OptionError(
                f"best_of is {body.best_of}; all choices are returned: leave it out, or send n"
            )
        prompts = prompts_of(body, engine, server)
        n_top = body.n_probs or body.logprobs
        echoed = prompts if body.echo else None
        if not body.add_special_tokens:
            prompts = [
                engine.vocab.tokenize(each, add_special=False, parse_special=True)
                if isinstance(each, str)
                else each
                for each in prompts
            ]
    else:
        prompts = [body.prompt]
    if body.lora:
        check_scales(body.lora, engine)
    is_sampled = isinstance(body, CompletionRequest) and body.post_sampling_probs

    def first_of(plan: AnswerPlan) -> PreparedText:
        options = _options_of(body, engine, server, {**constraint, **plan.options})
        options = replace(options, progress=progress)
        return engine.prepare(prompts[0], options, n_top=n_top, is_sampled=is_sampled)

    try:
        first = first_of(plan)
    except OptionError as error:
        if plan.loosened is None:
            raise
        plan = plan.loosened()._replace(not_enforced=[f"all tools: {error}"])
        first = first_of(plan)
    options = first.options
    others = [engine.tokenize(prompt, n_least=options.n_least) for prompt in prompts[1:]]
    tokens = [first.tokens, *others]
    seed = options.seed if body.seed in (None, -1) else body.seed
    n_scored = sum(map(len, tokens)) * n * ((n_top or 0) + 1)
    if echoed is not None and n_top is not None and n_scored > _MOST_SCORED:
        raise OptionError(
            f"'echo' with 'logprobs' would return {n_scored:,} log-probabilities, more than "
            f"{_MOST_SCORED:,}; send fewer prompts, or a smaller 'logprobs'"
        )
    echo = None
    if echoed is not None:
        echo = [echo_of(*each, engine.vocab) for each in zip(echoed, tokens, strict=True)]
    return ParsedRequest(
        tokens, options, n, seed, n_top, plan.parser, echo, plan.not_enforced, first
    )


def applied_template(body: ChatRequest, engine: Engine, server: ServerOptions) -> str:
    """A conversation as text, up to where the answer begins. Raises PromptError, OptionError."""
    has_answer = body.add_generation_prompt or body.messages[-1].role == "assistant"
    if not has_answer:
        whole = {"add_generation_prompt": True, "continue_final_message": False}
        body = body.model_copy(update=whole)
    conversation = _conversation_of(body, engine, server)
    assert engine.chat_template is not None
    images = Images(conversation["messages"], engine.pair.target)
    conversation["messages"] = images.messages
    text = engine.chat_template.render(**conversation, add_generation_prompt=has_answer)
    return images.with_marks(text, MEDIA_MARK)


def _conversation_of(body: ChatRequest, engine: Engine, server: ServerOptions) -> dict[str, Any]:
    """What the chat template needs. Raises PromptError, OptionError."""
    tools = _tools_of(body, engine)
    if engine.chat_template is None:
        raise PromptError("this model has no chat template; use /v1/completions")
    messages = [_for_template(message) for message in body.messages]
    return {
        "messages": with_images(messages, may_fetch=server.allow_remote_images),
        "tools": tools,
        "variables": _variables_of(body),
        "continue_final_message": _continues_final_message(body),
    }


def _for_template(message: ChatMessage) -> dict[str, Any]:
    made = message.model_dump(exclude_none=True)
    if called := made.pop("function_call", None):
        made["tool_calls"] = [{"type": "function", "function": called}]
    for call in made.get("tool_calls", ()):
        if isinstance(arguments := call["function"]["arguments"], str):
            call["function"]["arguments"] = sent_arguments(arguments)
    if message.role == "function":
        made["role"] = "tool"
    return {"content": "", **made} if made["role"] == "tool" else made


def _variables_of(body: ChatRequest) -> dict[str, Any]:
    effort, variables = body.reasoning_effort, body.chat_template_kwargs or {}
    if found := _FIELDS_OF_TEMPLATES & variables.keys():
        raise OptionError(
            f"chat_template_kwargs has {min(found)!r}, which is a field of the request; send it "
            "there"
        )
    return variables if effort is None else {"reasoning_effort": effort, **variables}


def _continues_final_message(body: ChatRequest) -> bool:
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


def _tools_of(body: ChatRequest, engine: Engine) -> list[dict[str, Any]]:
    """The tools for the chat template. Raises PromptError if it shows no tools, and OptionError."""
    choice, tools = body.tool_choice, body.tools or []
    if choice == "none":
        return []
    if choice not in (None, "auto") and not tools:
        raise OptionError("tool_choice requires a call, but there are no 'tools'; send some")
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool) and (name := choice.function.name) not in names:
        raise OptionError(f"tool_choice names {name!r}, but 'tools' has only {', '.join(names)}")
    if tools and engine.chat_template and not format_of(engine.chat_template).tools:
        raise PromptError(
            "the chat template of this model does not support tools; leave out 'tools'"
        )
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def plan_answer(
    body: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    constraints: Mapping[str, Any],
    engine: Engine,
    *,
    is_loose: bool = False,
) -> AnswerPlan:
    """Raises OptionError. `constraints`: what the text must match, by option of the engine.

    `is_loose`: the schemas of the tools are not enforced.
    """
    assert engine.chat_template is not None
    chat_format, vocab = format_of(engine.chat_template), engine.vocab
    if tools and not constraints.keys() <= {"json_schema"}:
        raise OptionError("'tools' can be combined with a JSON schema only; leave out one of them")
    if not tools and not chat_format.has_marks:
        return AnswerPlan()
    begun = begun_in(chat_format.syntax, prompt, vocab)
    specials = vocab.specials_in(chat_format.text)
    options: dict[str, Any] = {"shown_tokens": frozenset(specials.values())}
    schema, choice = constraints.get("json_schema"), body.tool_choice
    strict = {tool.function.name for tool in body.tools or [] if tool.function.strict}
    is_required = choice not in (None, "auto", "none")
    # Small models that are forced to call would repeat the same calls until the token limit.
    is_parallel = not is_required if body.parallel_tool_calls is None else body.parallel_tool_calls
    reasoning, not_enforced = reasoning_after(chat_format.syntax, begun), list[str]()
    loosened = None
    if constraints and not tools and (schema is None or not (reasoning and reasoning.is_open)):
        return AnswerPlan({"reasoning_budget": -1})  # the whole text is content
    if constraints or (tools and (is_required or strict or body.parallel_tool_calls is False)):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        options["json_schema"] = None
        maker = GrammarMaker(chat_format.syntax, specials, vocab.stop_tokens)
        options["grammar"] = maker.grammar(
            [tool for tool in tools if named in (None, tool["function"]["name"])],
            reasoning,
            is_required=is_required,
            is_parallel=named is None and is_parallel,
            strict=strict,
            is_loose=is_loose,
            answer=None if schema is None else of_json_schema(schema),
        )
        not_enforced = maker.not_enforced
        if tools and not is_required and not is_loose:
            loosened = partial(plan_answer, body, tools, prompt, constraints, engine, is_loose=True)
    known_ids = [call.id for message in body.messages for call in message.tool_calls or ()]
    parser = partial(
        chat_format.parser, begun, tools or None, is_parallel=is_parallel, known_ids=known_ids
    )
    return AnswerPlan(options, parser, not_enforced, loosened)


def _options_of(
    body: GenerationBody, engine: Engine, server: ServerOptions, changes: Mapping[str, Any]
) -> CheckedOptions:
    options: dict[str, Any] = {**default_options(engine, server)}
    if any(getattr(body, name) for name in _OF_WHOLE_TEXT):
        options["repeat_last_n"] = -1  # as in OpenAI's and vLLM's servers
    given = ((option, getattr(body, name)) for name, option in _OPTIONS.items())
    options |= {option: value for option, value in given if value is not None}
    if body.top_k is not None:
        options["top_k"] = max(body.top_k, 0)
    if body.top_p is not None:
        options["top_p"] = max(body.top_p, _LEAST_TOP_P)
    if body.logit_bias:
        options["logit_bias"] = _biases_of(body.logit_bias, engine)
    if body.stop_token_ids:
        options["stop_tokens"] = body.stop_token_ids
    if not body.skip_special_tokens:
        options["shown_tokens"] = range(engine.vocab.n_tokens)
    if body.draft_n:
        options["n_draft"] = body.draft_n
    if not body.speculative or body.draft_n == 0:
        options["drafter"] = "none"
    if isinstance(body, ChatRequest) and body.prediction is not None:
        # Once: each choice would tokenize it in the engine's thread.
        options["prediction"] = engine.pair.tokens_inside(joined(body.prediction.content, ""))
    limit: int | None = getattr(body, "max_completion_tokens", None)
    limit = body.max_tokens if limit is None else limit
    if limit == -2:
        options["context_shift"] = False
    if body.seed == -1:
        options["seed"] = None
    if body.t_max_predict_ms and body.t_max_predict_ms > 0:
        options["max_seconds"] = body.t_max_predict_ms / 1000
    options["min_indent"] = body.n_indent
    options["max_tokens"] = server.limit(limit)
    return CheckedOptions.of(cast("GenerateOptions", options | dict(changes)))


def _biases_of(sent: Sequence[tuple[int | str, float]], engine: Engine) -> dict[int, float]:
    """By token; a text stands for each of its tokens."""
    found = {of: bias for of, bias in sent if not isinstance(of, str)}
    for of, bias in sent if len(found) < len(sent) else ():
        if not isinstance(of, str):
            continue
        tokens = engine.vocab.tokenize(of, add_special=False, parse_special=True)
        found.update(dict.fromkeys(tokens, bias))
    return found


def _constraint_of(body: GenerationBody) -> dict[str, object]:
    """The constraint of a request, as an option of the engine. Raises OptionError for several."""
    form = body.response_format
    outputs = body.structured_outputs or StructuredOutputs.model_construct()
    found: dict[str, tuple[str, object]] = {
        "response_format": ("json_schema", form and _schema_of(form)),
        "structured_outputs.json": ("json_schema", outputs.json_),
        "structured_outputs.json_object": ("json_schema", _OBJECT if outputs.json_object else None),
        "structured_outputs.regex": ("regex", outputs.regex),
        "structured_outputs.choice": ("choices", outputs.choice),
        "structured_outputs.grammar": ("grammar", outputs.grammar),
        "json_schema": ("json_schema", body.json_schema),
        "grammar": ("grammar", body.grammar),
        "guided_json": ("json_schema", body.guided_json),
        "guided_regex": ("regex", body.guided_regex),
        "guided_grammar": ("grammar", body.guided_grammar),
        "guided_choice": ("choices", body.guided_choice),
    }
    given = {  # an empty text is no constraint, but in structured_outputs it is invalid
        name: (option, value)
        for name, (option, value) in found.items()
        if value is not None and (value != "" or name.startswith("structured"))
    }
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} are given; give one of them")
    return dict(given.values())


def _schema_of(form: ResponseFormat) -> dict[str, Any] | None:
    """The schema of a response format; None: any text. Raises ApiError."""
    if form.type == "text" and not (form.json_schema or form.schema_):
        return None
    if form.type == "json_object" and not form.json_schema:
        return form.schema_ or _OBJECT
    schema = form.json_schema.schema_ if form.json_schema else None
    if form.type == "json_schema" and schema is not None and not form.schema_:
        return schema
    problem = "no schema" if form.type == "json_schema" and not form.schema_ else "no such schema"
    raise ApiError(  # with a code of its own: else its words would be taken for names of options
        400,
        f"response_format of type {form.type!r} has {problem}; send it as json_schema: "
        "{schema: {...}} of type 'json_schema'",
        param="response_format",
        code="invalid_format",
    )


def check_scales(asked: Sequence[AdapterScale], engine: Engine) -> None:
    """Raise OptionError unless the scales equal the loaded ones; adapters left out have scale 0.

    All texts need the same scales, since they share passes of the target and KV caches.
    """
    loaded = [each.scale for each in engine.pair.target.model.adapters]
    wanted = [0.0] * len(loaded)
    for each in asked:
        if not 0 <= each.id < len(loaded):
            raise OptionError(
                f"there is no LoRA adapter {each.id}; the server has {len(loaded)}, numbered from "
                "0 (GET /lora-adapters)"
            )
        wanted[each.id] = each.scale
    if wanted != loaded:
        raise OptionError(
            f"the scales of the LoRA adapters are {loaded} for all texts, as these share passes; "
            f"the request has {wanted}: send the loaded scales, or start another server with other "
            "scales (--lora FILE:SCALE)"
        )
