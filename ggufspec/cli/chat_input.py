"""Reads messages and commands of a chat, from a terminal or line by line from stdin."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click

from ggufspec.common.files import default_cache_dir
from ggufspec.common.reading import decoded
from ggufspec.errors import CacheError

ReadLine = Callable[[str], str]  # prints a prompt, returns a line without its end; raises EOFError

_PROMPT, _MORE = "> ", ". "
_QUOTES = '"""'
_N_HISTORY = 2000  # lines that are kept
_ESCAPES = re.compile(r"(\x1b\[[0-9;]*m)")


class Entry(NamedTuple):
    """A message, or a command with its argument in `text`."""

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
        self._readline = _readline()
        self._history: Path | None = None
        if reconfigure := getattr(sys.stdin, "reconfigure", None):
            reconfigure(errors="replace")  # input that is not UTF-8 must not end the chat
        if self._readline is not None:
            with contextlib.suppress(CacheError, OSError):
                self._history = _history_file()
                self._readline.set_history_length(_N_HISTORY)
                self._readline.read_history_file(self._history)

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


def _readline() -> ModuleType | None:
    try:
        import readline  # `input` uses it once it is imported
    except ImportError:
        return None
    return readline


def _history_file() -> Path:
    """The path of the history file, readable only by its owner. Raises CacheError, OSError."""
    path = default_cache_dir() / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path
