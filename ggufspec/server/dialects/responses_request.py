"""Reads requests of OpenAI's responses API as chats, and keeps responses that they continue."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from ggufspec.server import schema
from ggufspec.server.dialects.shared import Document, as_chat, thinking_variables
from ggufspec.server.errors import ApiError
from ggufspec.server.parts import content_of, image_part, joined, of_type

_LOGPROBS = "message.output_text.logprobs"
N_RESPONSES = 1000
N_BYTES = 64 * 2**20  # size of their JSON, including the conversations before them


class Item(schema.Body):
    """An item of a conversation, or a part of one."""

    kinds: ClassVar[tuple[str, ...]] = ("response_items",)


class TextContent(Item):
    """A part of a message, of a result or of reasoning."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class ImageContent(Item):
    """An image of a message or a result."""

    kinds = ("response_items", "images")
    type: Literal["input_image"]
    image_url: str

    @property
    def image(self) -> dict[str, Any]:
        return image_part(self.image_url)


_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_Texts = list[Annotated[TextContent, of_type("parts", *_TEXTS)]]
_Parts = list[
    Annotated[
        Annotated[TextContent | ImageContent, Field(discriminator="type")],
        of_type("parts", *_TEXTS, "input_image"),
    ]
]


class MessageItem(Item):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class CallItem(Item):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


class ReasoningItem(Item):
    """Reasoning of an earlier answer: its content or, without content, its summary."""

    type: Literal["reasoning"]
    summary: _Texts = Field(default_factory=list)
    content: _Texts = Field(default_factory=list)


class ItemReference(Item):
    """An item of a response that the server has stored."""

    type: Literal["item_reference"]
    id: str


StoredItem = MessageItem | CallItem | CallOutputItem | ReasoningItem
AnyItem = Annotated[
    Annotated[StoredItem | ItemReference, Field(discriminator="type")],
    of_type(
        "items",
        *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
        default="message",
    ),
]
items_of: Callable[[object], list[Any]] = TypeAdapter(list[AnyItem]).validate_python


class FunctionTool(schema.Function):
    """A function that the model may call; OpenAI's own tools are refused."""

    type: Literal["function"]


