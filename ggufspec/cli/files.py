"""Reads the files that users name, and writes them whole."""

from __future__ import annotations

from pathlib import Path

from ggufspec.common.files import USER_FOLDER, check_writable, write_whole
from ggufspec.errors import PromptError

__all__ = ["check_writable", "read_prompt_file", "write_file"]


def read_prompt_file(path: Path) -> bytes:
    """The bytes of a file of prompts. Raises PromptError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read: {error.strerror}") from error


def write_file(path: Path, data: bytes) -> None:
    """Afterwards the file is whole, or as it was before. Raises CacheError."""
    write_whole(path, len(data), [data], place=USER_FOLDER)
