"""The user's cache folder, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from ggufspec.common.progress import Progress
from ggufspec.errors import CacheError

if sys.platform != "win32":
    import fcntl


CACHE_VARIABLE = "GGUFSPEC_CACHE"

# By platform and purpose: (environment variable with the folder, else the folder below home).
_FOLDERS = {
    "win32": {"cache": ("LOCALAPPDATA", "AppData/Local"), "config": ("APPDATA", "AppData/Roaming")},
    "darwin": {"cache": ("", "Library/Caches"), "config": ("", "Library/Application Support")},
}
_XDG_FOLDERS = {"cache": ("XDG_CACHE_HOME", ".cache"), "config": ("XDG_CONFIG_HOME", ".config")}
_SUFFIX = ".ggufspec-tmp"
_POLL_SECONDS = 0.05  # between attempts to get a lock
_BLOCK = 2**16  # bytes of each block in a fingerprint


class Place(NamedTuple):
    """Text of error messages: a folder's name, and how to choose another folder."""

    name: str
    other: str


_CACHE = Place(
    "the cache folder",
    f"choose another folder with --cache-dir or the environment variable {CACHE_VARIABLE}",
)
USER_FOLDER = Place("the folder", "name a file elsewhere")


def default_cache_dir() -> Path:
    """The folder for files that can be made again: `$GGUFSPEC_CACHE` or the platform's default.

    Raises CacheError if the variable is not set and there is no home folder.
    """
    try:
        if chosen := os.environ.get(CACHE_VARIABLE):
            return Path(chosen).expanduser()
        return platform_folder("cache") / "ggufspec"
    except RuntimeError as error:
        raise CacheError(
            "there is no home folder to keep a cache in: name a folder with --cache-dir or the "
            f"environment variable {CACHE_VARIABLE}"
        ) from error


def platform_folder(purpose: str) -> Path:
    """The user's folder for "cache" or "config". Raises RuntimeError without a home folder."""
    # platformdirs would accept a relative XDG_CACHE_HOME, and use a folder "~" without a home.
    variable, usual = _FOLDERS.get(sys.platform, _XDG_FOLDERS)[purpose]
    chosen = Path(os.environ.get(variable, ""))
    return chosen if chosen.is_absolute() else Path.home() / usual


def is_stream(path: Path) -> bool:
    """Whether the path is a terminal, pipe or device such as /dev/null: it cannot be replaced."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def write_whole(
    path: Path,
    n_bytes: int,
    chunks: Iterable[bytes | memoryview],
    progress: Progress | None = None,
    place: Place = _CACHE,
) -> None:
    """Write `chunks`, `n_bytes` in total, to a file; see `whole_file`. Raises CacheError."""
    with whole_file(path, n_bytes, place) as file:
        n_done = 0
        for chunk in chunks:
            with _explained(path, n_bytes, place):
                write_all(file, chunk)
            n_done += len(chunk)
            if progress is not None:
                progress(n_done, n_bytes)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    # tempfile.TemporaryDirectory would leave it if a signal arrives while it is created.
    folder = Path(tempfile.gettempdir(), prefix + secrets.token_hex(8))
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def whole_file(path: Path, n_bytes: int = 0, place: Place = USER_FOLDER) -> Iterator[FileIO]:
    """A temporary file beside `path`, which replaces `path` at the end of the block.

    `n_bytes`: the free space that it needs at least. The temporary file is synced to the disk, then
    renamed; on failure it is removed. Each call also removes temporary files of killed processes.
    Several processes may write at once. Raises CacheError if the file cannot be written.
    """
    with _explained(path, n_bytes, place):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        n_free = free_bytes(path.parent)
        if n_free is not None and n_free < n_bytes:  # fail before gigabytes are written
            raise OSError(errno.ENOSPC, "not enough space")
        file, temporary = _open_temporary(path)
    try:
        with file:
            yield file
            with _explained(path, n_bytes, place):
                os.fsync(file.fileno())
                if sys.platform == "win32":
                    file.close()  # an open file cannot be renamed there
                os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def alone(path: Path, on_wait: Callable[[], object], seconds: float) -> Iterator[None]:
    """Let one process or thread at a time run the block, by a lock on the file `path`.

    If it has to wait, `on_wait` is called, and after `seconds` it runs at the same time. It does
    not wait where the file cannot be made, and on Windows.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            number = stack.enter_context(FileIO(path, "a")).fileno()
            until = None
            while sys.platform != "win32":
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if until is None:
                        on_wait()
                        until = monotonic() + seconds
                    if monotonic() > until:
                        break
                    sleep(_POLL_SECONDS)
        yield


