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
from ggufspec.engine.message_forms import LimitError, Message, MessageForms
from ggufspec.errors import OptionError, PromptError

_N_ERROR = 300  # characters of an error, which may contain text of the template or the messages
_ELSE = "; use another template (--chat-template-file; in Python load(chat_template=...))"
_CONTINUED = "b9kUq "  # the end of the message that is continued; whether the space stays shows


class TemplateProcess:
    """The process that renders templates: started when needed, and again after a limit ended it.

    May be used from several threads, one at a time.
    """

    def __init__(self, seconds: float = template_process.SECONDS) -> None:
        """`seconds`: that a template may run."""
        self._seconds = seconds
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
        except (OSError, ValueError):
            pass  # it has ended, or was closed
        except BaseException:
            self.close()  # interrupted: the next reply would be that of this request
            raise
        status = process.wait()
        self.close()
        what = {
            template_process.EXIT_TIME: f"ran for more than {self._seconds:g} s",
            template_process.EXIT_MEMORY: f"needed more than {template_process.MEGABYTES} MB",
        }.get(status, f"ended its process (status {status})")
        raise LimitError(f"the chat template {what} with these messages, and was stopped{_ELSE}")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            arguments = [self._seconds, *map(_folder, ("jinja2", "markupsafe"))]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", template_process.__file__, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


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
    """Messages of texts that user and assistant wrote in turn, after the system's."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = cycle(("user", "assistant"))
    return [
        *start,
        *({"role": role, "content": text} for role, text in zip(roles, turns, strict=False)),
    ]


def _marked(message: Message) -> tuple[str, Message]:
    """The text of a message, and the message with a mark at its end."""
    content = message["content"] or ""
    if isinstance(content, str):
        return content, {**message, "content": content + _CONTINUED}
    *parts, part = content
    text = part["text"]
    return text, {**message, "content": [*parts, {**part, "text": text + _CONTINUED}]}


def _folder(module: str) -> Path:
    """The folder that a module is imported from."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise PromptError(f"chat templates need {module}; run: pip install {module}")
    return Path(found.origin).parent.parent


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
