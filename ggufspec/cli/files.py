"""Reads the files that users name. Knows paths and errors, not what is in them."""

from __future__ import annotations

from pathlib import Path

from ggufspec.errors import PromptError


def read_prompt_file(path: Path) -> bytes:
    """The bytes of a file of prompts. Raises PromptError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read: {error.strerror}") from error
