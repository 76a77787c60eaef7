"""Stores measurements between processes: a folder of small JSON files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ggufspec.common.facts import json_object
from ggufspec.common.files import (
    alone,
    default_cache_dir,
    fingerprint_of,
    try_to_write,
    write_whole,
)
from ggufspec.errors import CacheError

_log = logging.getLogger("ggufspec.records")
_log.addHandler(logging.NullHandler())  # silent unless the application wants it
_FORMAT = 3  # files of other formats are ignored
_N_KEY_DIGITS = 32
_LONGEST_UPDATE = 10.0  # seconds that another process reads and writes a record, at most
_LONGEST_WAIT = 600.0  # seconds; a large model is loaded several times
_TYPICAL_BYTES = 2**14  # size of a pair's measurements
_MOST_BYTES = 2**20  # bytes read of a file: far more than any file needs
_ALLOWED: Mapping[str, Collection[object]] = {  # values of TunedSettings
    **dict.fromkeys(("n_threads", "n_threads_draft"), range(1, 513)),
    **dict.fromkeys(("n_batch", "n_batch_draft"), range(1, 2**20 + 1)),
    "flash_attention": ("auto", "on", "off", "own"),
}


def key(facts: Mapping[str, object]) -> str:
    """The file name for these facts (of JSON's types), the same in every process."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_N_KEY_DIGITS]


def remember(facts: Mapping[str, object], document: Mapping[str, object]) -> bool:
    """Store a document under its facts, atomically; returns False if it cannot be written."""
    content = {"format": _FORMAT, "facts": facts, "document": document}
    data = (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    try:
        write_whole(_path(key(facts)), len(data), [data])
    except CacheError:
        return False
    return True


def update(
    facts: Mapping[str, object], change: Callable[[Mapping[str, Any]], Mapping[str, object]]
) -> bool:
    """Replace the document under these facts by what `change` makes of it (empty: there is none).

    Several processes may do so at once: none loses what another has added.
    """
    try:
        lock = default_cache_dir() / "records.lock"
    except CacheError:
        return False
    with alone(lock, lambda: None, _LONGEST_UPDATE):
        return remember(facts, change(recall(facts) or {}))


def recall(facts: Mapping[str, object]) -> dict[str, Any] | None:
    """The document stored under these facts; None if there is no valid one."""
    try:
        record = _read(_path(key(facts)))
    except CacheError:
        return None
    return record.document if record else None


@dataclass(frozen=True)
class Record:
    key: str
    facts: dict[str, Any]
    document: dict[str, Any]


def records() -> Iterator[Record]:
    return filter(None, map(_read, _files()))


def forget(key: str | None = None) -> int:
    """Remove one record, or all, including unreadable ones; returns how many were removed."""
    n_removed = 0
    for path in _files():
        if key is None or path.stem == key:
            with contextlib.suppress(OSError):
                path.unlink()
                n_removed += 1
    return n_removed


def folder() -> Path:
    """The folder of the files. Raises CacheError if there is no home folder."""
    return default_cache_dir() / "pairs"


@contextlib.contextmanager
def measuring(on_wait: Callable[[], object]) -> Iterator[None]:
    """Let one process at a time measure: processes that measure at once disturb each other.

    What is to be measured may be stored once the block begins. If another process measures for
    longer than _LONGEST_WAIT, this one does, too.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(CacheError):
            path = default_cache_dir() / "measuring.lock"
            stack.enter_context(alone(path, on_wait, _LONGEST_WAIT))
        yield


def obstacle() -> str | None:
    """Why measurements cannot be stored; None if they can."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        try_to_write(folder() / "measurements", _TYPICAL_BYTES)
    except (CacheError, OSError) as error:
        return str(error) if isinstance(error, CacheError) else f"{folder()}: {error.strerror}"
    return None


def fingerprint(path: Path) -> str | None:
    """A hash of a model file's size and its first and last bytes; None if it cannot be read."""
    try:
        return fingerprint_of([path])[:_N_KEY_DIGITS]
    except OSError:
        return None


@dataclass(frozen=True)
class TunedSettings:
    """The fastest settings that `ggufspec tune` found for a pair; None: not measured."""

    n_threads: int | None = None
    n_threads_draft: int | None = None
    flash_attention: str | None = None
    n_batch: int | None = None
    n_batch_draft: int | None = None


def settings(facts: Mapping[str, object]) -> TunedSettings:
    """The settings stored for a pair on a machine; `facts` contain no settings."""
    found = recall(_about_settings(facts)) or {}
    return TunedSettings(
        **{
            name: found[name]
            for name, allowed in _ALLOWED.items()
            if type(found.get(name)) in (int, str) and found[name] in allowed
        }
    )


def remember_settings(facts: Mapping[str, object], found: TunedSettings) -> bool:
    """Store settings for a pair on a machine; None keeps the stored value."""
    known = {name: value for name, value in asdict(settings(facts)).items() if value is not None}
    known |= {name: value for name, value in asdict(found).items() if value is not None}
    return remember(_about_settings(facts), known)


def _about_settings(facts: Mapping[str, object]) -> dict[str, object]:
    return {"about": "settings", "pair": facts}


def _path(key: str) -> Path:
    return folder() / f"{key}.json"


def _files() -> list[Path]:
    try:
        return sorted(folder().glob("*.json"))
    except (CacheError, OSError):
        return []


def _read(path: Path) -> Record | None:
    """The record in a file; None unless the file's name is the hash of its facts."""
    try:
        with path.open("rb") as file:
            content = json_object(file.read(_MOST_BYTES)) or {}
    except OSError:
        return None
    facts, document = content.get("facts"), content.get("document")
    if content and content.get("format") != _FORMAT:
        return None  # of another version
    with contextlib.suppress(ValueError):  # NaN, which Python's JSON reads and writes
        if isinstance(facts, dict) and isinstance(document, dict) and key(facts) == path.stem:
            return Record(path.stem, facts, document)
    _warn_once(path)
    return None


@cache
def _warn_once(path: Path) -> None:
    _log.warning("ggufspec: %s is damaged: it is ignored, and measured again", path)
