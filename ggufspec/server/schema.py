"""The request bodies; fields have the names of OpenAI, llama.cpp and vLLM."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ggufspec.decoding.sampling_options import INT_MAX, NUMBERS, SAMPLER_LETTERS
from ggufspec.engine.options import MAX_INDENT
from ggufspec.server.parts import Body as Body
from ggufspec.server.parts import Parts, TextParts
from ggufspec.server.parts import joined as joined

N_STOPS = 1000
N_CHOICES = 16
N_SAMPLERS = 16
N_TOP_LOGPROBS = 20
N_TOP_PROBS = 100
N_PROMPTS = 64
N_ADAPTERS = 1000
N_MESSAGES = 5000  # a thousand take some milliseconds of processor time

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MaxTokens = Annotated[int | None, Field(ge=-2, le=2**31)]
# fail_fast: 100,000 wrong tokens would be as many errors, and take a second.
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Mixed = Annotated[list[TokenId | str], Field(min_length=1, fail_fast=True)]
# left_to_right: takes half as long.
Bias = tuple[Annotated[int | str, Field(union_mode="left_to_right")], float]
_TOKEN = re.compile(r"[0-9]{1,9}")


def texts_in(prompt: object) -> object:
    """A prompt, or several, with the texts of objects without files, as in llama.cpp's server."""
    match prompt:
        case [*parts] if any(isinstance(each, dict) for each in parts):
            return list(map(texts_in, parts))
        case {"prompt_string": text, **others} if others in ({}, {"multimodal_data": []}):
            return text
        case {"content": [*parts], **others} if parts and not others:
            texts = [text for text in map(_text_of, parts) if isinstance(text, str)]
            return "".join(texts) if len(texts) == len(parts) else prompt
        case _:
            return prompt


def _text_of(part: object) -> object:
    match part:
        case {"type": "text", "text": text, **others} if not others:
            return text
        case _:
            return None


def _without_empty(value: object) -> object:
    """An empty stop string ends nothing: it is left out, as in llama.cpp's server."""
    if isinstance(value, list):
        value = [text for text in value if text != ""]
    return None if value in ("", []) else value


_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Stops = Annotated[list[_Stop], Field(max_length=N_STOPS)]
Stops = Annotated[_Stops | None, BeforeValidator(_without_empty)]
_StopOrStops = Annotated[_Stop | _Stops | None, BeforeValidator(_without_empty)]


class StreamOptions(Body):
    """What a stream contains besides the text."""

    kinds = ("stream_options",)
    include_usage: bool = False


class JsonSchema(Body):
    """A JSON schema for the generated text."""

    kinds = ("schemas",)
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the generated text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Of a json_object.")


class StructuredOutputs(Body):
    """What the generated text must match, with vLLM's names; only one field may be set."""

    kinds = ("structured_outputs",)
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


if TYPE_CHECKING:
    _Numbers = Body
else:  # sampling; GenerationBody accepts further values of top_p and top_k
    _Numbers = pydantic.create_model(
        "_Numbers",
        __base__=Body,
        **{
            name: (
                type(default) | None,
                Field(
                    None,
                    le=check.most,
                    **{"gt" if getattr(check, "above", False) else "ge": check.least},
                ),
            )
            for name, (default, check, _) in NUMBERS.items()
        },
    )


class AdapterScale(Body):
    """The scale of a loaded LoRA adapter, as in llama.cpp's server."""

    id: int
    scale: float


