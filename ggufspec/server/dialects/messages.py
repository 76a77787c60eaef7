"""Reads requests of Anthropic's Messages API as chats, and writes their answers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ggufspec.server.dialects.shared import (
    NAMED_EVENTS,
    Answer,
    Part,
    Step,
    as_chat,
    thinking_variables,
)
from ggufspec.server.errors import ApiError, anthropic_error
from ggufspec.server.events import ChoiceEvent, ParsedRequest
from ggufspec.server.parts import content_of, encoded_image, image_part, joined, of_type
from ggufspec.server.schema import Body, ChatRequest, GenerationBody, Stops

# Claude Code's first block changes with each request, so it would keep the cache from being used.
_BILLING = "x-anthropic-billing-header:"
_ROLES = {  # of the messages that have a type of block; the others are in any
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_result": "user",
}
_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {  # by kind of part: type of delta, and name of its text
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_SIGNATURE = "unsigned"  # some clients send back only signed reasoning


class TextBlock(Body):
    kinds = ("blocks",)
    type: Literal["text"]
    text: str


class ImageSource(Body):
    """The file of an image, in base64, or its address."""

    kinds = ("images",)
    type: Literal["base64", "url"]
    data: str = ""
    url: str = ""


class ImageBlock(Body):
    kinds = ("blocks",)
    type: Literal["image"]
    source: ImageSource

    @property
    def image(self) -> dict[str, Any]:
        of = self.source
        return image_part(of.url) if of.type == "url" else encoded_image(of.data)


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; the model does not see it if it is redacted."""

    kinds = ("blocks",)
    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str | None = Field(None, description="Any; it is not checked.")
    data: str | None = None


class ToolUseBlock(Body):
    """A tool call of an earlier answer."""

    kinds = ("blocks",)
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


TextBlocks = list[Annotated[TextBlock, of_type("blocks", "text")]]
ResultBlocks = list[
    Annotated[
        Annotated[TextBlock | ImageBlock, Field(discriminator="type")],
        of_type("blocks", "text", "image"),
    ]
]


class ToolResultBlock(Body):
    """The result of a tool call."""

    kinds = ("blocks",)
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ResultBlocks | None = None
    is_error: bool = Field(False, description='The result begins with "Error: ".')


AnyBlock = Annotated[
    Annotated[
        TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
        Field(discriminator="type"),
    ],
    of_type(
        "blocks", "text", "image", *("thinking", "redacted_thinking", "tool_use", "tool_result")
    ),
]


class InputMessage(Body):
    """One message of a conversation; adjacent messages of one role become one."""

    kinds = ("blocks",)
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> InputMessage:
        for block in () if isinstance(self.content, str) else self.content:
            if (role := _ROLES.get(block.type, self.role)) != self.role:
                message = (
                    "blocks of type '{type}' belong to messages of the {role}, not of the {own}"
                )
                facts = {"type": block.type, "role": role, "own": self.role}
                raise PydanticCustomError("role_of_block", message, facts)
        return self


class CustomTool(Body):
    """A tool that the client runs."""

    kinds = ("blocks", "custom_tools")
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = Field(None, description="true: calls match the schema.")


AnyTool = Annotated[CustomTool, of_type("tools", "custom", None, default="custom")]


class ToolChoice(Body):
    """Whether tools are called: auto, any (at least one), tool (the named one), none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1, max_length=256)
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.name is None) == (self.type == "tool"):
            raise PydanticCustomError("name_of_tool", "type 'tool', and no other, needs a name")
        return self


class Thinking(Body):
    """Whether the model reasons first; needs a chat template with such a variable."""

    kinds = ("thinking",)
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=0, le=2**31, description="As `reasoning_budget_tokens`, of type 'enabled'."
    )


class OutputFormat(Body):
    """A schema that the text must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The format of the text, and the template's `reasoning_effort`; xhigh and max are high."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(GenerationBody):
    """A conversation to continue, in Anthropic's form; the other fields are as for chats."""

    kinds = ("everywhere", "blocks", "custom_tools", "messages_api")
    max_tokens: int = Field(ge=0, le=2**31)
    messages: list[InputMessage] = Field(min_length=1)
    system: str | TextBlocks | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Stops = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="As output_config.format.")

    def chat(self) -> ChatRequest:
        config, choice = self.output_config, self.tool_choice
        form = (config and config.format) or self.output_format
        if self.output_format not in (None, form):
            message = "output_format is given twice, also as output_config.format; give one of them"
            raise ApiError(400, message, param="output_format")
        effort, thinking = config and config.effort, self.thinking
        kind, one_call = None, None
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            kind = {"any": "required", "tool": named}.get(choice.type, choice.type)
            one_call = choice.disable_parallel_tool_use
        return as_chat(
            self,
            messages=list(_messages_of(self)),
            tools=[_tool_of(tool) for tool in self.tools or []],
            tool_choice=kind,
            parallel_tool_calls=None if one_call is None else not one_call,
            stop=self.stop_sequences,
            json_schema=form and form.schema_,
            reasoning_effort=_EFFORTS.get(str(effort), effort),
            chat_template_kwargs=thinking and thinking_variables(thinking.type != "disabled"),
            reasoning_budget_tokens=thinking.budget_tokens
            if thinking and thinking.type == "enabled"
            else None,
        )


