"""Reads and writes saved texts: the state of target and drafts, with the models' hashes."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.common.files import USER_FOLDER, is_stream, write_whole
from ggufspec.engine.prompt_cache import CachedText
from ggufspec.engine.slots import Slot
from ggufspec.errors import CacheError, DecodeError, SessionError
from ggufspec.llama.saved_text import SavedText

# A file: magic, version, length and sha256 of the header; the header (JSON), which has the sha256
# of all that follows; for each session its tokens, cells, checkpoints and state. Little endian.
_MAGIC = b"GGUFSPEC"
_VERSION = 2
_START = struct.Struct("<8sIQ32s")
_MOST_HEADER = 2**24  # bytes
_MOST_SIZE = 2**48
_PIECE = 2**24  # bytes that are read and hashed at once
_AGAIN = "save the text again"
_ROLES = ("target", "draft")

Key = Mapping[str, object]  # see saved_text.text_key; the same for equal models and caches
Keys = Sequence[Key | None]  # of target and draft


class SessionFacts(NamedTuple):
    """tokens: of the text. n_bytes: of the file."""

    tokens: Sequence[int]
    n_bytes: int


def write(path: Path, text: CachedText, keys: Keys) -> SessionFacts:
    """Write a text to a file atomically. Raises CacheError."""
    if is_stream(path):
        raise CacheError(f"{path} is no file that can be replaced; name another one")
    digest = hashlib.sha256()
    for part in _parts(text):
        digest.update(part)
    header = json.dumps(
        {
            "models": [key and dict(key) for key in keys],
            "sessions": [saved and _Sizes.of(saved)._asdict() for saved in text.saved],
            "sha256": digest.hexdigest(),
        }
    ).encode()
    start = _START.pack(_MAGIC, _VERSION, len(header), hashlib.sha256(header).digest())
    n_bytes = len(start) + len(header) + sum(part.nbytes for part in _parts(text))
    chunks = (memoryview(start), memoryview(header), *_parts(text))
    write_whole(path, n_bytes, chunks, place=USER_FOLDER)
    return SessionFacts(list(text.tokens), n_bytes)


def read(path: Path, keys: Keys, n_ctx: int) -> tuple[CachedText, int]:
    """The text of a file and the file's size.

    The state of another draft model than the saved one is left out: that draft reads the text
    again. Raises SessionError for a damaged file, or another target, head or version.
    """
    what = f"the session file {path.name}"
    try:
        n_bytes = path.stat().st_size
        if not path.is_file():
            raise SessionError(f"{what} is no file; name one that was saved")
        with path.open("rb") as file:
            return _read(file, n_bytes, keys, n_ctx, what), n_bytes
    except FileNotFoundError as error:
        raise SessionError(f"{what} does not exist; save one first") from error
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "not enough memory"
        raise SessionError(f"{what} cannot be read: {reason}") from error


def restore(text: CachedText, slot: Slot, path: Path) -> None:
    """Copy the text of a file into a slot. Raises SessionError, which leaves the slot empty."""
    try:
        slot.restore(text)
    except DecodeError as error:
        slot.forget()
        raise SessionError(
            f"the session file {path.name} cannot be restored: its form differs from that of the "
            f"caches, or these have no room; {_AGAIN}. {error}"
        ) from error


def _read(file: BufferedReader, n_bytes: int, keys: Keys, n_ctx: int, what: str) -> CachedText:
    damaged = SessionError(f"{what} is damaged or cut off; delete it, and {_AGAIN}")
    start = file.read(_START.size)
    if start[: len(_MAGIC)] != _MAGIC:
        raise SessionError(f"{what} is no session of ggufspec; name one that was saved with it")
    if len(start) < _START.size:
        raise damaged
    _, version, n_header, digest = _START.unpack(start)
    if version != _VERSION:
        raise SessionError(
            f"{what} has version {version} of the format, and this ggufspec reads version "
            f"{_VERSION}; {_AGAIN}"
        )
    if n_header > min(_MOST_HEADER, n_bytes):
        raise damaged
    data = file.read(n_header)
    if hashlib.sha256(data).digest() != digest:
        raise damaged
    try:
        header = json.loads(data)
        models, sizes = header["models"], [_Sizes.of_document(each) for each in header["sessions"]]
        total, expected = sum(each.n_bytes for each in sizes if each), header["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged from error
    if not isinstance(models, list) or not len(models) == len(sizes) == len(keys) or not sizes[0]:
        raise damaged
    if n_bytes != _START.size + n_header + total:
        raise damaged
    wanted = _check(models, keys, what)
    if (n_tokens := sizes[0].n_tokens) > n_ctx:
        raise SessionError(
            f"{what} has a text of {n_tokens:,} tokens, and the context has {n_ctx:,}; use a "
            "larger one (n_ctx, -c)"
        )
    found = hashlib.sha256()
    saved = [size and size.read(file, found) for size in sizes]
    if found.hexdigest() != expected:
        raise damaged
    assert saved[0] is not None
    kept = [each if is_wanted else None for each, is_wanted in zip(saved, wanted, strict=True)]
    return CachedText(saved[0].tokens, kept)


def _check(models: Sequence[object], keys: Keys, what: str) -> Sequence[bool]:
    """For each session, whether its saved state can be used. Raises SessionError."""
    wanted = [found == key and key is not None for found, key in zip(models, keys, strict=True)]
    for found, key, is_wanted, role in zip(models, keys, wanted, _ROLES, strict=True):
        is_needed = key is not None and (role == "target" or key["is_head"])
        if key is None or is_wanted or not is_needed:
            continue
        if not isinstance(found, dict):
            why = "the file was saved without it" if found is None else "the file names no model"
            raise SessionError(f"{what} cannot be used with this {role}: {why}; {_AGAIN}")
        name = next((name for name in key if found.get(name) != key[name]), "model")
        raise SessionError(
            f"{what} cannot be used with this {role}: its {name} is {str(found.get(name))[:200]}, "
            f"and now it is {key.get(name)}; load what it was saved with, or {_AGAIN}"
        )
    return wanted


class _Sizes(NamedTuple):
    n_tokens: int
    n_cells: int  # bytes
    n_least: int
    n_state: int  # numbers
    checkpoints: Sequence[tuple[int, int]]  # tokens, bytes

    @classmethod
    def of(cls, saved: SavedText) -> _Sizes:
        return cls(
            len(saved.tokens),
            saved.cells.nbytes,
            saved.n_least,
            0 if saved.state is None else saved.state.size,
            [(n, state.nbytes) for n, state in saved.checkpoints],
        )

    @classmethod
    def of_document(cls, found: Any) -> _Sizes | None:
        """Raises ValueError, TypeError."""
        if found is None:
            return None
        *numbers, checkpoints = sizes = cls(**found)
        for n in (*numbers, *chain.from_iterable(checkpoints)):
            if type(n) is not int or not 0 <= n < _MOST_SIZE:
                raise ValueError("no size")
        n_most = max([sizes.n_least, *(n for n, _ in checkpoints)])
        if not sizes.n_tokens or not sizes.n_cells or n_most > sizes.n_tokens:
            raise ValueError("these numbers cannot be of one text")
        return sizes

    @property
    def n_bytes(self) -> int:
        return (
            4 * (self.n_tokens + self.n_state) + self.n_cells + sum(n for _, n in self.checkpoints)
        )

    def read(self, file: BufferedReader, digest: Any) -> SavedText:
        """The saved text, read from `file`; its bytes are added to `digest`."""
        tokens = _array(file, 4 * self.n_tokens, digest).view(np.int32)
        cells = _array(file, self.n_cells, digest)
        checkpoints = [(n, _array(file, size, digest)) for n, size in self.checkpoints]
        state = _array(file, 4 * self.n_state, digest).view(np.float32)
        return SavedText(
            array("i", tokens.tobytes()),
            cells,
            checkpoints,
            self.n_least,
            state.reshape(1, -1) if self.n_state else None,
        )


def _parts(text: CachedText) -> Iterator[memoryview]:
    for saved in text.saved:
        if saved is None:
            continue
        states = [] if saved.state is None else [np.ascontiguousarray(saved.state)]
        arrays: list[Any] = [saved.tokens, saved.cells, *(c for _, c in saved.checkpoints), *states]
        for each in arrays:
            if (view := memoryview(each)).nbytes:
                yield view.cast("B")


def _array(file: BufferedReader, size: int, digest: Any) -> NDArray[np.uint8]:
    """The next `size` bytes of a file, which has that many."""
    data = np.empty(size, np.uint8)
    for start in range(0, size, _PIECE):
        piece = data[start : start + _PIECE]
        file.readinto(piece.data)
        digest.update(piece.data)
    return data
