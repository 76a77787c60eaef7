"""Reads requests of Anthropic's Messages API as chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ggufspec.server.dialects.chat_request import as_chat, thinking_variables
from ggufspec.server.schema import N_STOPS, Body, ChatRequest, GenerationBody, Stop

# Claude Code's first block changes with each request: with it, no prompt would be found in a cache.
_BILLING = "x-anthropic-billing-header:"
_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high


def _one_of(what: str, *types: str) -> BeforeValidator:
    """Refuses objects of another type by its name, before their other fields are looked at."""

    def check(value: object) -> object:
        found = value.get("type", types[0]) if isinstance(value, dict) else types[0]
        if found is not None and found not in types:
            message = "{what} of type {found} are not supported; this server reads {types}"
            facts = {"what": what, "found": repr(found)[:100], "types": ", ".join(types)}
            raise PydanticCustomError("type_of_object", message, facts)
        return value

    return BeforeValidator(check)


class TextBlock(Body):
    """Text."""

    kinds = ("blocks",)
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    kinds = ("blocks",)
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Any; it is not checked.")


class RedactedThinkingBlock(Body):
    """Encrypted reasoning of another server; the model does not see it."""

    kinds = ("blocks",)
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A tool call of an earlier answer."""

    kinds = ("blocks",)
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


TextBlocks = list[Annotated[TextBlock, _one_of("blocks", "text")]]


class ToolResultBlock(Body):
    """The result of a tool call."""

    kinds = ("blocks",)
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool = Field(False, description='The result begins with "Error: ".')


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
        Field(discriminator="type"),
    ],
    _one_of("blocks", "text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class Message(Body):
    """One message of a conversation; several of one role in a row are one."""

    kinds = ("blocks",)
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> Sequence[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class CustomTool(Body):
    """A tool that the client runs."""

    kinds = ("blocks", "custom_tools")
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = Field(
        None, description="The model sees them as `examples` of the schema."
    )
    strict: bool | None = Field(None, description="true: calls match the schema.")


class ToolChoice(Body):
    """Whether tools are called: auto, any (a call), tool (of that name), none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1, max_length=256)
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.name is None) == (self.type == "tool"):
            raise PydanticCustomError("name_of_tool", "type 'tool' has a name, and no other has")
        return self


class Thinking(Body):
    """Whether the model reasons first, if its chat template can say so."""

    kinds = ("thinking",)
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=0, description="No effect: the model ends its reasoning, or max_tokens does."
    )


class OutputFormat(Body):
    """A schema that the text must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The format of the text, and how long the model reasons."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The `reasoning_effort` of the chat template; xhigh and max: high."
    )
    format: OutputFormat | None = None


class MessagesRequest(GenerationBody):
    """A conversation to continue, in Anthropic's form; other fields of chats have their effect."""

    kinds = ("everywhere", "blocks", "custom_tools", "messages_api")
    max_tokens: int = Field(ge=1, le=2**31)
    messages: list[Message] = Field(min_length=1)
    system: str | TextBlocks | None = None
    tools: list[Annotated[CustomTool, _one_of("tools", "custom")]] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[Stop] | None = Field(None, max_length=N_STOPS)
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="As output_config.format.")

    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        config, choice = self.output_config, self.tool_choice
        form = (config and config.format) or self.output_format
        effort = config and config.effort
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
            chat_template_kwargs=self.thinking
            and thinking_variables(self.thinking.type != "disabled"),
        )


class CountTokensRequest(MessagesRequest):
    """A conversation whose tokens are counted."""

    max_tokens: int = Field(1, ge=1)


def _tool_of(tool: CustomTool) -> dict[str, Any]:
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = {**parameters, "examples": tool.input_examples}
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _messages_of(body: MessagesRequest) -> Iterator[dict[str, Any]]:
    system = body.system or []
    if isinstance(system, str):
        system = [TextBlock(type="text", text=system)]
    if texts := [block for block in system if not block.text.startswith(_BILLING)]:
        yield {"role": "system", "content": _lines(texts)}
    for role, together in groupby(body.messages, key=lambda message: message.role):
        blocks = [block for message in together for block in message.blocks]
        yield from (_from_assistant if role == "assistant" else _from_client)(role, blocks)


def _from_assistant(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    calls = [
        {"id": each.id, "function": {"name": each.name, "arguments": each.input}}
        for each in blocks
        if each.type == "tool_use"
    ]
    thoughts = [each.thinking for each in blocks if each.type == "thinking"]
    yield {
        "role": role,
        "content": "".join(each.text for each in blocks if each.type == "text") or None,
        "tool_calls": calls or None,
        "reasoning_content": "\n\n".join(thoughts) or None,
    }


def _from_client(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Results of tools come first: templates have no other text between a call and its result."""
    results = [each for each in blocks if each.type == "tool_result"]
    for each in results:
        content = each.content or ""
        text = content if isinstance(content, str) else _lines(content)
        text = f"Error: {text}" if each.is_error else text
        yield {"role": "tool", "tool_call_id": each.tool_use_id, "content": text}
    texts = [each for each in blocks if each.type == "text"]
    if texts or not results:
        yield {"role": role, "content": _lines(texts)}


def _lines(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)
