"""Renders conversations with a model's chat template, from messages in the form that it expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from ggufspec.common.child import LimitedProcess, LimitExceededError
from ggufspec.common.facts import visible
from ggufspec.engine.message_forms import MessageForms
from ggufspec.engine.template_probe import LimitError, Message, TemplateProbe
from ggufspec.errors import OptionError, PromptError

_N_ERROR = 300  # characters of an error, which may contain text of the template or the messages
_ELSE = "; use another template (--chat-template-file; in Python load(chat_template=...))"
_CONTINUED = "b9kUq "  # the end of the message that is continued; whether the space stays shows


class TemplateProcess(LimitedProcess):
    """The process that renders templates; several may share it."""

    def __init__(self, seconds: float = 2.0) -> None:
        """`seconds`: of processor time for a template; usual ones take a few milliseconds."""
        super().__init__("ggufspec.engine.template_process")
        self._seconds = seconds

    def render(self, source: str, variables: Mapping[str, Any] | None) -> str:
        """The text of the template; without variables, it is compiled only. Raises PromptError."""
        try:
            reply = self.ask([source, variables], seconds=self._seconds)
        except LimitExceededError as error:
            raise LimitError(
                f"the chat template {error} with these messages, and was stopped{_ELSE}"
            ) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"a message, tool or variable is not JSON: {error}") from error
        if (text := reply.get("text")) is not None:
            return str(text)
        what = "is not valid" if variables is None else "cannot render these messages"
        shown = visible(" ".join(reply["error"].split()))
        raise PromptError(f"the chat template {what}: {shown[:_N_ERROR]}")


class ChatTemplate:
    """A Jinja template that turns conversations into prompts, as transformers renders it."""

    def __init__(
        self,
        source: str,
        *,
        bos_text: str,
        eos_text: str,
        source_for_tools: str | None = None,
        variables: Mapping[str, object] | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        """`source_for_tools` replaces `source` where tools are given.

        `variables`: of each conversation, such as pad_token; those of `render` take precedence.
        `process`: shared with other templates; None: one of its own.
        """
        self.source = source
        self.source_for_tools = source_for_tools or source
        self.bos_text = bos_text
        self.eos_text = eos_text
        self._variables = dict(variables or {})
        self._process = process or TemplateProcess()
        self._forms = MessageForms(source, TemplateProbe(self._render))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation, up to where the answer begins.

        Messages are those of OpenAI's API: contents may be lists of text parts, arguments of tool
        calls JSON text or objects. `variables` are passed to the template.
        continue_final_message: the last message has no end; the text continues it.
        Raises PromptError.
        """
        prepared, tools = self._forms.messages(messages), self._forms.tools(tools)
        if not continue_final_message:
            return self._render(prepared, tools, variables, add_generation_prompt)
        final, marked = _marked(prepared[-1])
        text = self._render([*prepared[:-1], marked], tools, variables)
        at = text.rfind(_CONTINUED.strip())
        if at < 0 or final.strip() not in text:
            raise PromptError(
                "the last message cannot be continued: the chat template does not write its "
                "content; leave out continue_final_message, or end with a message of the user"
            )
        return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        given = {
            "bos_token": self.bos_text,
            "eos_token": self.eos_text,
            "documents": None,
            **self._variables,
            **(variables or {}),
            "messages": messages,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render(self.source_for_tools if tools else self.source, given)


def check_template(source: str) -> None:
    """Raise the OptionError of a template that cannot be compiled."""
    if not source:
        raise OptionError("the chat template is empty; give a Jinja template")
    process = TemplateProcess()
    try:
        process.render(source, None)
    except PromptError as error:
        raise OptionError(str(error)) from error
    finally:
        process.close()


def conversation(turns: Sequence[str], system: str | None = None) -> list[Message]:
    """Messages from texts that alternate between user and assistant, after a system message."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = cycle(("user", "assistant"))
    return [
        *start,
        *({"role": role, "content": text} for role, text in zip(roles, turns, strict=False)),
    ]


def _marked(message: Message) -> tuple[str, Message]:
    content = message["content"] or ""
    if isinstance(content, str):
        return content, {**message, "content": content + _CONTINUED}
    *parts, part = content
    text = part["text"]
    return text, {**message, "content": [*parts, {**part, "text": text + _CONTINUED}]}