def write_all(file: FileIO, chunk: bytes | memoryview) -> None:
    """Write a whole chunk; one `write` may write only a part. Raises OSError."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def write_file(path: Path, data: bytes) -> None:
    """Replace a file that the user has named, or write to a device or pipe. Raises CacheError."""
    if not is_stream(path):
        write_whole(path, len(data), [data], place=USER_FOLDER)
        return
    with disk_errors(f"write {path}", "; name another file"):
        path.write_bytes(data)


@contextlib.contextmanager
def disk_errors(action: str, remedy: str) -> Iterator[None]:
    """Turn an OSError of the block into the CacheError "cannot {action}: ...{remedy}"."""
    try:
        yield
    except OSError as error:
        raise CacheError(f"cannot {action}: {error.strerror or error}{remedy}") from error


def check_writable(path: Path) -> None:
    """Raise CacheError if `write_file` could not write this file; call it before long work."""
    if is_stream(path):
        return
    with _explained(path, 0, USER_FOLDER):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        try_to_write(path)


def try_to_write(path: Path, n_bytes: int = 0) -> None:
    """Write `n_bytes` zero bytes to a temporary file beside `path`. Raises OSError."""
    file, temporary = _open_temporary(path)
    try:
        with file:
            write_all(file, bytes(n_bytes))
    finally:
        temporary.unlink()


def fingerprint_of(paths: Iterable[Path], n_blocks: int = 2) -> str:
    """A fast hash of each file's size and of `n_blocks` evenly spaced blocks. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for i in range(n_blocks):
                file.seek(i * max(size - _BLOCK, 0) // (n_blocks - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def free_bytes(folder: Path) -> int | None:
    """Free bytes on the disk of a folder, which need not exist yet; None: unknown."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def format_bytes(n_bytes: int) -> str:
    """A readable number of bytes: 7.8 MB, 240 MB, 8.4 GB."""
    value, unit = (n_bytes / 1e6, "MB") if n_bytes < 999.5e6 else (n_bytes / 1e9, "GB")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


@contextlib.contextmanager
def _explained(path: Path, n_bytes: int, place: Place) -> Iterator[None]:
    """Turn an OSError of the block, which must not call back, into a CacheError with advice."""
    try:
        yield
    except OSError as error:
        folder, reason = path.parent, error.strerror or str(error)
        if os.path.isfile(folder):  # Path.is_file would raise if a parent cannot be read
            reason = "it is a file, not a folder"
        n_free = free_bytes(folder)
        free = "an unknown amount is" if n_free is None else f"{format_bytes(n_free)} are"
        needed = f"It needs {format_bytes(n_bytes)}, {free} free there. Make room, or "
        raise CacheError(
            f"cannot write {path.name} into {place.name} {folder}: {reason}. "
            f"{needed if n_bytes else 'Instead, '}{place.other}."
        ) from error


def _open_temporary(path: Path) -> tuple[FileIO, Path]:
    """A new file beside `path`; its lock tells other processes that this one still writes it."""
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
        file = FileIO(temporary, "x")
        if sys.platform == "win32":
            return file, temporary  # an open file cannot be deleted there: no lock is needed
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if temporary.exists():
            return file, temporary
        file.close()  # another process removed it between creation and lock


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if sys.platform != "win32":  # the lock fails if another process writes this file
                file = stack.enter_context(FileIO(leftover, "r+"))
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
