"""Where records go: to the journal as they finish, to the output in the order of the prompts.

The output holds what is complete from its beginning on and can be followed; the journal beside it,
OUTPUT.part, holds everything that is finished and is removed when the output is complete. After a
crash the output is made anew from the journal. Knows no processes, no models.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from ggufspec.batch.journal import Journal, line_of
from ggufspec.batch.order import InOrder
from ggufspec.batch.settings import differences, run_name
from ggufspec.errors import CacheError, GgufspecError, OptionError

Record = dict[str, Any]


class Results(Protocol):
    """Takes records. `records` are those that there are, by index; `known` is what all texts with
    a seed begin from, once somebody has found out (see engine.calibration.settle)."""

    records: dict[int, Record]
    known: dict[str, object] | None

    def know(self, known: dict[str, object]) -> None: ...
    def add(self, record: Record) -> None: ...
    def close(self) -> None: ...


class StreamResults:
    """Records to a stream, in order; there is nothing to go on with after a crash."""

    def __init__(self, stream: IO[bytes], settings: Mapping[str, Any], n_prompts: int) -> None:
        self.records: dict[int, Record] = {}
        self.known: dict[str, object] | None = None
        self._stream = stream
        self._run = run_name(settings)
        self._order: InOrder[bytes] = InOrder(range(n_prompts))

    def know(self, known: dict[str, object]) -> None:
        self.known = known

    def add(self, record: Record) -> None:
        """Write it when its turn has come. Raises OSError as the stream does."""
        record["run"] = self._run
        self.records[record["index"]] = record
        for line in self._order.push(record["index"], line_of(record)):
            self._stream.write(line)
            self._stream.flush()

    def close(self) -> None:
        """Nothing is held back that could be written; stdout is not ours to close."""
        if self._stream is not sys.stdout.buffer:
            self._stream.close()


class FileResults:
    """Records to a file and its journal."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        n_prompts: int,
        *,
        resume: bool = False,
        again: bool = False,
    ) -> None:
        """Begin, or go on where an earlier run of the same `settings` was stopped.

        again: of what is there, drop what failed. Raises OptionError where there is something that
        must not be overwritten or is of other settings, CacheError for what cannot be written.
        """
        self.path = path
        self.records: dict[int, Record] = {}
        self.known: dict[str, object] | None = None
        self._n_prompts = n_prompts
        self._run = run_name(settings)
        _check_place(path)
        part = path.with_name(f"{path.name}.part")
        if not resume:
            _refuse_existing(path, part)
        self._journal = Journal(part)
        self._order: InOrder[bytes] = InOrder(range(n_prompts))
        is_ours = False  # whether it has nothing that was there before
        try:
            held = self._journal.read()
            is_ours = held is None
            if held is None:
                found = self._of_output() if path.exists() else []
                kept = [record for record in found if not (again and record["error"])]
                self._take(kept)
                self._journal.begin(settings, [line_of(record) for record in kept])
            else:
                self._check_same(held[0], settings)
                self._take(held[1])
            if again:
                self.records = {i: each for i, each in self.records.items() if not each["error"]}
            self._is_new = is_ours and not self.records
            self._output = self._opened()
            for index in sorted(self.records):
                self._put(index)
        except GgufspecError:
            if is_ours:
                self._journal.remove()
            else:
                self._journal.close()
            raise

    def know(self, known: dict[str, object]) -> None:
        """Texts of this batch begin from that, in later runs of it too."""
        self.known = known
        self._journal.append(line_of({"known": known}))

    def add(self, record: Record) -> None:
        """Afterwards it is on the disk. Raises CacheError."""
        record["run"] = self._run
        self._journal.append(line_of(record))
        self.records[record["index"]] = record
        self._put(record["index"])

    def close(self) -> None:
        """The journal goes if the output is complete or nothing was done, and stays if not."""
        try:
            with self._output, self._explained():
                self._output.flush()
                os.fsync(self._output.fileno())
        except CacheError:
            self._journal.close()
            raise
        was_never_begun = self._is_new and not self.records
        if was_never_begun:
            with contextlib.suppress(OSError):
                self.path.unlink()
        if was_never_begun or len(self.records) == self._n_prompts:
            self._journal.remove()
        else:
            self._journal.close()

    def _put(self, index: int) -> None:
        with self._explained():
            for line in self._order.push(index, line_of(self.records[index])):
                self._output.write(line)
            self._output.flush()

    def _take(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            if "known" in line:
                self.known = line["known"]
            else:
                self.records[line["index"]] = line

    def _opened(self) -> IO[bytes]:
        with self._explained():
            return self.path.open("wb")

    def _of_output(self) -> list[Record]:
        """The records of an output that is complete: it has no journal any more."""
        try:
            records = [json.loads(line) for line in self.path.read_bytes().splitlines()]
            indices = [record["index"] for record in records]
            runs = {record["run"] for record in records}
        except (ValueError, TypeError, KeyError, RecursionError):
            indices, runs = [], set()
        if runs != {self._run} or indices != list(range(self._n_prompts)):
            raise OptionError(
                f"{self.path} is complete, but not of these prompts, models and settings, or it is "
                "of another program: there is nothing to go on with. Give another name to -o"
            )
        return records

    def _check_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        found = differences(before, now)
        if found:
            raise OptionError(
                f"{self._journal.path} is of another batch: {'; '.join(found)}. Give the same to "
                "--resume, or another name to -o"
            )

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"cannot write {self.path}: {error.strerror or error}; what is finished is kept in "
                f"{self._journal.path.name}: make room, and --resume"
            ) from error


def is_stream(path: Path) -> bool:
    """Whether that is no file that could be gone on with: a terminal, a pipe, /dev/null."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise CacheError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise CacheError(f"cannot write {path}: there is no folder {path.parent}")


def _refuse_existing(path: Path, part: Path) -> None:
    if part.exists():
        raise OptionError(
            f"{part} is there: a batch was interrupted. --resume goes on with it; remove it to "
            "begin anew, or give another name to -o"
        )
    if path.exists():
        raise OptionError(f"{path} is there already: give another name to -o, or remove it")
