"""Fields of other servers' and clients' requests: accepted without effect, renamed or refused."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from ggufspec.common.reading import read_toml

T = TypeVar("T")
_MOST_FIELDS = 1000  # more than any object has
_TABLES = read_toml(Path(__file__).with_suffix(".toml"))
# By kind of object: ignored fields with the reason; and fields with their names here.
IGNORED: Mapping[str, dict[str, str]] = _TABLES["ignored"]
RENAMED: Mapping[str, dict[str, str]] = _TABLES["renamed"]
# By kind of object: refused fields with the values that have no effect, and the reason.
REFUSED: Mapping[str, dict[str, tuple[list[Any], str]]] = _TABLES["refused"]
# By option of the engine: the fields that set it.
_SET_BY: Mapping[str, list[str]] = _TABLES["set_by"]
_ALL_RENAMED = ChainMap(*RENAMED.values())
_OPTIONS = "|".join((*_SET_BY, *RENAMED["everywhere"].values()))
_OPTION = re.compile(rf"(?<![\w.])({_OPTIONS})(?!\w|\.\w)")


def given(
    document: Mapping[str, Any], kinds: Collection[str], declared: Collection[str]
) -> dict[str, Any]:
    """The fields of an object of these kinds that have an effect; null counts as missing.

    `declared`: the fields of the schema, which always have an effect.
    Raises PydanticCustomError for a field that is given by two names.
    """
    if document.keys() <= set(declared) and None not in document.values():  # usual, and fast
        return dict(document)
    renamed, ignored, refused = _of(RENAMED, kinds), _of(IGNORED, kinds), _refused(kinds)
    found: dict[str, Any] = {}
    for name, value in document.items():
        if len(found) > _MOST_FIELDS:
            break  # some of them are unknown, and each would be an error
        has_no_effect = name in ignored or (name in refused and value in refused[name][0])
        if value is None or (name not in declared and has_no_effect):
            continue
        kept = renamed.get(name, name)
        if kept in found and found[kept] != value:
            message = "{name} is given twice, also as {kept}; give one of them"
            raise PydanticCustomError("given_twice", message, {"name": name, "kept": kept})
        found[kept] = value
    return found


def sent_name(name: str, sent: object) -> str:
    """The name of a field or option in an object that a client sent: there it may have another."""
    fields = (name, *_SET_BY.get(name, ()))
    for place in _given_places(sent) if isinstance(sent, dict) and sent.get(name) is None else ():
        own = place.removeprefix("options.")  # Ollama's
        if own in fields or _ALL_RENAMED.get(own) in fields:
            return place
    return name


def sent_place(place: str, sent: object) -> str:
    """The place of a field, such as messages.0.reasoning_content, with the names in `sent`."""
    found = []
    for part in place.split("."):
        found.append(name := sent_name(part, sent))
        if isinstance(sent, list) and name.isdigit() and int(name) < len(sent):
            sent = sent[int(name)]
        else:
            sent = sent.get(name) if isinstance(sent, dict) else None
    return ".".join(found)


def with_sent_names(message: str, sent: object) -> str:
    """An error about options of the engine, with the names of the fields that set them."""
    return _OPTION.sub(lambda found: sent_name(found[0], sent), message)


def refusal(name: str, known: Collection[str], kinds: Collection[str]) -> str:
    """Why an unknown field of these kinds of objects is refused; `known`: their fields."""
    if name in (refused := _refused(kinds)):
        return refused[name][1]
    alike = get_close_matches(name, known, n=1, cutoff=0.8)
    instead = f"send {alike[0]!r}" if alike and alike[0] != name else "leave it out"
    return f"this field is unknown to the server, or not available here; {instead}"


def _given_places(sent: dict[str, Any]) -> Iterator[str]:
    for name, value in sent.items():
        if value is not None:
            yield name
        for inner in value if isinstance(value, dict) else ():
            yield f"{name}.{inner}"


def _refused(kinds: Collection[str]) -> Mapping[str, tuple[list[Any], str]]:
    return _of(REFUSED, ("everywhere", *kinds))


def _of(tables: Mapping[str, dict[str, T]], kinds: Collection[str]) -> Mapping[str, T]:
    return ChainMap(*(tables.get(kind, {}) for kind in kinds))
