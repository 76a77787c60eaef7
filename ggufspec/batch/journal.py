"""The file of finished records: lines of JSON, each synced to the disk before `append` returns."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from ggufspec.common.facts import json_object
from ggufspec.common.files import disk_errors, write_all
from ggufspec.errors import CacheError, OptionError

if sys.platform != "win32":
    import fcntl

_FORMAT = 1
_MARK = "ggufspec_batch"


def line_of(document: Mapping[str, Any]) -> bytes:
    """A document as one line of JSON, for the journal and for the output."""
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # an id may have unpaired surrogates
        return json.dumps(document).encode() + b"\n"


class Journal:
    """An open journal, locked for this process."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises CacheError, also if another batch has it open."""
        self.path = path
        with disk_errors(str(path), "; give another output to -o"):
            self._file = FileIO(path, "a+")
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise CacheError(
                    f"{path} is in use by another batch; wait until it ends, or give another "
                    "output to -o"
                ) from None
            except OSError:
                pass  # a file system without locks

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """(settings of the batch, further lines); None if the journal is empty.

        Removes a last line that a crash left incomplete: its `append` did not return.
        Raises OptionError for a file that is not a journal, or is damaged.
        """
        self._file.seek(0)
        data = self._file.readall()
        n_whole = data.rfind(b"\n") + 1
        documents = [json_object(line) for line in data[:n_whole].splitlines(keepends=True)]
        if documents and documents[-1] is None:  # torn write: only a part of it reached the disk
            n_whole = data.rfind(b"\n", 0, n_whole - 1) + 1
            documents.pop()
        if documents and (documents[0] is None or documents[0].get(_MARK) != _FORMAT):
            raise OptionError(
                f"{self.path} is not the journal of a batch; move it away, or give another output "
                "to -o"
            )
        if None in documents:
            raise OptionError(
                f"line {documents.index(None) + 1} of {self.path} is damaged, and its record is "
                "lost; remove that line to run its prompt again"
            )
        lines = [document for document in documents if document is not None]
        if lines and len(lines) <= lines[0]["n_at_first"]:  # `begin` was interrupted
            lines, n_whole = [], 0
        if n_whole < len(data):
            with write_errors(self.path):
                os.ftruncate(self._file.fileno(), n_whole)
        return (lines[0]["settings"], lines[1:]) if lines else None

    def begin(self, settings: Mapping[str, Any], lines: Sequence[bytes] = ()) -> None:
        """Write the settings and the lines known so far into an empty journal.

        After a crash, `read` returns either all of them or None.
        """
        head = line_of({_MARK: _FORMAT, "settings": settings, "n_at_first": len(lines)})
        self.append(b"".join([head, *lines]))
        _sync_folder(self.path.parent)

    def append(self, line: bytes) -> None:
        """Write a line and sync it. Raises CacheError; a part of the line may then be written."""
        with write_errors(self.path):
            write_all(self._file, line)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close and unlock the file without removing it."""
        self._file.close()

    def remove(self) -> None:
        if sys.platform == "win32":  # it cannot remove an open file; elsewhere keep the lock
            self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._file.close()


def write_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError of the block into a CacheError that says how to continue the batch."""
    remedy = "; finished prompts are kept: free some space, then run again with --resume"
    return disk_errors(str(path), remedy)


def _sync_folder(folder: Path) -> None:
    """Sync the folder's entry for a new file, on systems that can."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
