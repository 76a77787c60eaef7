"""Journal and output: records survive crashes, other files are left alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ggufspec.batch.results import FileResults, Journal
from ggufspec.errors import CacheError, OptionError

SETTINGS = {"seed": 1, "prompts": "abc"}
N = 4


def results(folder: Path, settings: dict[str, Any] = SETTINGS, **how: bool) -> FileResults:
    return FileResults(folder / "r.jsonl", settings, N, **how)


def record(index: int, error: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": f"é{index}\u2028", "error": error}


def written(folder: Path) -> list[int]:
    lines = (folder / "r.jsonl").read_bytes().splitlines()
    return [json.loads(line)["index"] for line in lines]


def crashed(folder: Path, *indices: int) -> Path:
    """The journal of a batch that was killed when these prompts were finished."""
    made = results(folder)
    made.keep_profile({"costs": 1})
    for index in indices:
        made.add(record(index))
    made.close()
    return folder / "r.jsonl.part"


def opens(descriptor: int) -> str:
    """The path of an open file; empty if it is closed by now."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def test_the_output_is_the_ordered_beginning_and_the_journal_has_everything(tmp_path: Path) -> None:
    made = results(tmp_path)
    for index, so_far in [(2, []), (0, [0]), (1, [0, 1, 2])]:
        made.add(record(index))
        assert written(tmp_path) == so_far
    assert (tmp_path / "r.jsonl.part").read_bytes().count(b"\n") == 1 + 3
    made.add(record(3))
    made.close()
    assert written(tmp_path) == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_finished_records_are_restored(tmp_path: Path) -> None:
    crashed(tmp_path, 2, 0)
    again = results(tmp_path, resume=True)
    assert sorted(again.records) == [0, 2]
    assert again.records[2]["text"] == "é2\u2028"
    assert again.profile == {"costs": 1}
    again.add(record(1))
    again.add(record(3))
    again.close()
    assert written(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [lambda line: line[:-1], lambda line: b"\0" * 30 + b"\n"])
def test_a_torn_last_line_is_cut_off(torn: Callable[[bytes], bytes], tmp_path: Path) -> None:
    part = crashed(tmp_path, 0, 1)
    data = part.read_bytes()
    *lines, last = data.splitlines(keepends=True)
    part.write_bytes(b"".join([*lines, torn(last)]))
    again = results(tmp_path, resume=True)
    assert sorted(again.records) == [0]
    again.add(record(1))
    again.close()
    assert part.read_bytes() == data, "nothing of the torn one is left"


def test_a_journal_that_was_never_begun_is_begun(tmp_path: Path) -> None:
    part = crashed(tmp_path, 1)
    part.write_bytes(part.read_bytes()[:15])
    (tmp_path / "r.jsonl").unlink()
    again = results(tmp_path, resume=True)
    assert again.records == {}
    again.add(record(0))
    again.close()
    assert part.read_bytes().count(b"\n") == 2


def test_a_damaged_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    part = crashed(tmp_path, 0, 1)
    part.write_bytes(part.read_bytes().replace(b'{"index": 0', b'{"index# 0'))
    with pytest.raises(OptionError, match=r"line 3 of .* is damaged"):
        results(tmp_path, resume=True)
    assert part.exists()


@pytest.mark.parametrize("data", [b"something else\n", b"{}\n"])
def test_a_file_that_is_no_journal_is_left_alone(data: bytes, tmp_path: Path) -> None:
    part = tmp_path / "r.jsonl.part"
    part.write_bytes(data + b"\n")
    with pytest.raises(OptionError, match="not the journal of a batch"):
        results(tmp_path, resume=True)
    assert part.read_bytes() == data + b"\n"


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    crashed(tmp_path, 0)
    with pytest.raises(OptionError, match=r"other settings: seed was 1, is 2\. Give the same"):
        results(tmp_path, {**SETTINGS, "seed": 2}, resume=True)
    results(tmp_path, resume=True).close()
    assert written(tmp_path) == [0]


