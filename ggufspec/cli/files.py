"""Files that commands read and write, with errors that name them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ggufspec.common import files
from ggufspec.common.files import USER_FOLDER, is_stream, write_whole
from ggufspec.errors import CacheError, GgufspecError, PromptError

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


def check_writable(path: Path) -> None:
    """Raise CacheError now, rather than after the work, if no such file can be written."""
    if not is_stream(path):
        files.check_writable(path)


def write_file(path: Path, data: bytes) -> None:
    """Write a file: afterwards it is whole, or as it was before. Raises CacheError.

    A device or a pipe, such as /dev/null, is written to, not replaced.
    """
    if not is_stream(path):
        write_whole(path, len(data), [data], place=USER_FOLDER)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CacheError(
            f"cannot write {path}: {error.strerror or error}; name another file"
        ) from error
