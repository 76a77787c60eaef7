"""Fields of other servers' and clients' requests: accepted without effect, renamed or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ggufspec.common.toml import read_toml

_TABLES = read_toml(Path(__file__).with_suffix(".toml"))
# By kind of object: ignored fields with the reason; and fields with their names here.
IGNORED: Mapping[str, Mapping[str, str]] = _TABLES["ignored"]
RENAMED: Mapping[str, Mapping[str, str]] = _TABLES["renamed"]
# By kind of object: refused fields with the values that have no effect, and the reason.
REFUSED: Mapping[str, Mapping[str, tuple[list[Any], str]]] = _TABLES["refused"]


def given(
    document: Mapping[str, Any], kinds: Collection[str], declared: Collection[str]
) -> dict[str, Any]:
    """The fields of an object of these kinds that have an effect; null counts as missing.

    `declared`: the fields of the schema, which always have an effect.

    Raises ValueError for a field that is given by two names.
    """
    renamed = {old: new for kind in kinds for old, new in RENAMED.get(kind, {}).items()}
    refused = _refused(kinds)
    found: dict[str, Any] = {}
    for name, value in document.items():
        is_default = name in refused and value in refused[name][0]
        is_ignored = any(name in IGNORED.get(kind, ()) for kind in kinds)
        if value is None or (name not in declared and (is_default or is_ignored)):
            continue
        kept = renamed.get(name, name)
        if kept in found and found[kept] != value:
            raise ValueError(f"{name} is given twice, also as {kept}; give one of them")
        found[kept] = value
    return found


def refusal(name: str, known: Collection[str], kinds: Collection[str]) -> str:
    """Why an unknown field of these kinds of objects is refused; `known`: their fields."""
    if name in (refused := _refused(kinds)):
        return refused[name][1]
    alike = get_close_matches(name, known, n=1, cutoff=0.8)
    instead = f"send {alike[0]!r}" if alike and alike[0] != name else "leave it out"
    return f"this field is unknown to the server, or not available here; {instead}"


def _refused(kinds: Collection[str]) -> dict[str, tuple[list[Any], str]]:
    """The refused fields of these kinds; fields refused "everywhere" apply to all."""
    return {
        name: found
        for kind in ("everywhere", *kinds)
        for name, found in REFUSED.get(kind, {}).items()
    }
