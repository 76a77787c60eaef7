"""Computes hashes of files, and stores them by path, size and modification time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ggufspec.common.facts import json_object
from ggufspec.common.files import default_cache_dir, write_whole
from ggufspec.common.progress import NamedProgress
from ggufspec.errors import CacheError

_CHUNK = 2**20


def known_sha256(path: Path) -> str | None:
    """The stored hash of a file, if the file has not changed since."""
    try:
        content = json_object(_record_path(path).read_bytes())
    except (CacheError, OSError):
        return None
    is_same = content is not None and content.get("file") == _identity(path)
    return str(content.get("sha256")) if content and is_same else None


def hashes_of(paths: Sequence[Path], progress: NamedProgress | None = None) -> Iterator[str]:
    """Compute and store the sha256 of each file."""
    n_done, n_bytes = 0, sum(path.stat().st_size for path in paths)
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                n_done += len(chunk)
                if progress is not None:
                    progress("Verifying", n_done, n_bytes)
        remember(path, digest.hexdigest())
        yield digest.hexdigest()


def remember(path: Path, sha256: str) -> None:
    """Store the hash of a file; if that fails, it will be computed again."""
    with contextlib.suppress(CacheError, OSError):
        data = json.dumps({"file": _identity(path), "sha256": sha256}).encode()
        write_whole(_record_path(path), len(data), [data])


def _identity(path: Path) -> list[str | int]:
    content = path.resolve()
    found = content.stat()
    return [str(content), found.st_size, found.st_mtime_ns]


def _record_path(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogatepass")).hexdigest()
    return default_cache_dir() / "verified" / f"{name[:32]}.json"
