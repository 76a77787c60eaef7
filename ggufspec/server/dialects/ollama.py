"""Reads requests of Ollama's API as chats, and writes their answers; describes the model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.server import schema
from ggufspec.server.dialects.shared import JSON_LINES, Answer, as_chat, thinking_variables
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceEvent, ParsedRequest
from ggufspec.server.formats.chat_format import format_of
from ggufspec.server.parts import encoded_image

_LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc).timestamp()
VERSION = "0.12.0"  # of the API: clients check it before they use tools and reasoning


class OllamaOptions(schema.GenerationBody):
    """Options of sampling and of the text's end."""

    kinds = ("everywhere", "ollama_options")


class OllamaMessage(schema.ChatMessage):
    """One message of a conversation."""

    kinds = ("messages", "ollama", "ollama_messages")
    images: list[str] | None = Field(None, description="Files in base64.")

    def with_images(self) -> schema.ChatMessage:
        if not self.images:
            return self
        made = self.model_dump(exclude={"images"}, exclude_none=True)
        return schema.ChatMessage(**made | {"content": _content(self.text, self.images)})


class OllamaRequest(schema.Body):
    """A conversation, or a prompt, to answer; without either, nothing is generated."""

    kinds = ("ollama",)
    model: str | None = Field(None, max_length=1000, description="Ignored: there is one model.")
    messages: list[OllamaMessage] | None = None
    prompt: str = ""
    images: list[str] | None = Field(None, description="Files in base64, with a prompt.")
    system: str | None = Field(None, description="With a prompt.")
    suffix: str = Field("", description="The text is between the prompt and this one.")
    raw: bool = Field(False, description="true: the prompt is continued, without chat template.")
    tools: list[schema.Tool] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="For the chat template; a level is its `reasoning_effort`."
    )
    options: OllamaOptions = OllamaOptions.model_construct()
    stream: bool = True

    def chat(self) -> schema.ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return as_chat(
            self.options,
            messages=[each.with_images() for each in self.messages or ()]
            or [*system, {"role": "user", "content": _content(self.prompt, self.images)}],
            tools=self.tools,
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            chat_template_kwargs=thinking_variables(self.think),
            stream=self.stream,
            json_schema={"type": "object"} if self.format == "json" else self.format or None,
        )

    def completion(self) -> schema.CompletionRequest:
        """Raises OptionError."""
        if self.images:
            raise OptionError("'raw' and 'suffix' take no images: leave them out, or the images")
        chat = self.chat()
        names = chat.model_fields_set & schema.GenerationBody.model_fields.keys()
        made = {name: getattr(chat, name) for name in names}
        return schema.CompletionRequest(**made, prompt=self.prompt, suffix=self.suffix)


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """The images stand before the text."""
    if not images:
        return text
    return [*map(encoded_image, images), {"type": "text", "text": text}]


class OllamaRenderer:
    """The answer to one request; None: to a request that only loads a model."""

    framing = JSON_LINES

    def __init__(self, parsed: ParsedRequest | None, model: str, *, is_chat: bool) -> None:
        self._answer = Answer(0, parsed.parser() if parsed and parsed.parser else None)
        self._line = partial(line_of_stream, model, is_chat=is_chat)

    def add(self, event: ChoiceEvent) -> list[dict[str, Any]]:
        steps = [(step.part.kind, step.delta.text) for step in self._answer.add(event)]
        return [
            self._line(text) if kind == "text" else self._line(thinking=text)
            for kind, text in steps
            if kind != "call"
        ]

    def end(self) -> list[dict[str, Any]]:
        calls = [self._line(calls=found)] if (found := self._calls()) else []  # calls are not split
        return [*calls, self._line() | self._end()]

    def body(self) -> dict[str, Any]:
        answer = self._answer
        return self._line(answer.text, answer.joined("reasoning"), self._calls()) | self._end()

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        return [{"error": error.detail}]

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in self._answer.calls
        ]

    def _end(self) -> dict[str, Any]:
        if self._answer.finish_reason is None:
            return {"done": True, "done_reason": "load"}
        stats = self._answer.stats
        seconds = stats.seconds.prompt, stats.seconds.generation
        n_reading, n_writing = (round(each * 1e9) for each in seconds)
        return {
            "done": True,
            "done_reason": "length" if self._answer.finish_reason == "length" else "stop",
            "total_duration": n_reading + n_writing,
            "load_duration": 0,
            "prompt_eval_count": stats.n_prompt,
            "prompt_eval_duration": n_reading,
            "eval_count": stats.n_generated,
            "eval_duration": n_writing,
        }


def line_of_stream(
    model: str, text: str = "", thinking: str = "", calls: Any = (), *, is_chat: bool
) -> dict[str, Any]:
    """A line of a stream that goes on."""
    more: dict[str, Any] = {"thinking": thinking} if thinking else {}
    more |= {"tool_calls": calls} if calls else {}
    message = {"role": "assistant", "content": text, **more}
    said = {"message": message} if is_chat else {"response": text, **more}
    now = datetime.now(timezone.utc).isoformat()
    return {"model": model, "created_at": now, **said, "done": False}


class ModelFacts(NamedTuple):
    """What Ollama's API says of a model."""

    family: str
    quantization: str
    n_params: int
    n_bytes: int
    n_ctx: int
    template: str
    abilities: Sequence[str]


def described(engine: Engine, name: str, started_at: int) -> dict[str, Any]:
    """Describes the model, in the form of Ollama's list and of `/api/show`."""
    model, template = engine.pair.target.model, engine.chat_template
    family, _, quantization = model.description.split(maxsplit=2)
    form = template and format_of(template)
    abilities = {
        "tools": form and form.tools,
        "thinking": form and form.syntax.reasoning,
        "vision": engine.pair.target.projector,
    }
    facts = ModelFacts(
        *(family, quantization, model.n_params, model.n_bytes, engine.n_ctx),
        template="" if template is None else template.source,
        abilities=[ability for ability, has in abilities.items() if has],
    )
    return description(facts, name, started_at)


def description(facts: ModelFacts, name: str, started_at: int) -> dict[str, Any]:
    n, family = facts.n_params, facts.family
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(started_at, timezone.utc).isoformat(),
        "size": facts.n_bytes,
        "digest": "",
        "details": {
            "family": family,
            "families": [family],
            # As Ollama writes it; llama.cpp's own names are of the nearest family.
            "parameter_size": f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M",
            "quantization_level": facts.quantization,
        },
        "template": facts.template,
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": n,
            f"{family}.context_length": facts.n_ctx,
        },
        "capabilities": ["completion", *facts.abilities],
    }


def running(shown: dict[str, Any], ends: float, n_gpu_bytes: int) -> dict[str, Any]:
    """A model of Ollama's list of loaded ones, from its description; `ends`: in Unix time."""
    found = {name: shown[name] for name in ("name", "model", "size", "digest", "details")}
    when = datetime.fromtimestamp(min(ends, _LATEST), timezone.utc).isoformat()
    return found | {"expires_at": when, "size_vram": n_gpu_bytes}
