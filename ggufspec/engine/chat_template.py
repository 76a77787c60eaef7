"""Renders conversations with a model's chat template, in a process with limits."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from ggufspec.engine import template_process
from ggufspec.errors import OptionError, PromptError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and other keys that a template uses

_N_ERROR = 300  # characters of an error, which may contain text of the template or the messages
_ELSE = "; use another template (--chat-template-file; in Python load(chat_template=...))"
_CONTINUED = "b9kUq "  # the end of the message that is continued; whether the space stays shows
_NEEDLE = "q7Zkw"  # the content of messages that find out what a template does
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateProcess:
    """The process that renders templates: started when needed, and again after a limit ended it.

    May be used from several threads, one at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, source: str, variables: Mapping[str, Any] | None) -> str:
        """The text of the template; without variables, it is compiled only. Raises PromptError."""
        try:
            request = json.dumps({"template": source, "variables": variables})
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"a message, tool or variable is not JSON: {error}") from error
        with self._lock:
            reply = self._ask(request.encode() + b"\n")
        if (text := reply.get("text")) is not None:
            return text
        shown = "".join(each if each.isprintable() else " " for each in reply["error"])
        what = "is not valid" if variables is None else "cannot render these messages"
        raise PromptError(f"the chat template {what}: {' '.join(shown.split())[:_N_ERROR]}")

    def close(self) -> None:
        """End the process. Closing twice is fine; a later use starts it again."""
        self._end()

    def _ask(self, request: bytes) -> dict[str, str]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            if (reply := process.stdout.readline()).endswith(b"\n"):
                found: dict[str, str] = json.loads(reply)
                return found
        except OSError:
            pass  # it has ended
        except BaseException:
            self.close()  # interrupted: the next reply would be that of this request
            raise
        status = process.wait()
        self.close()
        raise LimitError(_why_ended(status))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            folders = [str(_folder(name)) for name in ("jinja2", "markupsafe")]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", template_process.__file__, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


class LimitError(PromptError):
    """A template exceeded a limit of time or memory."""


