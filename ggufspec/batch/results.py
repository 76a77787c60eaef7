"""Stores records in the journal as they finish, and in the output in the order of the prompts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ggufspec.batch.journal import Journal, line_of, write_errors
from ggufspec.batch.settings import run_name
from ggufspec.common.facts import differences
from ggufspec.errors import CacheError, GgufspecError, OptionError

BatchRecord = dict[str, Any]
_PROFILE = "known"  # the key of the profile's line in journals


class StreamResults:
    """Writes records to a stream, in order; such a batch cannot be resumed.

    `records`: the finished records, by index. `profile`: the pair profile that all texts start from
    (None: not measured yet).
    """

    def __init__(self, stream: IO[bytes], settings: Mapping[str, Any]) -> None:
        self.records: dict[int, BatchRecord] = {}
        self.profile: dict[str, object] | None = None
        self._stream = stream
        self._run = run_name(settings)
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
        self._run = run_name(settings)
        self._journal = Journal(_journal_path(path, resume=resume))
        self._n_written = 0  # records in the output, up to the first missing one
        is_new = False  # whether the journal was empty or did not exist
        try:
            found = self._journal.read()
            is_new = found is None
            if found is None:
                self._take(self._read_output() if path.exists() else [])
            else:
                self._check_settings(found[0], settings)
                self._take(found[1])
            if retry_failed:
                self.records = {i: each for i, each in self.records.items() if not each["error"]}
            if is_new:
                self._journal.begin(settings, list(map(line_of, self.records.values())))
            self._was_empty = is_new and not self.records
            with write_errors(self.path):
                self._output: IO[bytes] = path.open("wb")
            self._write()
        except GgufspecError:
            if is_new:
                self._journal.remove()
            else:
                self._journal.close()
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
                self._output.flush()
                os.fsync(self._output.fileno())
        except CacheError:
            self._journal.close()
            raise
        is_empty = self._was_empty and not self.records
        if is_empty:
            with contextlib.suppress(OSError):
                self.path.unlink()
        if is_empty or len(self.records) == self._n_prompts:
            self._journal.remove()
        else:
            self._journal.close()

    def _write(self) -> None:
        with write_errors(self.path):
            while self._n_written in self.records:
                self._output.write(line_of(self.records[self._n_written]))
                self._n_written += 1
            self._output.flush()

    def _take(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            if _PROFILE in line:
                self.profile = line[_PROFILE]
            else:
                self.records[line["index"]] = line

    def _read_output(self) -> list[BatchRecord]:
        """The records of a complete output, which has no journal."""
        try:
            records = [json.loads(line) for line in self.path.read_bytes().splitlines()]
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

    def _check_settings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if found := list(differences(before, now)):
            raise OptionError(
                f"{self._journal.path} is from a batch with other settings: {'; '.join(found)}. "
                "Give the same settings to --resume, or another output to -o"
            )


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
