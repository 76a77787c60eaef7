"""Reads the files that users name, and writes them whole. Knows paths, not what is in files."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ggufspec.errors import CacheError, PromptError


def read_prompt_file(path: Path) -> bytes:
    """The bytes of a file of prompts. Raises PromptError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Raise CacheError now, rather than after the work, if no such file can be written."""
    _write_beside(path, b"").unlink()


def write_file(path: Path, data: bytes) -> None:
    """Afterwards the file is whole, or as it was before. Raises CacheError."""
    temporary = _write_beside(path, data)
    try:
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink()
        raise _refused(path, error) from error


def _write_beside(path: Path, data: bytes) -> Path:
    """A new file in the same folder."""
    if path.is_dir():
        raise CacheError(f"cannot write {path}: it is a folder; name a file in it")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _refused(path, error) from error
    return temporary


def _refused(path: Path, error: OSError) -> CacheError:
    return CacheError(f"cannot write {path}: {error.strerror or error}; name another place")