class ChatTemplate:
    """A Jinja template that turns conversations into prompts, as transformers renders it.

    What a template expects of messages differs: it is found out by rendering short ones.
    """

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

        `special_texts`: more variables of special tokens, such as unk_token.
        `process`: shared with other templates; None: one of its own.
        """
        self.source = source
        self.source_for_tools = source_for_tools or source
        self.bos_text = bos_text
        self.eos_text = eos_text
        self._special_texts = dict(special_texts or {})
        self._process = process or TemplateProcess()
        self._found: dict[object, bool] = {}  # what a probe found out

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
        _check_messages(messages)
        prepared = [self._prepared(message) for message in messages]
        if not continue_final_message:
            return self._render(prepared, tools, variables, add_generation_prompt)
        final = _final_text(prepared)
        text = self._render(_marked(prepared), tools, variables, False)
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
        tools: Sequence[Mapping[str, object]],
        variables: Mapping[str, object] | None,
        add_generation_prompt: bool,
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

    def _prepared(self, message: Message) -> dict[str, Any]:
        """The message as this template expects it."""
        made = {key: value for key, value in message.items() if value is not None}
        if made["role"] == "developer" and not self._has_developer:
            made["role"] = "system"
        reasoning = next((made[key] for key in _REASONING if key in made), None)
        if reasoning is not None:
            made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
        calls = made.pop("tool_calls", None)
        if calls:
            made["tool_calls"] = [self._prepared_call(call) for call in calls]
        made["content"] = self._prepared_content(made["role"], message.get("content"), bool(calls))
        return made

    def _prepared_content(self, role: str, content: Any, has_calls: bool) -> Any:
        if has_calls and not content:
            # Some templates write calls only beside a content of null, others "None" for it.
            other = "" if content is None else None
            keeps = self._writes_calls(content) or not self._writes_calls(other)
            return content if keeps else other
        if content is None:
            return ""
        if isinstance(content, str):
            takes_text = self._takes(role, _NEEDLE) or not self._takes(role, _parts(_NEEDLE))
            return content if takes_text else _parts(content)
        if self._takes(role, _parts(_NEEDLE)):
            return content
        return "".join(part["text"] for part in content)

    def _prepared_call(self, call: Any) -> Any:
        """The call with its arguments as an object, or as JSON text, as the template expects."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    "the arguments of a tool call are not valid JSON; send them as JSON text"
                ) from error
        if not self._takes_objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    @property
    def _has_developer(self) -> bool:
        return "'developer'" in self.source or '"developer"' in self.source

    @property
    def _takes_objects(self) -> bool:
        """Whether the arguments of calls may be objects: they are not written as Python does."""
        if self._probe("objects", _called({_NEEDLE: 1}), never="{'" + _NEEDLE):
            return True
        return not self._probe("text", _called(json.dumps({_NEEDLE: 1})))

    def _writes_calls(self, content: str | None) -> bool:
        """Whether calls are written beside this empty content."""
        arguments = {_NEEDLE: 1} if self._takes_objects else json.dumps({_NEEDLE: 1})
        return self._probe(("calls", content), _called(arguments, content), never="None")

    def _takes(self, role: str, content: Any) -> bool:
        """Whether it writes a content of this kind: a text, or parts."""
        user, said = {"role": "user", "content": "a"}, {"role": role, "content": content}
        messages: list[Message] = [user, said, user]
        if role == "tool":
            messages = [*_called({})[:-1], {**said, "tool_call_id": _CALL_ID}]
        elif role != "assistant":
            messages = [said] if role == "user" else [said, user]
        return self._probe((role, type(content)), messages, never=f"'text': '{_NEEDLE}")

    def _probe(self, key: object, messages: Sequence[Message], never: str = "\0") -> bool:
        """Whether the text of these messages has the needle, and not `never`."""
        if key not in self._found:
            tools = _TOOLS if any(message["role"] == "tool" for message in messages) else ()
            try:
                text = self._render(messages, tools, None, False)
            except LimitError:
                raise
            except PromptError:
                text = ""
            self._found[key] = _NEEDLE in text and never not in text
        return self._found[key]


_CALL_ID = "call00001"  # Mistral's templates want nine letters or digits
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {_NEEDLE: {"type": "integer"}}},
        },
    },
)


def _called(arguments: object, content: str | None = "") -> list[Message]:
    """A conversation with a call and its result."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "b", "name": "f", "tool_call_id": _CALL_ID},
    ]


def check_template(source: str) -> None:
    """Raise the OptionError of a template that cannot be compiled."""
    process = TemplateProcess()
    try:
        process.render(source, None)
    except PromptError as error:
        raise OptionError(str(error)) from error
    finally:
        process.close()


def conversation(turns: Sequence[str], system: str | None = None) -> list[Message]:
    """Messages of texts that user and assistant wrote in turn, after the system's."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = cycle(("user", "assistant"))
    return [
        *start,
        *({"role": role, "content": text} for role, text in zip(roles, turns, strict=False)),
    ]


def _check_messages(messages: Sequence[Message]) -> None:
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
        content = message.get("content")
        if content is None and role == "assistant":
            continue
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise PromptError(
                f"message {i} needs a text 'content', or a list of "
                f'{{"type": "text", "text": ...}}; found {content!r}'
            )


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _final_text(messages: Sequence[Message]) -> str:
    content = messages[-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark at the end of the last one."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": content + _CONTINUED}]
    *parts, part = content
    content = [*parts, {**part, "text": part["text"] + _CONTINUED}]
    return [*before, {**last, "content": content}]


def _folder(module: str) -> Path:
    """The folder that a module is imported from."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise PromptError(f"chat templates need {module}; run: pip install {module}")
    return Path(found.origin).parent.parent


def _why_ended(status: int) -> str:
    limit = {
        template_process.EXIT_TIME: f"ran for more than {template_process.SECONDS:.0f} s",
        template_process.EXIT_MEMORY: f"needed more than {template_process.MEGABYTES} MB",
    }.get(status, f"ended its process (status {status})")
    return f"the chat template {limit} with these messages, and was stopped{_ELSE}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
