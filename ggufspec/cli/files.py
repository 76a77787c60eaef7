"""Reads the files that a command is given, with errors that name them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ggufspec.errors import GgufspecError, PromptError

MOST_BYTES = 2**30  # of a file that is read; an endless one is refused


def read_file(path: Path, what: str, failure: type[GgufspecError]) -> bytes:
    """The bytes of a file or pipe, or of stdin for "-". Raises `failure`, which names `what`."""
    data = bytearray()
    try:
        stream = sys.stdin.buffer if str(path) == "-" else path.open("rb")
        with contextlib.nullcontext(stream) if str(path) == "-" else stream as file:
            while chunk := file.read(2**20):
                data += chunk
                if len(data) > MOST_BYTES:
                    raise failure(f"{what} {path} is longer than {MOST_BYTES:,} bytes; split it")
    except IsADirectoryError as error:
        raise failure(f"{what} {path} is a folder; name a file in it") from error
    except OSError as error:
        raise failure(f"{what} {path} cannot be read: {error.strerror or error}") from error
    return bytes(data)


def read_prompt_file(path: Path) -> bytes:
    """The bytes of a file of prompts. Raises PromptError."""
    return read_file(path, "the prompt file", PromptError)
