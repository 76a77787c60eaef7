"""Plans the answer of a chat with tools or reasoning: its options and its parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError, PromptError
from ggufspec.server.formats.chat_format import format_of
from ggufspec.server.formats.deltas import ChatParser
from ggufspec.server.formats.grammar import GrammarMaker
from ggufspec.server.schema import ChatRequest, NamedTool
from ggufspec.structured.grammar import of_json_schema


class AnswerPlan(NamedTuple):
    options: Mapping[str, Any] = {}  # they replace options of the request
    parser: Callable[[], ChatParser] | None = None  # None: the whole text is content


def tools_of(body: ChatRequest, engine: Engine) -> list[dict[str, Any]]:
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
) -> AnswerPlan:
    """The plan for the answer to a prompt. `constraints`: what the text must match, by option.

    Raises OptionError.
    """
    assert engine.chat_template is not None
    chat_format, vocab = format_of(engine.chat_template), engine.vocab
    if tools and not constraints.keys() <= {"json_schema"}:
        raise OptionError("'tools' can be combined with a JSON schema only; leave out one of them")
    if not tools and not chat_format.has_marks:
        return AnswerPlan()
    begun, specials = chat_format.begun_in(prompt, vocab), vocab.specials_in(chat_format.text)
    options: dict[str, Any] = {"shown_tokens": frozenset(specials.values())}
    schema, choice = constraints.get("json_schema"), body.tool_choice
    is_strict = any(tool.function.strict for tool in body.tools or [])
    is_required = choice not in (None, "auto", "none")
    # Small models that are forced to call would repeat the same calls until the token limit.
    is_parallel = not is_required if body.parallel_tool_calls is None else body.parallel_tool_calls
    reasoning = chat_format.reasoning(begun)
    if constraints and not tools and (schema is None or not (reasoning and reasoning.is_open)):
        return AnswerPlan()  # the whole text is content
    if constraints or (tools and (is_required or is_strict or body.parallel_tool_calls is False)):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        options["json_schema"] = None
        options["grammar"] = GrammarMaker(chat_format.syntax, specials, vocab.stop_tokens).grammar(
            [tool for tool in tools if named in (None, tool["function"]["name"])],
            reasoning,
            is_required=is_required,
            is_parallel=named is None and is_parallel,
            answer=None if schema is None else of_json_schema(schema),
        )
    parser = partial(chat_format.parser, begun, tools or None, is_parallel=is_parallel)
    return AnswerPlan(options, parser)
