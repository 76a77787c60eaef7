"""Reads the entries of a chat, parses saved chats, and turns answers into messages."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ggufspec.common.files import default_cache_dir
from ggufspec.common.reading import decoded
from ggufspec.decoding.sampling_options import SAMPLING
from ggufspec.errors import CacheError, PromptError

if TYPE_CHECKING:
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.template_probe import Message

ReadLine = Callable[[str], str]  # prints a prompt, returns a line without its end; raises EOFError

KEPT = (*SAMPLING, "dry_sequence_breakers", "banned_strings")  # options saved with a chat
_PROMPT, _MORE = "> ", ". "
_QUOTES = '"""'
_N_HISTORY = 2000  # lines that are kept
_ESCAPES = re.compile(r"(\x1b\[[0-9;]*m)")


class Entry(NamedTuple):
    text: str
    command: str | None = None  # without its slash


def read_entry(read_line: ReadLine) -> Entry:
    r'''The next entry. A line that ends with \ continues in the next line.

    A block between two """ is a message of several lines. Raises EOFError, KeyboardInterrupt.
    '''
    line = read_line(_PROMPT)
    if line.lstrip().startswith(_QUOTES):
        return Entry(_block(line.lstrip().removeprefix(_QUOTES), read_line))
    lines = [line]
    with contextlib.suppress(EOFError):  # the last line of a file may end with \
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(_MORE))
    text = "\n".join(lines)
    if not text.startswith("/"):
        return Entry(text)
    command, argument = [*text[1:].split(maxsplit=1), "", ""][:2]
    return Entry(argument.strip(), command)


def _block(first: str, read_line: ReadLine) -> str:
    lines = [first]
    with contextlib.suppress(EOFError):
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(read_line(_MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).removeprefix("\n").removesuffix("\n")


def piped_line(prompt: str) -> str:
    """A line of stdin, without a prompt. Raises EOFError; PromptError if it is not UTF-8."""
    if not (line := sys.stdin.buffer.readline()):
        raise EOFError
    return decoded(line, "a line of stdin").removesuffix("\n").removesuffix("\r")


class Keyboard:
    """A terminal with line editing and a history, where Python has readline."""

    def __init__(self, *, color: bool) -> None:
        self._color = color
        self._readline: ModuleType | None = None
        self._history: Path | None = None  # readable only by its owner
        if reconfigure := getattr(sys.stdin, "reconfigure", None):
            reconfigure(errors="replace")  # input that is not UTF-8 must not end the chat
        with contextlib.suppress(ImportError, CacheError, OSError):
            self._readline = importlib.import_module("readline")  # which `input` uses from now on
            path = default_cache_dir() / "chat_history"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._history = path
            self._readline.set_history_length(_N_HISTORY)
            self._readline.read_history_file(path)

    def line(self, prompt: str) -> str:
        """Read a typed line, and add it to the history. Raises EOFError, KeyboardInterrupt."""
        if self._color:
            prompt = click.style(prompt, bold=True)
            if self._readline is not None:  # it needs marks around codes of no width
                prompt = _ESCAPES.sub("\x01\\1\x02", prompt)
        line = input(prompt)
        if self._readline is not None and self._history is not None and line.strip():
            # Saved now, because a second Ctrl-C ends the process without clean-up.
            with contextlib.suppress(OSError):
                self._readline.append_history_file(1, self._history)
        return line


class AnswerForm:
    """Turns the text of an answer into the message that goes into the next prompt.

    Reasoning stays in the message; the template may leave it out of later prompts.
    """

    def __init__(self, engine: Engine, *, is_free: bool) -> None:
        """`is_free`: no constraint determines the form of answers. Raises PromptError."""
        from ggufspec.server.formats.chat_format import format_of

        assert engine.chat_template is not None
        self._vocab = engine.vocab
        self._format = format_of(engine.chat_template)
        self._has_marks = is_free and self._format.has_marks
        # Some marks of reasoning are control tokens, which texts omit. Keep them: without the marks
        # the next prompt could not tell reasoning from the answer.
        marks = self._vocab.specials_in(self._format.text) if self._has_marks else {}
        self.shown_tokens = frozenset(marks.values())

    def message(self, prompt: Sequence[int], text: str) -> Message:
        made: dict[str, Any] = {"role": "assistant", "content": text}
        if not self._has_marks:
            return made
        from ggufspec.engine.reasoning import begun_in, reasoning_after

        begun = begun_in(self._format.syntax, prompt, self._vocab)
        if self._format.syntax.is_harmony:  # its template refuses marks in contents
            from ggufspec.server.formats.deltas import TextDelta

            parser = self._format.parser(begun)
            deltas = [*parser.push(text), *parser.finish()]
            parts = [each for each in deltas if isinstance(each, TextDelta)]
            for name, kind in (("content", "text"), ("reasoning_content", "reasoning")):
                made[name] = "".join(each.text for each in parts if each.kind == kind)
            return made
        reasoning = reasoning_after(self._format.syntax, begun)
        if reasoning is not None and reasoning.is_open:
            made["content"] = begun.lstrip() + text
        return made


def parts_of(document: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """The messages and the sampling options of a saved chat. Raises PromptError."""
    messages, sampling = document.get("messages"), document.get("sampling", {})
    if not isinstance(messages, list) or not isinstance(sampling, dict):
        raise PromptError('it is not a JSON object with a list "messages" and an object "sampling"')
    roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if any(found != role for found, role in zip(turns, cycle(("user", "assistant")), strict=False)):
        raise PromptError("its messages are not those of user and assistant in turn")
    if len(turns) % 2:
        raise PromptError("its last message is not an answer")
    if unknown := sampling.keys() - {*KEPT}:
        raise PromptError(f"there is no sampling option {', '.join(map(repr, sorted(unknown)))}")
    if biases := sampling.get("logit_bias"):
        try:
            sampling["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise PromptError(f"logit_bias is {biases!r}, not numbers by token ids") from error
    return messages, sampling
