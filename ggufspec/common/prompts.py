"""Parses prompt files: bytes in, one Prompt for each line or paragraph out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ggufspec.common.facts import json_object
from ggufspec.common.reading import decoded, read_file
from ggufspec.errors import PromptError

_FORMS = {
    "prompt": 'a text "prompt"',
    "turns": 'a list of texts "turns"',
    "messages": 'a list "messages"',
}
TEXTS = ("prompt", "turns")  # all forms but "messages"
_ID_NAMES = ("question_id", "id")
_MESSAGE_FORM = (
    'give a list of {"role": ..., "content": ...} with texts, or with lists of parts of the types '
    "text, image and image_url"
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file.

    `kind`: "prompt" (`turns` has one text), "turns" (user messages, each sent after the answer to
    the previous one) or "messages" (a conversation to continue).
    """

    index: int = 0  # the first prompt of a file has 0
    kind: str = "prompt"
    turns: Sequence[str] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    id: str | int | None = None
    id_name: str = "id"  # the name that the file has for it
    category: str = ""
    system: str | None = None  # the system message

    @property
    def name(self) -> str:
        """The id, or else the number counted from 1; unique in a file."""
        return str(self.index + 1 if self.id is None else self.id)

    @property
    def label(self) -> dict[str, str | int]:
        """The id under the name that the file has for it; empty without an id."""
        return {} if self.id is None else {self.id_name: self.id}

    @property
    def text(self) -> str:
        """All texts of turns and messages."""
        parts = [part.get("text", "") for part in self._parts]
        contents = [each["content"] for each in self.messages if isinstance(each["content"], str)]
        return "".join([*self.turns, *contents, *parts])

    @property
    def has_images(self) -> bool:
        return any(part["type"] != "text" for part in self._parts)

    @property
    def _parts(self) -> list[Mapping[str, Any]]:
        contents = [each["content"] for each in self.messages]
        return [part for content in contents if isinstance(content, list) for part in content]

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> Prompt:
        """The inverse of dataclasses.asdict, also after JSON has made lists of tuples."""
        lists = {name: tuple(document[name]) for name in ("turns", "messages")}
        return Prompt(**{**document, **lists})


def read_prompts(path: Path, forms: Sequence[str] = tuple(_FORMS)) -> list[Prompt]:
    """The prompts in a file; see `parse_prompts`. Raises PromptError."""
    return parse_prompts(read_file(path, "the prompt file", PromptError), str(path), forms)


def parse_prompts(data: bytes, where: str, forms: Sequence[str] = tuple(_FORMS)) -> list[Prompt]:
    """The prompts in a file's bytes, at least one. `where` names the file in errors.

    The file has JSON lines, each with one of `forms` ("turns" as in Spec-Bench and MT-bench) and,
    optionally, "question_id" or "id", and "category"; or plain text, with one prompt per paragraph
    if it has an empty line, else one prompt per line. Raises PromptError.
    """
    lines = _Lines(where, forms)
    text = decoded(data, where)
    if "\0" in text:
        raise PromptError(f"{where} is not text: it has zero bytes; give JSON lines or plain text")
    prompts = list(lines.parse(text))
    if not prompts:
        raise PromptError(f"{where} has no prompts: it is empty; give at least one")
    first: dict[str, int] = {}
    for prompt in prompts:
        if (earlier := first.setdefault(prompt.name, prompt.index)) != prompt.index:
            raise PromptError(
                f"{where} has {prompt.id_name} {prompt.name} twice, for prompts {earlier + 1} and "
                f"{prompt.index + 1}; give each prompt a different one, or none"
            )
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts that is the same in every process."""
    text = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class _Lines:
    def __init__(self, where: str, forms: Sequence[str]) -> None:
        self._where = where
        self._forms = forms
        *most, last = [_FORMS[form] for form in forms]
        self._needed = f"each line needs {', '.join(most)} or {last}"

    def parse(self, text: str) -> Iterator[Prompt]:
        lines = [line for line in text.splitlines() if line.strip()]
        is_json = self._where.endswith((".jsonl", ".ndjson"))
        if is_json or (lines and json_object(lines[0]) is not None):
            numbered = [each for each in enumerate(text.split("\n"), 1) if each[1].strip()]
            for index, (number, line) in enumerate(numbered):
                yield self._prompt(line, f"line {number} of {self._where}", index)
            return
        paragraphs = re.split(r"\n[ \t]*\n\s*", text.replace("\r\n", "\n").strip())
        for index, found in enumerate(paragraphs if len(paragraphs) > 1 else lines):
            yield Prompt(index, turns=(found,))

    def _prompt(self, line: str, where: str, index: int) -> Prompt:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where} is not JSON ({error}); {self._needed}") from error
        if not isinstance(fields, dict):
            raise PromptError(f"{where} is not a JSON object; {self._needed}")
        found = [form for form in self._forms if fields.get(form) is not None]
        if len(found) > 1:
            raise PromptError(f"{where} has {' and '.join(found)}; give one of them")
        kind = found[0] if found else "prompt"
        id_name, given = _id(fields, where)
        category = fields.get("category")
        is_chat = kind == "messages"
        return Prompt(
            index,
            kind,
            turns=() if is_chat else self._turns(kind, fields, where),
            messages=_messages(fields[kind], where) if is_chat else (),
            id=given,
            id_name=id_name,
            category="" if category is None else str(category),
        )

    def _turns(self, kind: str, fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
        turns: Any = fields.get(kind) if kind == "turns" else [fields.get(kind)]
        first = turns[0] if isinstance(turns, list) and turns else None
        if not isinstance(first, str) or not first:
            keys = ", ".join(map(repr, fields)) or "nothing"
            raise PromptError(f"{where} has no text in {keys}; {self._needed}")
        if not all(isinstance(turn, str) and turn for turn in turns):
            raise PromptError(f"{where} has a turn that is empty or not a text")
        return tuple(turns)


def _id(fields: Mapping[str, Any], where: str) -> tuple[str, str | int | None]:
    name = next((name for name in _ID_NAMES if fields.get(name) is not None), "id")
    given = fields.get(name)
    if isinstance(given, bool) or not isinstance(given, (str, int, type(None))):
        raise PromptError(f"{where} has {name} {given!r}; give a text or a whole number")
    return name, given


def _messages(messages: object, where: str) -> tuple[dict[str, Any], ...]:
    names = ("role", "content")
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"{where} has no conversation in 'messages'; {_MESSAGE_FORM}")
    for i, message in enumerate(messages, 1):
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and _is_content(message.get("content"))
        ):
            raise PromptError(f"message {i} of {where} cannot be used; {_MESSAGE_FORM}")
    return tuple({name: message[name] for name in names} for message in messages)


def _is_content(content: object) -> bool:
    parts = content if isinstance(content, list) else ()
    return isinstance(content, str) or (bool(parts) and all(map(_is_part, parts)))


def _is_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    is_text = part.get("type") == "text" and isinstance(part.get("text"), str)
    return is_text or part.get("type") in ("image", "image_url")
