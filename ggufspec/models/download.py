"""Downloads files from the hub into its standard cache, and checks their hashes.

huggingface_hub (2.4) deletes a partial file at an error or an interrupt, and checks only the size
of a complete one. So a part file is received here, and moved into the cache when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec.common.files import (
    Place,
    disk_errors,
    format_bytes,
    free_bytes,
    write_all,
    write_whole,
)
from ggufspec.common.progress import NamedProgress
from ggufspec.errors import CacheError, DownloadError
from ggufspec.models import hub, local
from ggufspec.models.hub import RemoteFile

if TYPE_CHECKING:
    import httpx2

PART_SUFFIX = ".ggufspec-part"
N_PARALLEL = 3
_HUB_CACHE = Place(
    "the hub's cache", "choose another folder with the environment variable HF_HUB_CACHE"
)
_CHUNK = 2**20
_POLL_SECONDS = 0.1
_JOIN_SECONDS = 2.0  # how long an error waits for the threads to end


def fetch(files: Sequence[RemoteFile], progress: NamedProgress | None = None) -> tuple[Path, ...]:
    """The paths of a model's files in the cache; missing ones are downloaded, and verified.

    Raises DownloadError; CacheError if they cannot be written. After an error or an interrupt, the
    next call continues after the bytes that were received.
    """
    missing = [file for file in files if not _path(file).is_file()]
    _check_room(missing)
    if missing:
        with hub.quiet():
            _receive_all(missing, progress)
    _record_commit(files[0])
    return tuple(map(_path, files))


def hashes_of(paths: Sequence[Path], progress: NamedProgress | None = None) -> Iterator[str]:
    """Computes and yields the sha256 of each file."""
    n_done, n_bytes = 0, sum(path.stat().st_size for path in paths)
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                n_done += len(chunk)
                if progress is not None:
                    progress("Verifying", n_done, n_bytes)
        yield digest.hexdigest()


def _check_room(missing: Sequence[RemoteFile]) -> None:
    """Raise CacheError if the disk has no room, before anything is downloaded."""
    n_needed = sum(file.size - _n_received(file) for file in missing)
    folder = local.hub_cache()
    n_free = free_bytes(folder)
    if n_free is not None and n_free < n_needed:
        raise CacheError(
            f"{format_bytes(n_needed)} must be downloaded into {folder}, where "
            f"{format_bytes(n_free)} are free: make room (`ggufspec models rm`), or choose "
            "another folder with the environment variable HF_HUB_CACHE"
        )


def _receive_all(files: Sequence[RemoteFile], progress: NamedProgress | None) -> None:
    """Receive several files at a time, in threads; an error or an interrupt ends all of them."""
    waiting, stop = iter(files), threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for file in waiting:  # the threads share the iterator
                _receive(file, stop)
        except BaseException as error:  # raised by the caller
            errors.append(error)

    n_threads = min(N_PARALLEL, len(files))
    # Daemons: a thread that waits for a silent hub must not delay the exit.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(n_threads)]
    total = sum(file.size for file in files)
    try:
        for thread in threads:
            thread.start()
        while not errors and (running := [each for each in threads if each.is_alive()]):
            running[0].join(_POLL_SECONDS)
            if progress is not None:
                progress("Downloading", sum(map(_n_received, files)), total)
        if errors:
            raise errors[0]
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_JOIN_SECONDS)


def _receive(file: RemoteFile, stop: threading.Event) -> None:
    """Receive one file, and link it into the snapshot."""
    from huggingface_hub.file_download import are_symlinks_supported
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # lazily exported

    path, blob = _path(file), _blob(file)
    # The lock that huggingface_hub takes for this blob: keeps other processes from writing it.
    lock = local.hub_cache() / ".locks" / blob.parents[1].name / f"{file.blob}.lock"
    with disk_errors(
        f"write {file.path} into {local.hub_cache()}",
        ". Make room (`ggufspec models rm`), or choose another folder with the environment "
        f"variable HF_HUB_CACHE; {hub.KEPT}",
    ):
        for folder in (lock.parent, blob.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if path.is_file():
                return
            if not blob.is_file():
                _download(file, stop)
            path.unlink(missing_ok=True)  # a link to a removed blob
            if are_symlinks_supported(local.hub_cache()):
                path.symlink_to(os.path.relpath(blob, path.parent))
            else:
                blob.rename(path)


def _download(file: RemoteFile, stop: threading.Event) -> None:
    """Download one blob; continues where its part file ends. `stop` ends the thread."""
    with FileIO(_part(file), "a+") as part:
        digest = _digest(file)
        part.seek(0)
        while chunk := part.read(_CHUNK):
            digest.update(chunk)

        def receive_rest() -> None:
            nonlocal digest
            with _request_from(file, part.tell()) as response:
                if response.status_code != 206:  # the server sends the whole file
                    part.truncate(0)
                    part.seek(0)
                    digest = _digest(file)
                for chunk in response.iter_bytes():
                    if stop.is_set():
                        raise SystemExit
                    write_all(part, chunk)
                    digest.update(chunk)
            if part.tell() < file.size:
                raise hub.Transient(
                    f"the connection broke off after {format_bytes(part.tell())} of {file.path} "
                    f"({format_bytes(file.size)}); {hub.KEPT}"
                )

        if part.tell() < file.size:
            hub.retry(receive_rest, part.tell)
        os.fsync(part.fileno())
    if digest.hexdigest() != file.blob:
        _part(file).unlink()
        raise DownloadError(
            f"{file.path} from {file.repo} is damaged: its hash is not the one on the hub. It was "
            "deleted: run the command again to download it; if that fails the same way, a proxy "
            "may change the file"
        )
    _part(file).replace(_blob(file))


@contextmanager
def _request_from(file: RemoteFile, start: int) -> Iterator[httpx2.Response]:
    """The answer to a request for the bytes from `start` on. Raises DownloadError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]  # lazily exported

    url = hf_hub_url(file.repo, file.path, revision=file.commit, endpoint=hub.endpoint())
    headers = {
        **build_hf_headers(),
        "Accept-Encoding": "identity",
        "Range": f"bytes={start}-",
    }
    with (
        hub.explained(file.repo, file.revision, file.path),
        get_session().stream("GET", url, headers=headers, timeout=hub.TIMEOUT) as response,
    ):
        hf_raise_for_status(response)
        yield response


def _record_commit(file: RemoteFile) -> None:
    """Let the revision name the commit; atomically, since models are found by it."""
    reference = local.repo_folder(file.repo) / "refs" / file.revision
    data = file.commit.encode()
    is_known = reference.is_file() and reference.read_bytes() == data
    if file.revision != file.commit and not is_known:
        write_whole(reference, len(data), [data], place=_HUB_CACHE)


def _digest(file: RemoteFile) -> hashlib._Hash:
    """A new digest of the kind that names the blob: sha256, or git's for files outside LFS."""
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _n_received(file: RemoteFile) -> int:
    for place in (_part(file), _blob(file), _path(file)):  # it moves in this order
        with suppress(OSError):
            return place.stat().st_size
    return 0


def _part(file: RemoteFile) -> Path:
    return Path(f"{_blob(file)}{PART_SUFFIX}")


def _blob(file: RemoteFile) -> Path:
    return local.repo_folder(file.repo) / "blobs" / file.blob


def _path(file: RemoteFile) -> Path:
    folder = local.repo_folder(file.repo) / "snapshots" / file.commit
    return folder.joinpath(*file.path.split("/"))
