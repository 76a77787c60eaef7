"""Bytes of tokens to text, with stop strings; and chat messages to a prompt."""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import cycle
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ggufspec.errors import OptionError, PromptError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and other keys that a template uses

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that do not begin a character


class TextStream:
    """Turns the bytes of tokens into text as they come.

    Holds back what is not certain yet: the first bytes of a character, and text that may be the
    start of a stop string. `stopped` becomes true when a stop string is complete; it and all text
    after it is never returned. `before`: the last bytes of the prompt; if they end inside a
    character, the rest of its bytes is left out.
    """

    def __init__(self, stop: Sequence[str] = (), before: bytes = b"") -> None:
        if "" in stop:
            raise OptionError("a stop string is empty; give at least one character")
        self._stop = sorted(stop)
        self._n_longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
        self._skips = bool(self._decoder.getstate()[0])
        self._decoder.reset()
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """The text that is certain after these bytes."""
        if self._skips:
            data = data.lstrip(_CONTINUATION)
            self._skips = not data
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """The text that was still held back, without the bytes of an incomplete character."""
        text, self._held = self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        first = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        if first >= 0:
            self.stopped = True
            self._held = ""
            return text[:first]
        n_held = self._n_uncertain(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def _n_uncertain(self, text: str) -> int:
        """How many characters at the end of `text` may be the start of a stop string."""
        for n in range(min(len(text), self._n_longest - 1), 0, -1):
            end = text[-n:]
            i = bisect_left(self._stop, end)  # the first that starts with it, if one does
            if i < len(self._stop) and self._stop[i].startswith(end):
                return n
        return 0


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the start of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def conversation(turns: Sequence[str], system: str | None = None) -> list[Message]:
    """Messages of texts that user and assistant wrote in turn, after the system's."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = cycle(("user", "assistant"))
    return [
        *start,
        *({"role": role, "content": text} for role, text in zip(roles, turns, strict=False)),
    ]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    bos_text: str,
    eos_text: str,
    tools: Sequence[Mapping[str, object]] = (),
) -> str:
    """The prompt that a model's own Jinja template makes of a conversation.

    Templates come with model files, from anywhere: they run in a sandbox.
    Raises PromptError for messages or templates that cannot be rendered.
    """
    _check_messages(messages)
    # transformers marks answers for training: {% generation %} ... {% endgeneration %}.
    template = re.sub(r"({%[-+]?\s*)generation\b", r"\1if true", template)
    template = re.sub(r"({%[-+]?\s*)endgeneration\b", r"\1endif", template)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # as in transformers
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            bos_token=bos_text,
            eos_token=eos_text,
            add_generation_prompt=True,
            tools=[dict(tool) for tool in tools] or None,
        )
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise PromptError(
            f"the model's chat template cannot render these messages: {error}"
        ) from error


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
        for key in ("role",) if message.get("tool_calls") else ("role", "content"):
            if not isinstance(message.get(key), str):
                raise PromptError(f"message {i} needs a text {key!r}; found {message.get(key)!r}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
