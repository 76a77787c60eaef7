"""Reads files that a user names, with errors that say which file; and TOML."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ggufspec.errors import GgufspecError, PromptError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 2**30  # largest file that is read: an endless one must be refused
TOMLDecodeError = tomllib.TOMLDecodeError
parse_toml: Callable[[str], dict[str, Any]] = tomllib.loads
PIPE_SECONDS = 5.0  # time to wait for a program to write to a named pipe


def read_file(path: Path, what: str, failure: type[GgufspecError]) -> bytes:
    """The bytes of a file or pipe, or of stdin for "-".

    Raises `failure`, also for a named pipe that nothing is written to within PIPE_SECONDS.
    """
    data = bytearray()
    try:
        is_stdin = str(path) == "-"
        with contextlib.nullcontext(sys.stdin.buffer) if is_stdin else _open(path) as file:
            while chunk := file.read(2**20):
                data += chunk
                if len(data) > MOST_BYTES:
                    raise failure(f"{what} {path} is longer than {MOST_BYTES:,} bytes; split it")
        if not data and not is_stdin and path.is_fifo():
            raise failure(
                f"{what} {path} is a pipe that no program has written to; start the program that "
                "writes to it first"
            )
    except IsADirectoryError as error:
        raise failure(f"{what} {path} is a folder; name a file in it") from error
    except OSError as error:
        raise failure(f"{what} {path} cannot be read: {error.strerror or error}") from error
    return bytes(data)


def read_toml(path: Path) -> dict[str, Any]:
    return parse_toml(path.read_text(encoding="utf-8"))


def read_text(path: Path, what: str, failure: type[GgufspecError] = PromptError) -> str:
    """The text of a file; see `read_file` and `decoded`. Raises `failure`, and PromptError."""
    return decoded(read_file(path, what, failure), f"{what} {path}")


def decoded(data: bytes, where: str) -> str:
    """A file's text without its byte order mark. Raises PromptError if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; "
            "convert it to UTF-8 first"
        ) from error


def _open(path: Path) -> BinaryIO:
    """Open a file for reading; does not block on a named pipe that no program writes to."""
    if not path.is_fifo():
        return path.open("rb")
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    select.select([file], [], [], PIPE_SECONDS)
    os.set_blocking(file.fileno(), True)
    return file