class GenerationBody(_Numbers):
    """The fields that all requests for text share."""

    kinds: ClassVar[tuple[str, ...]] = ("everywhere",)

    model: str | None = Field(
        None, max_length=1000, description="Ignored: the server has one model."
    )
    max_tokens: MaxTokens = Field(
        None,
        description="0: the prompt is cached, and the text is empty; -1: no limit; -2: up to the "
        "end of the context, also with --context-shift.",
    )
    min_tokens: int | None = Field(
        None, ge=0, le=2**31, description="Minimum number of tokens before an end token is allowed."
    )
    t_max_predict_ms: int | None = Field(
        None, ge=-1, le=2**53, description="Milliseconds, after which the text ends with its line."
    )
    n_indent: int = Field(
        0,
        ge=0,
        le=MAX_INDENT,
        description="The text ends before a line with less white space before it.",
    )
    reasoning_budget_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31,
        description="Maximum number of tokens of reasoning, after which its end is forced; 0: it "
        "ends at once; -1: no limit.",
    )
    n_keep: int | None = Field(
        None, ge=-1, le=INT_MAX, description="Number of first tokens that --context-shift keeps."
    )
    top_p: float | None = Field(None, ge=0, le=1, description="0: the most likely token alone.")
    top_k: int | None = Field(None, ge=-1, le=INT_MAX, description="0 or -1: off.")
    repetition_penalty: float | None = Field(
        None, gt=0, description="As repeat_penalty, but for all tokens of prompt and text."
    )
    dry_sequence_breakers: list[str] | None = Field(None, max_length=N_SAMPLERS)
    samplers: list[str] | None = Field(
        None, max_length=N_SAMPLERS, description="Names, or a text of llama.cpp's letters for them."
    )
    logit_bias: list[Bias] | None = Field(
        None,
        description="Pairs, or an object, of token ids and numbers; false bans a token. A text "
        "stands for each of its tokens.",
    )
    seed: int | None = Field(None, description="-1: a random one.")
    stop: _StopOrStops = None
    banned_strings: _StopOrStops = Field(
        None, description="The text never contains them, in upper or lower case."
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=N_STOPS)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=N_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = Field(None, description="GBNF or Lark.")
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    skip_special_tokens: bool = Field(
        True, description="false: the names of control tokens are part of the text."
    )
    return_tokens: bool = Field(False, description="Add the token ids of the text as `tokens`.")
    speculative: bool = Field(True, description="false: decode without drafts.")
    draft_n: int | Literal["auto"] | None = Field(
        None, description="Draft length; 0: decode without drafts."
    )
    drafter: str | None = Field(None, max_length=100, description="As --drafter.")
    tree: str | None = Field(None, max_length=100, description="As --tree.")
    verify: str | None = Field(None, max_length=100, description="As --verify.")
    lora: list[AdapterScale] | None = Field(
        None, max_length=N_ADAPTERS, description="LoRA adapters, with the scales that are loaded."
    )
    report_drafted: bool = Field(
        False, description="Add `ggufspec`: which tokens were accepted drafts, and statistics."
    )

    @field_validator("samplers", mode="before")
    @classmethod
    def _of_letters(cls, value: object) -> object:
        if isinstance(value, str):
            return [SAMPLER_LETTERS.get(each, each) for each in value]
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: object) -> object:
        """Converts an object to pairs, and false to -inf."""
        is_token = _TOKEN.fullmatch
        if isinstance(value, dict):
            value = [(int(of) if is_token(of) else of, value[of]) for of in value]
        if not isinstance(value, list):
            return value
        try:
            return [(of, -math.inf if bias is False else bias) for of, bias in value]
        except (TypeError, ValueError) as error:
            raise PydanticCustomError(
                "biases", "send an object of token ids and biases, or a list of such pairs"
            ) from error


class CompletionRequest(GenerationBody):
    """A prompt, or several, to continue."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=N_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=N_PROMPTS)]
    )
    suffix: str | None = Field(None, description="The text is between the prompt and this one.")
    logprobs: int | None = Field(None, ge=0, le=N_TOP_LOGPROBS)
    n_probs: int = Field(0, ge=0, le=N_TOP_PROBS, description="As `logprobs`, in llama.cpp.")
    post_sampling_probs: bool = Field(
        False, description="Probabilities are those that tokens were drawn with."
    )
    echo: bool = Field(
        False, description="Begin the text with the prompt, also its log-probabilities."
    )
    best_of: int | None = Field(None, ge=1, description="As `n`, or left out.")
    add_special_tokens: bool = Field(True, description="Begin with the BOS token.")


class CalledFunction(Body):
    """The name of a called function, and its arguments."""

    kinds = ("calls",)
    name: str
    arguments: str | dict[str, Any] = Field("", description="Any text; usually a JSON object.")


class ToolCall(Body):
    """A tool call in a message of the assistant."""

    kinds = ("calls",)
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """One message of a conversation."""

    kinds: ClassVar[tuple[str, ...]] = ("messages",)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = Field(None, validate_default=True)
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = Field(None, description="As one of tool_calls.")
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _may_be_null(cls, content: object, info: ValidationInfo) -> object:
        if content is None and info.data.get("role") in ("system", "developer", "user"):
            raise PydanticCustomError(
                "no_content", "only contents of the assistant and of tools can be null; send a text"
            )
        return content

    @property
    def text(self) -> str:
        """The content; several parts are joined as lines, as in llama.cpp and vLLM."""
        return joined(self.content, "\n")


class Function(Body):
    """A function that the model may call."""

    kinds = ("tools",)
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="true: the arguments of a call match the schema.")


class Tool(Body):
    """A tool that the model may use."""

    kinds = ("tools",)
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str = Field(min_length=1, max_length=256)


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class PredictedOutput(Body):
    """A text that the answer may repeat, such as a file before an edit."""

    type: Literal["content"]
    content: str | TextParts


class ChatRequest(GenerationBody):
    """A conversation to continue with a message of the assistant."""

    kinds = ("everywhere", "chats")
    messages: list[ChatMessage] = Field(min_length=1, max_length=N_MESSAGES)
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=N_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="auto: the model decides; required: it calls one, or several if "
        "parallel_tool_calls is true; none: no tools are offered to it; or the function to call.",
    )
    prediction: PredictedOutput | None = Field(
        None, description="Tokens are drafted from it; it does not change the text."
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
    add_generation_prompt: bool = Field(
        True, description="false: only with `continue_final_message`."
    )


class PredictRequest(GenerationBody):
    """A prompt; the response is the prompt with its continuation."""

    prompt: str
    max_tokens: MaxTokens = 40
