"""What a batch has done so far, on the disk: a line of JSON a thing, each synced when it is told.

Knows lines and files. A line that was cut by a crash is dropped, for it was told to nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from ggufspec.errors import CacheError, OptionError

if sys.platform != "win32":
    import fcntl

_FORMAT = 1
_MARK = "ggufspec_batch"


def line_of(document: Mapping[str, Any]) -> bytes:
    """A line as it stands in journal and output."""
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # an id may have surrogates that stand alone
        return json.dumps(document).encode() + b"\n"


class Journal:
    """An open journal: append to it, and remove it once it is not needed. One process has it."""

    def __init__(self, path: Path) -> None:
        """Open a file, made if need be. Raises CacheError, also where another batch has it open."""
        self.path = path
        try:
            self._file = FileIO(path, "a+")
        except OSError as error:
            raise _refused(path, error) from error
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise CacheError(
                    f"{path} is being written by another batch; wait for it, or give another "
                    "name to -o"
                ) from None
            except OSError:
                pass  # a file system without locks

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """What the batch is of, and the lines behind that; None in a file that holds nothing yet.

        A torn last line is cut off. Raises OptionError for a file that is something else.
        """
        self._file.seek(0)
        data = self._file.readall()
        n_whole = data.rfind(b"\n") + 1
        documents = [_parsed(line) for line in data[:n_whole].splitlines(keepends=True)]
        if documents and documents[-1] is None:  # the disk had room for its end, not for its middle
            n_whole = data.rfind(b"\n", 0, n_whole - 1) + 1
            documents.pop()
        if documents and (documents[0] is None or documents[0].get(_MARK) != _FORMAT):
            raise OptionError(
                f"{self.path} is no journal of a batch; move it away, or give another name to -o"
            )
        if None in documents:
            raise OptionError(
                f"line {documents.index(None) + 1} of {self.path} is damaged: what stands there "
                "was done, and is lost. Remove that line to have it done again"
            )
        lines = [document for document in documents if document is not None]
        if lines and len(lines) <= lines[0]["n_at_first"]:  # it was never begun in full
            lines, n_whole = [], 0
        if n_whole < len(data):
            self._do(lambda: os.ftruncate(self._file.fileno(), n_whole))
        return (lines[0]["settings"], lines[1:]) if lines else None

    def begin(self, settings: Mapping[str, Any], lines: Sequence[bytes] = ()) -> None:
        """Write what the batch is of, and what is known of it already, into an empty journal.

        After a crash, either all of that is there, or `read` finds nothing.
        """
        head = line_of({_MARK: _FORMAT, "settings": settings, "n_at_first": len(lines)})
        self._write(b"".join([head, *lines]))
        _sync_folder(self.path.parent)

    def append(self, line: bytes) -> None:
        """Afterwards it is on the disk, whole. Raises CacheError; then it may be there in part."""
        self._write(line)

    def close(self) -> None:
        """Give it free; it stays where it is."""
        self._file.close()

    def remove(self) -> None:
        """It is not needed any more."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._file.close()

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._do(lambda: os.write(self._file.fileno(), rest)) :]  # noqa: B023
        self._do(lambda: os.fsync(self._file.fileno()))

    def _do(self, what: Any) -> Any:
        try:
            return what()
        except OSError as error:
            raise _refused(self.path, error) from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _sync_folder(folder: Path) -> None:
    """A new file's name is on the disk too; where folders cannot be synced, nothing is done."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _refused(path: Path, error: OSError) -> CacheError:
    return CacheError(f"cannot write {path}: {error.strerror or error}; make room, or name another")
