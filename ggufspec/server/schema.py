"""The bodies that clients send, by OpenAI's names where it has one. Knows types, no meanings.

Fields that are not named here are passed over, as OpenAI's clients send many; those that would
change the answer, and cannot be had, are named in `refused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

N_STOPS = 16
N_CHOICES = 16
N_TOP_LOGPROBS = 20
N_PROMPTS = 64

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Tokens = Annotated[list[TokenId], Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Body):
    """What a stream tells besides the text."""

    include_usage: bool = False


class JsonSchema(_Body):
    """A schema that the answer is held to."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class _Generation(_Body):
    """What all requests for text share."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # and the values that ask for nothing

    model: str | None = Field(None, max_length=1000, description="There is one; any name is taken.")
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
    speculative: bool = Field(True, description="Off: the target writes alone.")
    report_drafted: bool = Field(
        False, description="Tell in `ggufspec` who wrote each token, and the statistics."
    )


class CompletionRequest(_Generation):
    """A text, or several, to continue."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "suffix": (None, ""),
        "echo": (None, False),
        "best_of": (None, 1),
    }

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Tokens
        | Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=N_PROMPTS)
        ]
        | Annotated[list[Tokens], Field(min_length=1, max_length=N_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=N_TOP_LOGPROBS)


class TextPart(_Body):
    """Part of a message. There are no others than text."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """The function that was called, and the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(_Body):
    """A call that the model has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content, its parts in a row."""
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


class ChatRequest(_Generation):
    """A conversation to answer."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "web_search_options": (None,),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=N_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = Field(
        None, description="Whether to call a tool is the model's own choice."
    )


class PredictRequest(_Generation):
    """A prompt, to be had back with its continuation."""

    prompt: str = Field(min_length=1)
    max_tokens: int | None = Field(40, ge=1, le=2**31)


class TokenizeRequest(_Body):
    """A text to be cut into tokens."""

    content: str
    add_special: bool = Field(False, description="With the token that begins a text.")
    parse_special: bool = Field(True, description="Names of special tokens become those.")


class DetokenizeRequest(_Body):
    """Tokens to be made text again."""

    tokens: list[TokenId]
