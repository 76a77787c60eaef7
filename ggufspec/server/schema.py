"""The request bodies, with OpenAI's names; unknown fields are ignored, as clients send many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

N_STOPS = 16
N_CHOICES = 16
N_TOP_LOGPROBS = 20
N_PROMPTS = 64

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Tokens = Annotated[list[TokenId], Field(min_length=1)]


def _only(*harmless: object) -> Callable[[object], object]:
    """A check for a field that is not supported: only values without an effect are accepted."""

    def check(value: object) -> object:
        if value not in harmless:
            raise PydanticCustomError("unsupported", "is not supported; leave it out")
        return value

    return check


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Body):
    """What a stream contains besides the text."""

    include_usage: bool = False


class JsonSchema(_Body):
    """A JSON schema for the generated text."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The format of the generated text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class GenerationBody(_Body):
    """The fields that all requests for text have."""

    model: str | None = Field(
        None, max_length=1000, description="Ignored: the server has one model."
    )
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[TokenKey, float] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=N_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=N_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    speculative: bool = Field(True, description="false: decode without drafts.")
    report_drafted: bool = Field(
        False, description="Add `ggufspec`: which tokens were accepted drafts, and statistics."
    )


class CompletionRequest(GenerationBody):
    """A prompt, or several, to continue."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Tokens
        | Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=N_PROMPTS)
        ]
        | Annotated[list[Tokens], Field(min_length=1, max_length=N_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=N_TOP_LOGPROBS)
    suffix: Annotated[Any, AfterValidator(_only(None, ""))] = None
    echo: Annotated[Any, AfterValidator(_only(None, False))] = None
    best_of: Annotated[Any, AfterValidator(_only(None, 1))] = None


class TextPart(_Body):
    """Part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """The name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(_Body):
    """A tool call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(None, validate_default=True)
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )

    @field_validator("content")
    @classmethod
    def _may_be_null(cls, content: object, info: ValidationInfo) -> object:
        if content is None and info.data.get("role") not in ("assistant", None):
            raise PydanticCustomError("no_content", "only the assistant's can be null; send a text")
        return content

    @property
    def text(self) -> str:
        """The content; several parts are joined."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(_Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    """The name of a function."""

    name: str = Field(min_length=1, max_length=256)


class NamedTool(_Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationBody):
    """A conversation to continue with a message of the assistant."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=N_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="auto: the model decides; required: at least one call; none: no tools are "
        "offered to it; or the one function that is called.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call in a response."
    )
    reasoning_effort: str | None = Field(
        None, max_length=100, description="Passed to the chat template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='Variables for the chat template, such as {"enable_thinking": false}.'
    )
    continue_final_message: bool | None = Field(
        None,
        description="Whether the last message is continued; by default, if it is the assistant's.",
    )
    functions: Annotated[Any, AfterValidator(_only(None, []))] = None
    function_call: Annotated[Any, AfterValidator(_only(None, "none", "auto"))] = None
    modalities: Annotated[Any, AfterValidator(_only(None, ["text"]))] = None
    audio: Annotated[Any, AfterValidator(_only(None))] = None
    prediction: Annotated[Any, AfterValidator(_only(None))] = None
    web_search_options: Annotated[Any, AfterValidator(_only(None))] = None


class PredictRequest(GenerationBody):
    """A prompt; the response is the prompt with its continuation."""

    prompt: str = Field(min_length=1)
    max_tokens: int | None = Field(40, ge=1, le=2**31)


class TokenizeRequest(_Body):
    """A text to tokenize."""

    content: str
    add_special: bool = Field(False, description="Begin with the BOS token.")
    parse_special: bool = Field(True, description="Parse names of special tokens as those tokens.")


class DetokenizeRequest(_Body):
    """Token ids to turn into text."""

    tokens: list[TokenId]
