"""Compares the entries of the registry with the hub: `python -m tests.benchmarks.check_registry`.

Names of models limit it to these. Downloads no model; exit code 1 if a file, its size or its sha256
differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from ggufspec.errors import DownloadError
from ggufspec.models import hub
from ggufspec.models.registry import ModelEntry, load_registry


def main(names: Sequence[str]) -> int:
    """Print what differs; the exit code. Raises GgufspecError where the hub does not answer."""
    registry = load_registry()
    n_wrong = 0
    for entry in [registry.find(name) for name in names] or registry.models.values():
        try:
            found = list(mismatches(entry))
        except hub.Transient:
            raise
        except DownloadError as error:
            found = [str(error)]
        n_wrong += bool(found)
        sys.stdout.write(f"{entry.alias}: {'; '.join(found) or 'as registered'}\n")
    return int(n_wrong > 0)


def mismatches(entry: ModelEntry) -> Iterator[str]:
    """What differs. Raises DownloadError where the hub has no such repository."""
    there = hub.list_files(entry.repo, entry.revision)
    for path in entry.files:
        if path not in there:
            yield f"{path} does not exist"
        elif (known := entry.sha256_of(path)) not in (None, there[path].sha256):
            yield f"sha256 of {path}: registered {known}, found {there[path].sha256}"
    size = sum(there[path].size for path in entry.files if path in there)
    if entry.size not in (None, size) and set(entry.files) <= set(there):
        yield f"size: registered {entry.size}, found {size}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
