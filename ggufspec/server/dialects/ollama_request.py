"""Reads requests of Ollama's API as chats and completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ggufspec.server import schema
from ggufspec.server.dialects.chat_request import as_chat, thinking_variables


class OllamaOptions(schema.GenerationBody):
    """Options of sampling and of the text's end."""

    kinds = ("everywhere", "ollama_options")


class OllamaMessage(schema.ChatMessage):
    """One message of a conversation."""

    kinds = ("messages", "ollama", "ollama_messages")


class OllamaRequest(schema.Body):
    """A conversation, or a prompt, to answer; without either, nothing is generated."""

    kinds = ("ollama",)
    model: str | None = Field(None, max_length=1000, description="Ignored: there is one model.")
    messages: list[OllamaMessage] | None = None
    prompt: str = ""
    system: str | None = Field(None, description="With a prompt.")
    raw: bool = Field(False, description="true: the prompt is continued, without chat template.")
    tools: list[schema.Tool] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="For the chat template; a level is its `reasoning_effort`."
    )
    options: OllamaOptions = OllamaOptions.model_construct()
    stream: bool = True

    def chat(self) -> schema.ChatRequest:
        """The request as a chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return as_chat(
            self.options,
            messages=self.messages or [*system, {"role": "user", "content": self.prompt}],
            tools=self.tools,
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            chat_template_kwargs=thinking_variables(self.think),
            stream=self.stream,
            json_schema={"type": "object"} if self.format == "json" else self.format or None,
        )

    def completion(self) -> schema.CompletionRequest:
        """The request as a completion."""
        chat = self.chat()
        names = chat.model_fields_set & schema.GenerationBody.model_fields.keys()
        made = {name: getattr(chat, name) for name in names}
        return schema.CompletionRequest(**made, prompt=self.prompt)
