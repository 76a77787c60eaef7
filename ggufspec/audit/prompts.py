"""The prompts of an audit: those of a file, or a few of our own. Bytes in, texts out."""

from __future__ import annotations

from ggufspec.common.prompts import Entry, parse_entries, without_text

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
    return [_prompt_of(entry) for entry in parse_entries(data, where, _NEEDED)]


def _prompt_of(entry: Entry) -> str:
    found = entry.fields.get("prompt")
    if found is None:
        turns = entry.fields.get("turns")
        found = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(found, str) or not found:
        raise without_text(entry, _NEEDED)
    return found
