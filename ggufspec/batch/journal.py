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
    """A document as a line of the journal and of the output."""
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # an id may have unpaired surrogates
        return json.dumps(document).encode() + b"\n"


class Journal:
    """An open journal, locked for this process."""

    def __init__(self, path: Path) -> None:
        """Open the file or create it. Raises CacheError, also where another batch has it open."""
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
        """The settings of the batch, and the lines after them; None if the journal is empty.

        Cuts off a last line that is incomplete after a crash: its `append` has not returned.
        Raises OptionError for a file that is not a journal, or is damaged.
        """
        self._file.seek(0)
        data = self._file.readall()
        n_whole = data.rfind(b"\n") + 1
        documents = [json_object(line) for line in data[:n_whole].splitlines(keepends=True)]
        if documents and documents[-1] is None:  # its end was written to the disk, its middle not
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
                "lost; remove that line, and its prompt is run again"
            )
        lines = [document for document in documents if document is not None]
        if lines and len(lines) <= lines[0]["n_at_first"]:  # `begin` was interrupted
            lines, n_whole = [], 0
        if n_whole < len(data):
            with write_errors(self.path):
                os.ftruncate(self._file.fileno(), n_whole)
        return (lines[0]["settings"], lines[1:]) if lines else None

    def begin(self, settings: Mapping[str, Any], lines: Sequence[bytes] = ()) -> None:
        """Write the settings, and lines that are known already, into an empty journal.

        After a crash `read` finds either all of them or nothing.
        """
        head = line_of({_MARK: _FORMAT, "settings": settings, "n_at_first": len(lines)})
        self.append(b"".join([head, *lines]))
        _sync_folder(self.path.parent)

    def append(self, line: bytes) -> None:
        """Write a line and sync it. Raises CacheError; the line may then be there in part."""
        with write_errors(self.path):
            write_all(self._file, line)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close and unlock the file, and keep it."""
        self._file.close()

    def remove(self) -> None:
        if sys.platform == "win32":  # which removes no open file; elsewhere keep the lock so long
            self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._file.close()


def write_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turns an OSError of the block into a CacheError: finished prompts are not lost."""
    remedy = "; finished prompts are kept: free some space, then run again with --resume"
    return disk_errors(str(path), remedy)


def _sync_folder(folder: Path) -> None:
    """Sync the name of a new file, where the system can sync folders."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
