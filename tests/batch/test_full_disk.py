"""No failed write of a batch loses a finished record, wherever it fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from full_disk import PAGE, longest_file, small_disk

from ggufspec.batch.results import FileResults
from ggufspec.errors import CacheError

SETTINGS = {"seed": 1}
N = 4


def results(folder: Path, **how: bool) -> FileResults:
    return FileResults(folder / "r.jsonl", SETTINGS, N, **how)


def record(index: int, n: int, error: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": str(index) * n, "error": error}


def write(folder: Path, n: int, *indices: int, failed: int | None = None, **how: bool) -> None:
    """Take up a batch, and finish prompts that have no record."""
    made = results(folder, **how)
    try:
        for index in indices:
            if index not in made.records:
                made.add(record(index, n, "died" if index == failed else None))
    finally:
        made.close()


def complete(folder: Path, n: int) -> None:
    write(folder, n, *range(N))


def with_a_failure(folder: Path, n: int) -> None:
    write(folder, n, *range(N), failed=2)


def partial(folder: Path, n: int) -> None:
    write(folder, n, 0, 2)


def begun(folder: Path, n: int) -> None:
    write(folder, n, 0)


STATES = {each.__name__: each for each in (complete, with_a_failure, partial, begun)}


def texts(folder: Path) -> dict[int, str]:
    """The finished texts, by index, as a resumed batch finds them."""
    made = results(folder, resume=True)
    made.close()
    return {index: each["text"] for index, each in made.records.items() if not each["error"]}


def failure(folder: Path, n: int) -> str | None:
    """The error of a run that shall complete the batch; None if it does."""
    try:
        write(folder, n, *range(N), resume=True, retry_failed=True)
    except CacheError as error:
        return str(error)
    return None


def check_resumes(folder: Path, n: int, before: dict[int, str]) -> None:
    """Nothing finished is lost, and a further run completes the output."""
    assert before.items() <= texts(folder).items()
    write(folder, n, *range(N), resume=True, retry_failed=True)
    lines = (folder / "r.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [str(i) * n for i in range(N)]
    assert [path.name for path in folder.iterdir()] == ["r.jsonl"]


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What to do at the next syncs, which take milliseconds and are left out."""
    left: list[Callable[[], object]] = []
    monkeypatch.setattr(os, "fsync", lambda _: left.pop(0)() if left else None)
    return left


@pytest.mark.parametrize("state", STATES)
@pytest.mark.usefixtures("syncs")
def test_every_length_at_which_a_file_cannot_grow(state: str, tmp_path: Path) -> None:
    """The journal is longer than the output, so it is the journal that fails."""
    errors = []
    for limit in range(0, 900, 23):
        folder = tmp_path / str(limit)
        folder.mkdir()
        STATES[state](folder, 30)
        before = texts(folder)
        with longest_file(limit):
            errors.append(failure(folder, 30))
        check_resumes(folder, 30, before)
    failed = [*filter(None, errors)]
    assert len(failed) > 5
    assert errors[-1] is None
    assert all("File too large" in error and "--resume" in error for error in failed)


@pytest.mark.parametrize("state", STATES)
def test_every_length_at_which_the_output_cannot_grow(
    state: str, tmp_path: Path, syncs: list[Callable[[], object]]
) -> None:
    """Its records are in the journal by then, and no file grows from some sync on."""
    n_failed, n_characters = 0, 9000
    for n_syncs, share in product((1, 2, 3, 4, 5), range(9)):
        folder = tmp_path / f"{n_syncs} {share}"
        folder.mkdir()
        STATES[state](folder, n_characters)
        before = texts(folder)
        with longest_file(-1) as limit:
            syncs += [lambda: None] * (n_syncs - 1)
            syncs += [lambda: limit(share * N * n_characters // 8)]  # noqa: B023
            error = failure(folder, n_characters)
            syncs.clear()
        n_failed += "r.jsonl: File too large" in (error or "")
        check_resumes(folder, n_characters, before)
    assert n_failed > 5


@pytest.mark.parametrize("state", STATES)
@pytest.mark.usefixtures("syncs")
def test_every_room_that_a_disk_may_have_left(state: str, tmp_path: Path) -> None:
    n = 2500  # characters of a text, so that two take more than a page
    with small_disk(tmp_path / "small") as disk:
        errors = []
        for n_pages in range(7):
            STATES[state](disk.folder, n)
            before = texts(disk.folder)
            disk.leave(n_pages * PAGE)
            errors.append(failure(disk.folder, n))
            disk.leave_all()
            check_resumes(disk.folder, n, before)
            (disk.folder / "r.jsonl").unlink()
    assert errors[-1] is None
    assert all("No space left" in error for error in filter(None, errors))
    assert len([*filter(None, errors)]) >= 3


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that is unreadable")
def test_a_disk_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").symlink_to("/proc/self/mem")  # reading its first byte is an EIO
    with pytest.raises(CacheError, match=r"cannot read .*r\.jsonl: Input/output error"):
        results(tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
