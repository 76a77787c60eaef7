"""Renders conversations with a model's chat template, from messages in the form that it expects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import cycle
from typing import Any

from ggufspec.common.child import LimitedProcess, LimitExceededError
from ggufspec.common.facts import visible
from ggufspec.errors import OptionError, PromptError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and other keys that a template uses
Tools = Sequence[Mapping[str, object]]

_N_ERROR = 300  # characters of an error, which may contain text of the template or the messages
_ELSE = "; use another template (--chat-template-file; in Python load(chat_template=...))"
_CONTINUED = "b9kUq "  # the end of the message that is continued; whether the space stays shows
_NEEDLE = "q7Zkw"  # what has to be in the text of a short conversation
_ID = "call00001"  # nine letters or digits, which all templates allow
_REASONING = ("reasoning_content", "thinking", "reasoning")


class LimitError(PromptError):
    """A template exceeded a limit of time or memory."""


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
        special_texts: Mapping[str, str] | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        """`source_for_tools` replaces `source` where tools are given.

        `special_texts`: more variables of special tokens, such as pad_token.
        `process`: shared with other templates; None: one of its own.
        """
        self.source = source
        self.source_for_tools = source_for_tools or source
        self.bos_text = bos_text
        self.eos_text = eos_text
        self._special_texts = dict(special_texts or {})
        self._process = process or TemplateProcess()
        self._forms = MessageForms(source, self._render)

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
            **self._special_texts,
            **(variables or {}),
            "messages": messages,
            "tools": list(tools) or None,
            "documents": (variables or {}).get("documents"),
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
    """The text of a message, and a copy of the message that ends with a mark."""
    content = message["content"] or ""
    if isinstance(content, str):
        return content, {**message, "content": content + _CONTINUED}
    *parts, part = content
    text = part["text"]
    return text, {**message, "content": [*parts, {**part, "text": text + _CONTINUED}]}


class MessageForms:
    """What a template expects of messages and tools: found by rendering short conversations."""

    def __init__(self, source: str, render: Callable[[Sequence[Message], Tools], str]) -> None:
        """`render` raises PromptError where the template does not allow something."""
        self._render = render
        self._names_developer = "'developer'" in source or '"developer"' in source
        self._answers: dict[str, bool] = {}

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages for the template. Raises PromptError for malformed messages."""
        _check(messages)
        made: list[Message] = []
        rest = [self._message(message) for message in messages]
        while rest:
            message = rest.pop(0)
            calls = message.get("tool_calls", ())
            if len(calls) < 2 or self._takes_calls(n=2) or not self._takes_calls():
                made.append(message)
                continue
            # A message for each call, with its result behind it, where only one is written.
            for i, call in enumerate(calls):
                later = {"role": message["role"], "content": self._empty(None)}
                made.append({**(later if i else message), "tool_calls": [call]})
                if (at := _result_of(call, rest)) is not None:
                    made.append(rest.pop(at))
        return made

    def tools(self, tools: Tools) -> list[Mapping[str, object]]:
        """The tools, with a description and parameters where the template needs these."""
        return [self._tool(tool) for tool in tools]

    def _tool(self, tool: Mapping[str, object]) -> Mapping[str, object]:
        if not isinstance(tool, Mapping):
            raise PromptError(
                f"a tool is of type {type(tool).__name__}; it must be "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
        function = tool.get("function")
        if not isinstance(function, Mapping) or {*_COMPLETE} <= {*function}:
            return tool
        bare = {"type": "function", "function": {"name": _NEEDLE}}
        if self._writes([_USER], [bare]):
            return tool
        return {**tool, "function": {**_COMPLETE, **function}}

    def _message(self, message: Message) -> dict[str, Any]:
        made = {key: value for key, value in message.items() if value is not None}
        role, content, calls = made["role"], made.get("content"), made.pop("tool_calls", None)
        if role == "developer" and not (self._names_developer and self._takes(role, _NEEDLE)):
            made["role"] = role = "system"
        reasoning = next((made[key] for key in _REASONING if made.get(key)), None)
        if reasoning is not None:
            made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
        if "tool_call_id" in made:
            made["tool_call_id"] = self._id(made["tool_call_id"])
        made["content"] = self._content(role, content)
        if not calls:
            return made
        made["tool_calls"] = [self._call(call) for call in calls]
        if not content:
            made["content"] = self._empty(content)
        elif not self._takes_call("a") and self._takes_call(None):
            made["content"] = None  # else the calls are left out
        elif reasoning and isinstance(content, str) and self._wants_one_text():
            both = f"{reasoning}\n\n{content}"
            made |= {"content": "", "thinking": both, "reasoning_content": both}
        return made

    def _content(self, role: str, content: Any) -> Any:
        if isinstance(content, list):
            text = "\n".join(part["text"] for part in content)
            return content if self._takes(role, _parts("", _NEEDLE)) else text
        takes_text = self._takes(role, _NEEDLE) or not self._takes(role, _parts("", _NEEDLE))
        return (content or "") if takes_text else _parts(content or "")

    def _empty(self, content: str | None) -> str | None:
        """An empty content beside calls: some templates need null, others write "None" for it."""
        forms = ("", None) if content == "" else (None, "")
        return next(filter(self._takes_call, forms), "")

    def _call(self, call: Any) -> Any:
        """The call with its arguments as an object, or as JSON text."""
        function = call.get("function")
        if not isinstance(function, Mapping):
            return call
        arguments = given = function.get("arguments") or {}
        if isinstance(given, str):
            try:
                arguments = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    "the arguments of a tool call are not valid JSON; send them as JSON text"
                ) from error
        if not self._takes_objects():
            # Text as it was written, so that the cache can hold it.
            is_text = isinstance(given, str)
            arguments = given if is_text else json.dumps(given, ensure_ascii=False)
        made = {**call, "function": {**function, "arguments": arguments}}
        return {**made, "id": self._id(call["id"])} if "id" in call else made

    def _id(self, given: Any) -> Any:
        """The id of a call; Mistral's templates allow nine letters or digits only."""
        if self._takes_calls(call_id="call_1") or not self._takes_calls():
            return given
        text = str(given)
        fits = len(text) == len(_ID) and text.isalnum()
        return text if fits else sha256(text.encode()).hexdigest()[: len(_ID)]

    def _wants_one_text(self) -> bool:
        """Whether there may be content or reasoning beside calls, but not both, as for gpt-oss."""
        return not self._takes_call("a", reasoning="b") and self._takes_call("", reasoning="b")

    def _takes(self, role: str, content: object) -> bool:
        """Whether the template writes a content of this kind: a text, or parts."""
        said = {"role": role, "content": content}
        messages: list[Message] = [_USER, said, _USER]
        if role == "tool":
            arguments = {} if self._takes_objects() else "{}"
            messages = [*_called([arguments])[:-1], {**said, "name": "f", "tool_call_id": _ID}]
        elif role != "assistant":
            messages = [said] if role == "user" else [said, _USER]
        return self._writes(messages)

    def _takes_calls(self, *, call_id: str = _ID, n: int = 1) -> bool:
        """Whether calls are written beside one of the empty contents."""
        return any(self._takes_call(content, call_id=call_id, n=n) for content in ("", None))

    def _takes_call(
        self, content: str | None, *, reasoning: str = "", call_id: str = _ID, n: int = 1
    ) -> bool:
        """Whether the last of n calls is written beside this content."""
        filled, empty = (_ARGUMENTS, {}) if self._takes_objects() else (_TEXT, "{}")
        arguments = [*[empty] * (n - 1), filled]
        return self._writes(_called(arguments, content, reasoning, call_id))

    def _takes_objects(self) -> bool:
        """Whether the arguments of calls are objects; else they are JSON text."""

        def writes(arguments: object) -> bool:
            return any(self._writes(_called([arguments], content)) for content in ("", None))

        return writes(_ARGUMENTS) or not writes(_TEXT)

    def _writes(self, messages: Sequence[Message], tools: Tools | None = None) -> bool:
        """Whether the text has the needle, and no value in Python's or JSON's notation."""
        if tools is None:
            tools = [_TOOL] if any(message["role"] == "tool" for message in messages) else []
        key = json.dumps([messages, tools])
        if key not in self._answers:
            try:
                text = self._render(messages, tools)
            except LimitError:
                raise
            except PromptError:
                text = ""
            raw = any(each in text for each in _RAW)
            self._answers[key] = _NEEDLE in text and not raw
        return self._answers[key]


