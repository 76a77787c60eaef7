"""Stores records in a journal as they finish, and in the output in the order of the prompts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, Any

from ggufspec.common.facts import differences, json_object
from ggufspec.common.files import disk_errors, write_all
from ggufspec.errors import CacheError, GgufspecError, OptionError

if sys.platform != "win32":
    import fcntl

BatchRecord = dict[str, Any]
_PROFILE = "known"  # the key of the profile's line in journals
_FORMAT = 1
_MARK = "ggufspec_batch"
_N_RUN_DIGITS = 12


class StreamResults:
    """Writes records to a stream, in order; such a batch cannot be resumed."""

    def __init__(self, stream: IO[bytes], settings: Mapping[str, Any]) -> None:
        self.records: dict[int, BatchRecord] = {}  # the finished ones, by index
        self.profile: dict[str, object] | None = None  # that all texts start from, once measured
        self._stream = stream
        self._run = _run_name(settings)
        self._n_written = 0

    def keep_profile(self, profile: dict[str, object]) -> None:
        self.profile = profile

    def add(self, record: BatchRecord) -> None:
        """Write the record once all records before it are written. Raises OSError of the stream."""
        record["run"] = self._run
        self.records[record["index"]] = record
        while self._n_written in self.records:
            self._stream.write(line_of(self.records[self._n_written]))
            self._stream.flush()
            self._n_written += 1

    def close(self) -> None:
        """Close the stream, unless it is stdout."""
        if self._stream is not sys.stdout.buffer:
            self._stream.close()


class FileResults:
    """Writes records to a file and its journal; `records` and `profile` as in StreamResults."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        n_prompts: int,
        *,
        resume: bool = False,
        retry_failed: bool = False,
    ) -> None:
        """Begin a batch, or resume one with the same `settings`.

        `retry_failed`: drop the records with an error. Raises OptionError if a file exists that
        must not be overwritten or has other settings, CacheError if a file cannot be written.
        """
        self.path = path
        self.records: dict[int, BatchRecord] = {}
        self.profile: dict[str, object] | None = None
        self._n_prompts = n_prompts
        self._run = _run_name(settings)
        self._journal = Journal(_journal_path(path, resume=resume))
        self._n_written = self._n_bytes = 0  # of the output, up to the first missing record
        is_new = False  # whether the journal was empty or did not exist
        try:
            found = self._journal.read()
            is_new = found is None
            before, lines = found or (settings, self._read_output() if path.exists() else [])
            if changes := list(differences(before, settings)):
                raise OptionError(
                    f"{self._journal.path} is from a batch with other settings: "
                    f"{'; '.join(changes)}. Give the same settings to --resume, or another output "
                    "to -o"
                )
            for line in lines:
                if _PROFILE in line:
                    self.profile = line[_PROFILE]
                elif not (retry_failed and line["error"]):
                    self.records[line["index"]] = line
            if is_new:
                self._journal.begin(settings, list(map(line_of, lines)))
            self._was_empty = is_new and not lines
            with write_errors(self.path):
                self._output = FileIO(path, "w")
        except GgufspecError:
            self._journal.close(remove=is_new)
            raise
        try:  # from here on, only the journal has all records
            self._write()
        except CacheError:
            self.close()
            raise

    def keep_profile(self, profile: dict[str, object]) -> None:
        """Let all texts start from this profile, also after the batch is resumed."""
        self.profile = profile
        self._journal.append(line_of({_PROFILE: profile}))

    def add(self, record: BatchRecord) -> None:
        """Store a record; it is on the disk when this returns. Raises CacheError."""
        record["run"] = self._run
        self._journal.append(line_of(record))
        self.records[record["index"]] = record
        self._write()

    def close(self) -> None:
        """Remove the journal if the output is complete or still empty, else keep both."""
        try:
            with write_errors(self.path), self._output:
                self._write()  # what an earlier failure has left out
                os.fsync(self._output.fileno())
        except CacheError:
            self._journal.close()
            raise
        is_empty = self._was_empty and not self.records
        if is_empty:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._journal.close(remove=is_empty or len(self.records) == self._n_prompts)

    def _write(self) -> None:
        with write_errors(self.path):
            while self._n_written in self.records:
                line = line_of(self.records[self._n_written])
                self._output.seek(self._n_bytes)  # an earlier failure may have written a part
                write_all(self._output, line)
                self._n_bytes += len(line)
                self._n_written += 1

    def _read_output(self) -> list[BatchRecord]:
        with _read_errors(self.path):
            data = self.path.read_bytes()
        try:
            records = [json.loads(line) for line in data.splitlines()]
            indices = [record["index"] for record in records]
            runs = {record["run"] for record in records}
        except (ValueError, TypeError, KeyError, RecursionError):
            indices, runs = [], set()
        if runs != {self._run} or indices != list(range(self._n_prompts)):
            raise OptionError(
                f"{self.path} cannot be resumed: it is complete, but has other prompts, models or "
                "settings, or was not written by ggufspec batch. Give another output to -o"
            )
        return records


BatchResults = StreamResults | FileResults


def _journal_path(path: Path, *, resume: bool) -> Path:
    """The path of an output's journal. Raises CacheError or OptionError if it cannot be used."""
    if path.is_dir():
        raise CacheError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise CacheError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    part = path.with_name(f"{path.name}.part")
    if part.exists() and not resume:
        raise OptionError(
            f"{part} exists: a batch was interrupted. Continue it with --resume, remove the file "
            "to begin again, or give another output to -o"
        )
    if path.exists() and not resume:
        raise OptionError(f"{path} exists already; give another output to -o, or remove it")
    return part


class Journal:
    """A file of finished records: lines of JSON, each on the disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        """Open or create, and lock it. Raises CacheError, also if another batch has it open."""
        self.path = path
        with disk_errors(f"write {path}", "; give another output to -o"):
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
        Raises OptionError for a file that is not a journal, or is damaged; CacheError.
        """
        with _read_errors(self.path):
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
        lines = [document for document in documents if document]
        if lines and len(lines) <= lines[0]["n_at_first"]:  # `begin` was interrupted
            lines, n_whole = [], 0
        if n_whole < len(data):
            with write_errors(self.path):
                os.ftruncate(self._file.fileno(), n_whole)
        return (lines[0]["settings"], lines[1:]) if lines else None

    def begin(self, settings: Mapping[str, Any], lines: Sequence[bytes] = ()) -> None:
        """Write settings and known lines; after a crash, `read` returns all of them or None."""
        head = line_of({_MARK: _FORMAT, "settings": settings, "n_at_first": len(lines)})
        self.append(b"".join([head, *lines]))
        _sync_folder(self.path.parent)

    def append(self, line: bytes) -> None:
        """Write a line and sync it. Raises CacheError; a part of the line may then be written."""
        with write_errors(self.path):
            write_all(self._file, line)
            os.fsync(self._file.fileno())

    def close(self, *, remove: bool = False) -> None:
        """Close and unlock the file; `remove`: also delete it."""
        if remove:
            if sys.platform == "win32":  # it cannot remove an open file; elsewhere keep the lock
                self._file.close()
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()


def line_of(document: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # an id may have unpaired surrogates
        return json.dumps(document).encode() + b"\n"


def write_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError of the block into a CacheError that says how to continue the batch."""
    remedy = "; finished prompts are kept: free some space, then run again with --resume"
    return disk_errors(f"write {path}", remedy)


def _read_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    return disk_errors(f"read {path}", "; nothing was changed: check its disk, or name another -o")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _run_name(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_N_RUN_DIGITS]
