"""What a file of prompts says: bytes in, one object a prompt out. Knows no command's own fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ggufspec.errors import PromptError


class Entry(NamedTuple):
    """A prompt as it stands in a file: a line of JSON, or a text as {"prompt": text}."""

    where: str  # names it in errors
    fields: Mapping[str, Any]
    line: int = 0  # of JSON lines, from 1; 0: plain text


def parse_entries(data: bytes, where: str, needed: str) -> list[Entry]:
    """The prompts in a file's bytes, at least one. `where` names the file in errors.

    JSON lines; or plain text: a prompt a paragraph if there is an empty line, else a prompt a line.
    `needed` says what a line of JSON has to have. Raises PromptError for anything else.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; "
            "convert it to UTF-8 first"
        ) from error
    if "\0" in text:
        raise PromptError(f"{where} is no text: it has zero bytes; give JSON lines or plain text")
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise PromptError(f"{where} has no prompts: it is empty; give at least one")
    if where.endswith((".jsonl", ".ndjson")) or _is_object(lines[0]):
        return [
            _entry(line, i, where, needed)
            for i, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    paragraphs = re.split(r"\n[ \t]*\n\s*", text.replace("\r\n", "\n").strip())
    found = paragraphs if len(paragraphs) > 1 else lines
    return [Entry(f"prompt {i} of {where}", {"prompt": text}) for i, text in enumerate(found, 1)]


def without_text(entry: Entry, needed: str) -> PromptError:
    """The error of an entry that has nothing to continue."""
    keys = ", ".join(map(repr, entry.fields)) or "nothing"
    return PromptError(f"{entry.where} has no text in {keys}; {needed}")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _entry(line: str, number: int, where: str, needed: str) -> Entry:
    name = f"line {number} of {where}"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{name} is not JSON ({error}); {needed}") from error
    if not isinstance(fields, dict):
        raise PromptError(f"{name} is no JSON object; {needed}")
    return Entry(name, fields, number)