class CountTokensRequest(MessagesRequest):
    """A conversation whose tokens are counted."""

    max_tokens: int = Field(1, ge=1)


def _tool_of(tool: CustomTool) -> dict[str, Any]:
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    parameters = {**tool.input_schema, **examples}
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _messages_of(body: MessagesRequest) -> Iterator[dict[str, Any]]:
    system = _blocks(body.system or [])
    if text := joined([each for each in system if not each.text.startswith(_BILLING)]):
        yield {"role": "system", "content": text}
    turns = [(message.role, _blocks(message.content)) for message in body.messages]
    for is_answer, together in groupby(turns, key=lambda turn: turn[0] == "assistant"):
        if is_answer:
            yield _from_assistant([block for _, blocks in together for block in blocks])
        else:
            yield from _from_client(list(together))


def _from_assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    calls = [
        {"id": each.id, "function": {"name": each.name, "arguments": each.input}}
        for each in blocks
        if each.type == "tool_use"
    ]
    thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
    return {
        "role": "assistant",
        "content": joined(blocks, "") or None,
        "tool_calls": calls or None,
        "reasoning_content": "\n\n".join(filter(None, thoughts)) or None,
    }


def _from_client(turns: Sequence[tuple[str, Sequence[Any]]]) -> Iterator[dict[str, Any]]:
    """Yields tool results first: templates allow no other text between a call and its result."""
    results = [each for _, blocks in turns for each in blocks if each.type == "tool_result"]
    for each in results:
        content = content_of(each.content or "")
        if each.is_error:
            error = {"type": "text", "text": "Error: "}
            content = f"Error: {content}" if isinstance(content, str) else [error, *content]
        yield {"role": "tool", "tool_call_id": each.tool_use_id, "content": content}
    for role, together in groupby(turns, key=lambda turn: turn[0]):
        content = content_of([block for _, blocks in together for block in blocks])
        if content or not results:
            yield {"role": role, "content": content}


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


class MessageRenderer:
    """The message that answers one request."""

    framing = replace(NAMED_EVENTS, keep_alive=NAMED_EVENTS.frame({"type": "ping"}))

    def __init__(self, parsed: ParsedRequest, model: str) -> None:
        self._answer = Answer(0, parsed.parser() if parsed.parser else None)
        self._n_prompt = len(parsed.prompts[0])
        self._head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._has_begun = False
        self._n_blocks = 0
        self._open: Part | None = None  # the part whose block has begun and not ended

    def add(self, event: ChoiceEvent) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._head, **empty, "usage": _usage(self._n_prompt)}
            found.append({"type": "message_start", "message": message})
        for step in self._answer.add(event):
            found += self._block_events(step)
        return found

    def end(self) -> list[dict[str, Any]]:
        last = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [*self._block_end(), last, {"type": "message_stop"}]

    def body(self) -> dict[str, Any]:
        content = [_block(part) for part in self._answer.parts]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage()}

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        return [anthropic_error(error)]

    def _block_events(self, step: Step) -> Iterator[dict[str, Any]]:
        part, text = step.part, step.delta.text
        if step.is_first:
            yield from self._block_end()
            self._open, self._n_blocks = part, self._n_blocks + 1
            empty = _block(Part(part.kind, id=part.id, name=part.name), signature="")
            yield self._of_block("content_block_start", content_block=empty)
        kind, name = _DELTAS[part.kind]
        yield self._of_block("content_block_delta", delta={"type": kind, name: text})

    def _block_end(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._of_block("content_block_delta", delta=delta)
        yield self._of_block("content_block_stop")

    def _of_block(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._n_blocks - 1, **more}

    def _stop(self) -> dict[str, Any]:
        reason, stop = self._answer.finish_reason, self._answer.stop
        if reason == "stop":
            return {"stop_reason": "stop_sequence" if stop else "end_turn", "stop_sequence": stop}
        return {"stop_reason": _REASONS.get(str(reason), "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        stats, n_thinking = self._answer.stats, self._answer.n_reasoning_tokens
        usage = _usage(stats.n_prompt, stats.n_prompt_reused, stats.n_generated)
        return {**usage, "output_tokens_details": {"thinking_tokens": n_thinking}}


def _usage(n_prompt: int, n_reused: int = 0, n_generated: int = 0) -> dict[str, int]:
    """Token counts. Every prompt is cached, without a separate step, so creation counts 0."""
    return {
        "input_tokens": n_prompt - n_reused,
        "cache_read_input_tokens": n_reused,
        "cache_creation_input_tokens": 0,
        "output_tokens": n_generated,
    }


def _block(part: Part, signature: str = _SIGNATURE) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": signature}
    called = {"type": "tool_use", "id": part.id, "name": part.name}
    return {**called, "input": part.arguments}
