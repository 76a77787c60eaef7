"""Files are written whole, or not at all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from full_disk import PAGE, contents, longest_file, small_disk
from patience import PATIENCE

from ggufspec.common.files import alone, write_file
from ggufspec.errors import CacheError


def test_a_file_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "plot.svg"
    path.write_text("of old")
    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(CacheError, match=r"plot\.svg into the folder .*: Permission denied"):
        write_file(path, b"new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["of old"]


def test_every_length_at_which_a_file_cannot_grow(tmp_path: Path) -> None:
    path, new = tmp_path / "plot.svg", b"new" * 20
    for limit in range(len(new)):
        path.write_bytes(b"of old")
        with longest_file(limit), pytest.raises(CacheError, match="File too large"):
            write_file(path, new)
        assert contents(tmp_path) == {"plot.svg": b"of old"}
    with longest_file(len(new)):
        write_file(path, new)
    assert contents(tmp_path) == {"plot.svg": new}


def test_every_room_that_a_disk_may_have_left(tmp_path: Path) -> None:
    new = b"new!" * PAGE  # four pages
    with small_disk(tmp_path / "small") as disk:
        path = disk.folder / "plot.svg"
        for n_pages in range(4):
            path.write_bytes(b"of old")
            disk.leave(n_pages * PAGE)
            with pytest.raises(CacheError, match=r"not enough space.* are free there"):
                write_file(path, new)
            assert contents(disk.folder) == {"plot.svg": b"of old"}
        disk.leave(4 * PAGE)
        write_file(path, new)
        assert contents(disk.folder) == {"plot.svg": new}


def test_one_at_a_time(tmp_path: Path) -> None:
    path, waits = tmp_path / "new" / "lock", threading.Event()
    inside: list[int] = []

    def second() -> int:
        with alone(path, waits.set, PATIENCE):
            return len(inside)

    with ThreadPoolExecutor(1) as pool:
        with alone(path, lambda: pytest.fail("there is nobody else"), PATIENCE):
            found = pool.submit(second)
            assert waits.wait(PATIENCE)
            inside.append(1)
        assert found.result(PATIENCE) == 1
    with alone(path, lambda: None, 0), alone(path, lambda: None, 0):
        pass  # whoever has waited for long enough goes on
    with alone(tmp_path / "new" / "lock" / "below", lambda: None, 0):
        pass  # as where nothing can be written
