"""The prompts of a batch: texts, conversations, and the turns of Spec-Bench. Bytes in, Prompts out.

Knows what may be asked for; neither who answers, nor where answers go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ggufspec.common.prompts import Entry, parse_entries, without_text
from ggufspec.errors import PromptError

_NEEDED = 'each line needs a text "prompt", a list "messages", or a list of texts "turns"'
_ID_NAMES = ("question_id", "id")


@dataclass(frozen=True)
class Prompt:
    """One of the batch. `index` counts from 0, over all that were read.

    `kind`: "prompt" (one text), "turns" (what a user says, one after the other; each is answered)
    or "messages" (a conversation that is gone on with). `texts` of the former, else `messages`.
    `id` is what the file calls it; `id_name`, under which name.
    """

    index: int
    kind: str
    texts: Sequence[str] = ()
    messages: Sequence[Mapping[str, str]] = ()
    id: str | int | None = None
    id_name: str = "id"

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> Prompt:
        """What to_document made."""
        lists = {name: tuple(document[name]) for name in ("texts", "messages")}
        return Prompt(**{**document, **lists})

    def to_document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def parse_prompts(data: bytes, where: str) -> list[Prompt]:
    """The prompts in a file's bytes. `where` names the file in errors.

    JSON lines with "prompt", "messages" (role and content) or "turns" (Spec-Bench, MT-bench), and a
    "question_id" or "id" of their own where they have one; or plain text: a prompt a paragraph if
    there is an empty line, else a prompt a line. Raises PromptError.
    """
    found = [_prompt_of(entry, i) for i, entry in enumerate(parse_entries(data, where, _NEEDED))]
    first: dict[str | int, int] = {}
    for prompt in found:
        if prompt.id is not None and first.setdefault(prompt.id, prompt.index) != prompt.index:
            raise PromptError(
                f"{where} has {prompt.id_name} {prompt.id!r} twice, in its prompts "
                f"{first[prompt.id] + 1} and {prompt.index + 1}; each must have its own, or none"
            )
    return found


def digest(prompts: Sequence[Prompt]) -> str:
    """Tells these prompts from others: the same in every process."""
    text = json.dumps([prompt.to_document() for prompt in prompts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _prompt_of(entry: Entry, index: int) -> Prompt:
    fields = entry.fields
    id_name = next((name for name in _ID_NAMES if fields.get(name) is not None), "id")
    given = fields.get(id_name)
    if isinstance(given, bool) or not isinstance(given, (str, int, type(None))):
        raise PromptError(f"{entry.where} has {id_name} {given!r}; give a text, or a whole number")
    kinds = [kind for kind in ("prompt", "messages", "turns") if fields.get(kind) is not None]
    if len(kinds) > 1:
        raise PromptError(f"{entry.where} has {' and '.join(kinds)}; give one of them")
    kind = kinds[0] if kinds else "prompt"
    value = fields.get(kind)
    if kind == "messages":
        messages = _messages(entry, value)
        return Prompt(index, kind, messages=messages, id=given, id_name=id_name)
    texts = [value] if kind == "prompt" else value
    if not isinstance(texts, list) or not texts or texts[0] == "" or not _is_text(texts[0]):
        raise without_text(entry, _NEEDED)
    if not all(_is_text(text) and text for text in texts):
        raise PromptError(f"{entry.where} has a turn that is no text, or empty")
    return Prompt(index, kind, texts=tuple(texts), id=given, id_name=id_name)


def _messages(entry: Entry, value: object) -> tuple[dict[str, str], ...]:
    wanted = 'give a list of {"role": ..., "content": ...}, both texts'
    if not isinstance(value, list) or not value:
        raise PromptError(f"{entry.where} has no conversation in 'messages'; {wanted}")
    for i, message in enumerate(value, 1):
        if not isinstance(message, dict) or not all(
            _is_text(message.get(name)) for name in ("role", "content")
        ):
            raise PromptError(f"message {i} of {entry.where} is none; {wanted}")
    return tuple({name: message[name] for name in ("role", "content")} for message in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