_COMPLETE: Mapping[str, object] = {
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
_TOOL = {"type": "function", "function": {"name": "f", **_COMPLETE}}
_ARGUMENTS = {_NEEDLE: 1}
_TEXT = json.dumps(_ARGUMENTS)
_USER: Message = {"role": "user", "content": "a"}
# Arguments or contents that were written as Python shows them, parts also as JSON.
_RAW = ("{'" + _NEEDLE, "None", f"'text': '{_NEEDLE}", f'"text": "{_NEEDLE}')


def _called(
    arguments: Sequence[object], content: str | None = "", reasoning: str = "", call_id: str = _ID
) -> list[Message]:
    """A conversation with calls and their results."""
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        said |= {"thinking": reasoning, "reasoning_content": reasoning}
    said["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": each}}
        for each in arguments
    ]
    result = {"role": "tool", "content": "b", "name": "f", "tool_call_id": call_id}
    return [_USER, said, *[result] * len(arguments)]


def _result_of(call: Any, messages: Sequence[Message]) -> int | None:
    """Where the result of a call is, among the results that `messages` begin with."""
    for at, message in enumerate(messages):
        if message["role"] != "tool":
            return None
        if message.get("tool_call_id") == call.get("id"):
            return at
    return None


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise PromptError("there are no messages; give at least one with role 'user'")
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(
            f"messages is of type {type(messages).__name__}; give a list of "
            '{"role": ..., "content": ...}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(
                f'message {i} is {message!r}; it must be {{"role": ..., "content": ...}}'
            )
        if not isinstance(role := message.get("role"), str):
            raise PromptError(f"message {i} needs a text 'role'; found {role!r}")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise PromptError(f"message {i} needs a list of calls as 'tool_calls'")
        content = message.get("content")
        if content is None and role == "assistant":
            continue
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise PromptError(
                f"message {i} needs a text 'content', or a list of "
                f'{{"type": "text", "text": ...}}; found {str(content)[:80]!r}'
            )
