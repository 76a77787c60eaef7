"""The prompts of an audit: those of a file, or a few of our own. Bytes in, texts out."""

from __future__ import annotations

import json
import re

from ggufspec.errors import PromptError

PROMPTS = (
    "The old house at the end of the road had been empty for years, until",
    "Dear Sir,\n\nI am writing to you because",
    "The three most important things to know about water are",
    '"Where have you been?" she asked. He',
    "def fibonacci(n):\n",
    "Q: Why is the sky blue?\nA:",
    "1. Wash the potatoes.\n2.",
    "In the year 1815, after the battle of",
)
_NEEDED = 'each line needs a text "prompt", or a list of texts "turns"'


def parse_prompts(data: bytes, where: str) -> list[str]:
    """The prompts in a file's bytes. `where` names the file in errors.

    JSON lines with "prompt", or with "turns" as in Spec-Bench, of which the first is taken; or
    plain text: a prompt a paragraph if there is an empty line, else a prompt a line.
    Raises PromptError for anything else.
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
            _prompt_of(line, i, where) for i, line in enumerate(text.split("\n"), 1) if line.strip()
        ]
    paragraphs = re.split(r"\n[ \t]*\n\s*", text.replace("\r\n", "\n").strip())
    return paragraphs if len(paragraphs) > 1 else lines


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _prompt_of(line: str, number: int, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"line {number} of {where} is not JSON ({error}); {_NEEDED}") from error
    if not isinstance(entry, dict):
        raise PromptError(f"line {number} of {where} is no JSON object; {_NEEDED}")
    found = entry.get("prompt")
    if found is None:
        turns = entry.get("turns")
        found = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(found, str) or not found:
        keys = ", ".join(map(repr, entry)) or "nothing"
        raise PromptError(f"line {number} of {where} has no text in {keys}; {_NEEDED}")
    return found
