"""Disks on which writes fail: a small one that is filled on purpose, and a limit of file sizes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096  # bytes that a file of a small disk takes at least
_N_PAGES = 256


class SmallDisk:
    """A file system of a megabyte, of which `leave` fills all but a few pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder.parent / "ballast"

    def leave(self, n_bytes: int) -> None:
        """Let new data take `n_bytes` more, in whole pages."""
        self._ballast.unlink(missing_ok=True)
        found = os.statvfs(self.folder)
        self._ballast.write_bytes(bytes(found.f_bavail * found.f_frsize - n_bytes))

    def leave_all(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(at: Path) -> Iterator[SmallDisk]:
    """Mount one at a new folder; skips the test where that is not allowed."""
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_N_PAGES * PAGE}", "tmpfs", str(at)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"file systems cannot be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    try:
        (at / "disk").mkdir()
        yield SmallDisk(at / "disk")
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@contextmanager
def longest_file(n_bytes: int) -> Iterator[Callable[[int], None]]:
    """Within the block, this process cannot write files beyond so many bytes (EFBIG); -1: it can.

    What is yielded sets another number.
    """
    resource = pytest.importorskip("resource", reason="needs a limit of file sizes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(n_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))

    limit(n_bytes)
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their path in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