def test_what_is_there_is_not_overwritten_without_being_asked(tmp_path: Path) -> None:
    part = crashed(tmp_path, 0)
    with pytest.raises(OptionError, match=r"r\.jsonl\.part exists: a batch was interrupted"):
        results(tmp_path)
    part.unlink()
    with pytest.raises(OptionError, match=r"r\.jsonl exists already"):
        results(tmp_path)


def test_a_complete_batch_is_complete_again(tmp_path: Path) -> None:
    crashed(tmp_path, 0, 1, 2, 3)
    before = (tmp_path / "r.jsonl").read_bytes()
    again = results(tmp_path, resume=True)
    assert sorted(again.records) == [0, 1, 2, 3]
    again.close()
    assert (tmp_path / "r.jsonl").read_bytes() == before
    with pytest.raises(OptionError, match="complete, but has other prompts"):
        results(tmp_path, {**SETTINGS, "seed": 2}, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
    assert (tmp_path / "r.jsonl").read_bytes() == before


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    for data in (b"my diary\n", b'{"index": 0}\n'):
        (tmp_path / "r.jsonl").write_bytes(data)
        with pytest.raises(OptionError, match="not written by ggufspec batch"):
            results(tmp_path, resume=True)
        assert (tmp_path / "r.jsonl").read_bytes() == data


@pytest.mark.parametrize("is_complete", [True, False])
def test_what_failed_is_dropped_when_it_is_to_be_tried_again(
    is_complete: bool, tmp_path: Path
) -> None:
    made = results(tmp_path)
    for index in range(N if is_complete else N - 1):
        made.add(record(index, "died" if index == 1 else None))
    made.close()
    assert len(results_of(tmp_path, retry_failed=False)) == (N if is_complete else N - 1)
    again = results(tmp_path, resume=True, retry_failed=True)
    assert 1 not in again.records
    assert written(tmp_path) == [0]
    again.add(record(1))
    again.close()
    assert [r["error"] for r in results_of(tmp_path, retry_failed=False).values()].count(None) == (
        N if is_complete else N - 1
    )


def results_of(folder: Path, **how: bool) -> dict[int, dict[str, Any]]:
    made = results(folder, resume=True, **how)
    made.close()
    return made.records


def test_a_crash_while_a_complete_output_is_taken_up_again_loses_nothing(tmp_path: Path) -> None:
    """Its journal is begun with what the output has: in full, or it counts for nothing."""
    crashed(tmp_path, 0, 1, 2, 3)
    path = tmp_path / "r.jsonl.part"
    journal = Journal(path)
    journal.begin(SETTINGS, (tmp_path / "r.jsonl").read_bytes().splitlines(keepends=True))
    journal.close()
    data = path.read_bytes()
    for n_lost in (1, 50, len(data) - 10):
        path.write_bytes(data[:-n_lost])
        assert sorted(results_of(tmp_path)) == [0, 1, 2, 3]
    assert written(tmp_path) == [0, 1, 2, 3]


def test_two_batches_do_not_write_the_same_file(tmp_path: Path) -> None:
    first = results(tmp_path)
    with pytest.raises(CacheError, match="in use by another batch"):
        results(tmp_path, resume=True)
    first.add(record(0))
    first.close()
    assert written(tmp_path) == [0]


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="it is a folder"):
        FileResults(tmp_path, SETTINGS, N)
    with pytest.raises(CacheError, match="there is no folder"):
        results(tmp_path / "none")
    with pytest.raises(CacheError, match="cannot write"):
        results(Path("/proc"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs a list of open files")
def test_windows_which_removes_no_open_file_keeps_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, remove = tmp_path / "r.jsonl.part", Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if str(self) in map(opens, map(int, os.listdir("/proc/self/fd"))):
            raise PermissionError("in use")
        remove(self, missing_ok)

    made = results(tmp_path)
    for index in range(N):
        made.add(record(index))
    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(sys, "platform", "win32")
    made.close()
    assert not path.exists()


def test_an_id_of_any_characters_can_be_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.close()
    made = results(tmp_path)
    made.add({**record(0), "id": "\ud800"})
    made.close()
    assert results_of(tmp_path)[0]["id"] == "\ud800"