class ChosenFunction(schema.Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class AllowedTools(schema.Body):
    """The subset of `tools` that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]


class TextFormat(schema.JsonSchema):
    """The format of the text; `name`, `schema` and `strict` belong to a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(schema.Body):
    kinds = ("response_text",)
    format: TextFormat | None = None


class Reasoning(schema.Body):
    """Options of the reasoning."""

    kinds = ("response_reasoning",)
    effort: str | None = Field(None, max_length=100)


class ResponsesRequest(schema.GenerationBody):
    """A request of OpenAI's responses API; also accepts all fields of sampling and drafting."""

    kinds = ("everywhere", "responses")
    input: str | list[AnyItem] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = Field(None, description="Id of a stored response.")
    store: bool = Field(True, description="Keep the response in memory, for later requests.")
    max_output_tokens: schema.MaxTokens = None
    tools: list[Annotated[FunctionTool, of_type("tools", "function")]] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None,
        of_type("tool choices", "function", "allowed_tools"),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = Field(None, description=f"{_LOGPROBS}; others have no effect.")
    top_logprobs: int | None = Field(None, ge=0, le=schema.N_TOP_LOGPROBS)
    metadata: dict[str, Any] | None = Field(None, description="Returned in the response.")
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: schema.PredictedOutput | None = None

    @property
    def items(self) -> list[Any]:
        if isinstance(self.input, list):
            return self.input
        return [MessageItem(type="message", role="user", content=self.input)]

    def chat(self, items: Sequence[StoredItem]) -> schema.ChatRequest:
        """The chat that continues these items. Raises RequestValidationError, ApiError."""
        effort = self.reasoning.effort if self.reasoning else None
        reasoning = thinking_variables(False) if effort == "none" else {}
        form = self.text.format if self.text else None
        has_logprobs = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        return as_chat(
            self,
            messages=_messages_of(items, self.instructions),
            max_tokens=self.max_output_tokens,
            tools=self._tools(),
            tool_choice=_choice_of(self.tool_choice),
            response_format=form
            and {
                "type": form.type,
                "json_schema": None if form.schema_ is None else {"schema": form.schema_},
            },
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=effort,
            logprobs=has_logprobs or None,
            top_logprobs=self.top_logprobs,
            chat_template_kwargs={**reasoning, **(self.chat_template_kwargs or {})},
            prediction=self.prediction,
            continue_final_message=False,
        )

    def _tools(self) -> list[dict[str, Any]]:
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, AllowedTools):
            names = {tool.name for tool in choice.tools}
            tools = [tool for tool in tools if tool.name in names]
            if len(tools) < len(names):
                message = "tool_choice.tools names a function that 'tools' does not have"
                raise ApiError(400, message, param="tool_choice.tools")
        return [
            {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in tools
        ]


@dataclass(frozen=True)
class _Stored:
    response: Document
    items: Sequence[StoredItem]  # the conversation up to the end of the response
    n_bytes: int


class ResponseStore:
    """The latest responses, by id."""

    def __init__(self, n_max: int = N_RESPONSES, n_bytes_max: int = N_BYTES) -> None:
        self._n_max, self._n_bytes_max = n_max, n_bytes_max
        self._found: dict[str, _Stored] = {}
        self._n_bytes = 0

    def items(self, body: ResponsesRequest) -> list[StoredItem]:
        """The conversation: that of an earlier response, and the own input. Raises ApiError."""
        before: Sequence[StoredItem] = ()
        if (id := body.previous_response_id) is not None:
            if id not in self._found:
                raise ApiError(
                    400,
                    f"there is no response {id[:100]!r}: it was never stored, or has been dropped; "
                    "send the whole conversation as 'input'",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            before = self._found[id].items
        own = [self._referred(i) if isinstance(i, ItemReference) else i for i in body.items]
        return [*before, *own]

    def add(self, response: Document, items: Sequence[StoredItem]) -> None:
        text = json.dumps([response, [item.model_dump() for item in items]])
        whole = [*items, *items_of(response["output"])]
        self._found[response["id"]] = _Stored(response, whole, len(text))
        self._n_bytes += len(text)
        while len(self._found) > self._n_max or self._n_bytes > self._n_bytes_max:
            self.delete(next(iter(self._found)))

    def get(self, id: str) -> Document:
        """Raises ApiError for one that is not stored."""
        if id not in self._found:
            raise ApiError(404, f"there is no response {id[:100]!r}", param="response_id")
        return self._found[id].response

    def delete(self, id: str) -> dict[str, Any]:
        """Raises ApiError for one that is not stored."""
        self.get(id)
        self._n_bytes -= self._found.pop(id).n_bytes
        return {"id": id, "object": "response", "deleted": True}

    def _referred(self, reference: ItemReference) -> StoredItem:
        for stored in reversed(self._found.values()):
            for item in stored.response["output"]:
                if item["id"] == reference.id:
                    found: StoredItem = items_of([item])[0]
                    return found
        raise ApiError(
            400,
            f"input: item_reference names {reference.id[:100]!r}, which is no item of a stored "
            "response; send the item itself",
            param="input",
        )


def _choice_of(choice: ChosenFunction | AllowedTools | str | None) -> object:
    if isinstance(choice, ChosenFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode if isinstance(choice, AllowedTools) else choice


def _messages_of(items: Sequence[StoredItem], instructions: str | None) -> list[dict[str, Any]]:
    """The messages: reasoning, text and calls of a turn become one."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if isinstance(item, CallOutputItem):
            output = {
                "role": "tool",
                "tool_call_id": item.call_id,
                "content": content_of(item.output),
            }
            messages.append(output)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": content_of(item.content)})
        else:
            _add_to_turn(messages, item)
    if not messages:
        raise ApiError(400, "'input' is empty; send a text, or items", param="input")
    return messages


def _add_to_turn(
    messages: list[dict[str, Any]], item: MessageItem | CallItem | ReasoningItem
) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    has_text = last is not None and "content" in last and "tool_calls" not in last
    if last is None or (has_text and not isinstance(item, CallItem)):
        last = {"role": "assistant"}
        messages.append(last)
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    else:
        name = "content" if isinstance(item, MessageItem) else "reasoning_content"
        text = joined(item.content) or joined(getattr(item, "summary", ""))
        last[name] = f"{last[name]}\n{text}" if name in last else text
