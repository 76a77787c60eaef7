"""Downloads files from the hub into its standard cache, and checks their hashes.

huggingface_hub (2.4) restarts a broken download in the next run, and checks only its size. So a
part file is received here, and linked into the snapshot when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from io import FileIO
from pathlib import Path

from ggufspec.common.facts import json_object
from ggufspec.common.files import (
    Place,
    default_cache_dir,
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

PART_SUFFIX = ".ggufspec-part"
N_PARALLEL = 3
_HUB_CACHE = Place(
    "the hub's cache", "choose another folder with the environment variable HF_HUB_CACHE"
)
_CHUNK = 2**20
_POLL_SECONDS = 0.1
_JOIN_SECONDS = 2.0  # how long an error waits for the threads to end


def fetch(files: Sequence[RemoteFile], progress: NamedProgress | None = None) -> tuple[Path, ...]:
    """The paths of the files in the cache: missing ones are downloaded, every hash is checked.

    Raises DownloadError; CacheError if they cannot be written. After an error or an interrupt, the
    next call continues after the bytes that were received.
    """
    missing = {file.blob: file for file in files if not _is_here(file)}
    _check_room([*missing.values()])
    with hub.quiet():
        if missing:
            _receive_all([*missing.values()], progress)
        paths = tuple(_link(file, files[i + 1 :]) for i, file in enumerate(files))
    _verify(list(zip(files, paths, strict=True)), progress)
    return paths


def _check_room(missing: Sequence[RemoteFile]) -> None:
    """Raise CacheError if the disk has no room, before anything is downloaded."""
    parts = [Path(f"{_blob(file)}{PART_SUFFIX}") for file in missing]
    n_needed = sum(file.size for file in missing)
    n_needed -= sum(part.stat().st_size for part in parts if part.is_file())
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
    waiting, outcomes = iter(files), queue.SimpleQueue[BaseException | None]()
    n_done = dict.fromkeys((file.path for file in files), 0)
    stop = threading.Event()

    def work() -> None:
        try:
            for file in waiting:  # the threads share the iterator
                if stop.is_set():
                    break
                _receive(file, stop, n_done)
            outcomes.put(None)
        except BaseException as error:  # raised by the caller
            outcomes.put(error)

    n_threads = min(N_PARALLEL, len(files))
    # Daemons: a thread that waits for a silent hub must not delay the exit.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(n_threads)]
    total = sum(file.size for file in files)
    try:
        for thread in threads:
            thread.start()
        n_running = n_threads
        while n_running:
            with contextlib.suppress(queue.Empty):
                outcome = outcomes.get(timeout=_POLL_SECONDS)
                n_running -= 1
                if outcome is not None:
                    raise outcome
            if progress is not None:
                progress("Downloading", sum(n_done.values()), total)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_JOIN_SECONDS)


def _receive(file: RemoteFile, stop: threading.Event, n_done: dict[str, int]) -> None:
    """Receive one blob; continues where its part file ends."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    blob = _blob(file)
    # The lock that huggingface_hub takes for this blob: keeps other processes from writing it.
    lock = local.hub_cache() / ".locks" / blob.parents[1].name / f"{file.blob}.lock"
    with contextlib.ExitStack() as locked:
        with _disk(file):
            lock.parent.mkdir(parents=True, exist_ok=True)
            blob.parent.mkdir(parents=True, exist_ok=True)
            locked.enter_context(WeakFileLock(lock))
        if not _is_here(file):
            with contextlib.closing(_PartFile(file, n_done)) as part:
                if part.n_bytes < file.size:
                    hub.retry(partial(part.receive, stop), lambda: part.n_bytes, stop.wait)
                if not stop.is_set():
                    part.become(blob)


class _PartFile:
    def __init__(self, file: RemoteFile, n_done: dict[str, int]) -> None:
        self._file = file
        self._n_done = n_done
        self.path = Path(f"{_blob(file)}{PART_SUFFIX}")
        with _disk(file):
            self._open = FileIO(self.path, "a+")
            if self.path.stat().st_size > file.size:
                self._open.truncate(0)
            self._open.seek(0)
            self._digest = _digest(file)
            self.n_bytes = 0
            while chunk := self._open.read(_CHUNK):
                self._count(chunk)

    def receive(self, stop: threading.Event) -> None:
        """Receive the rest in one request. Raises DownloadError."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # lazily exported
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        if stop.is_set():
            return
        file = self._file
        url = hf_hub_url(file.repo, file.path, revision=file.commit, endpoint=hub.endpoint())
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if self.n_bytes:
            headers["Range"] = f"bytes={self.n_bytes}-"
        with (
            hub.explained(file.repo, file.revision, file.path),
            get_session().stream("GET", url, headers=headers, timeout=hub.TIMEOUT) as response,
        ):
            hf_raise_for_status(response)
            starts = response.headers.get("Content-Range", "").startswith(f"bytes {self.n_bytes}-")
            if self.n_bytes and not (response.status_code == 206 and starts):
                with _disk(file):
                    self._open.truncate(0)
                self._digest, self.n_bytes = _digest(file), 0
            for chunk in response.iter_bytes():
                if stop.is_set():
                    return
                with _disk(file):
                    write_all(self._open, chunk)
                self._count(chunk)
                if self.n_bytes > file.size:
                    self._discard("is longer than its size on the hub")
        if self.n_bytes < file.size:
            raise hub.Transient(
                f"the connection broke off after {format_bytes(self.n_bytes)} of {file.path} "
                f"({format_bytes(file.size)}); {hub.KEPT}"
            )

    def become(self, blob: Path) -> None:
        """Rename to the blob. Raises DownloadError, and deletes the part, if the hash differs."""
        if self._digest.hexdigest() != self._file.blob:
            self._discard("is damaged: its hash is not the one on the hub")
        with _disk(self._file):
            os.fsync(self._open.fileno())
            self._open.close()
            os.replace(self.path, blob)
        if self._file.sha256 is not None:
            remember(blob, self._file.sha256)

    def close(self) -> None:
        with _disk(self._file):
            self._open.close()

    def _count(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.n_bytes += len(chunk)
        self._n_done[self._file.path] = self.n_bytes

    def _discard(self, why: str) -> None:
        with _disk(self._file):
            self._open.close()
            self.path.unlink(missing_ok=True)
        raise DownloadError(
            f"{self._file.path} from {self._file.repo} {why}. It was deleted: run the command "
            "again to download it; if that fails the same way, a proxy may change the file"
        )


def _link(file: RemoteFile, later: Sequence[RemoteFile]) -> Path:
    """Link the blob into the snapshot; record the commit of the revision.

    Without symbolic links the blob becomes the file, or is copied if one of the `later` files has
    the same content.
    """
    from huggingface_hub.file_download import are_symlinks_supported

    path, blob = _snapshot_path(file), _blob(file)
    with _disk(file):
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # made by another process
                if are_symlinks_supported(local.hub_cache()):
                    path.symlink_to(os.path.relpath(blob, path.parent))
                elif any(other.blob == file.blob for other in later):
                    _copy(blob, path)
                else:
                    blob.rename(path)
        _record_commit(file)
    return path


def _copy(blob: Path, path: Path) -> None:
    with blob.open("rb") as source:
        chunks = iter(partial(source.read, _CHUNK), b"")
        write_whole(path, blob.stat().st_size, chunks, place=_HUB_CACHE)


def _record_commit(file: RemoteFile) -> None:
    """Let the revision name the commit; atomically, since models are found by it."""
    reference = local.repo_folder(file.repo) / "refs" / file.revision
    data = file.commit.encode()
    is_known = reference.is_file() and reference.read_bytes() == data
    if file.revision != file.commit and not is_known:
        write_whole(reference, len(data), [data], place=_HUB_CACHE)


def _verify(pairs: Sequence[tuple[RemoteFile, Path]], progress: NamedProgress | None) -> None:
    """Hash files without a known hash. If one is wrong, removes it and raises DownloadError."""
    unknown = [
        (file, path)
        for file, path in pairs
        if file.sha256 is not None and known_sha256(path) != file.sha256
    ]
    found = hashes_of([path for _, path in unknown], progress)
    for (file, path), sha256 in zip(unknown, found, strict=True):
        if sha256 != file.sha256:
            local.remove([path])
            raise DownloadError(
                f"{file.path} in the cache was damaged: its hash is not the one on the hub. It was "
                "removed: run the command again to download it"
            )


def _disk(file: RemoteFile) -> AbstractContextManager[None]:
    """Turns OSErrors into CacheErrors; not for huggingface_hub, whose errors are OSErrors, too."""
    return disk_errors(
        f"write {file.path} into {local.hub_cache()}",
        ". Make room (`ggufspec models rm`), or choose another folder with the environment "
        f"variable HF_HUB_CACHE; {hub.KEPT}",
    )


def _digest(file: RemoteFile) -> hashlib._Hash:
    """A new digest of the kind that names the blob: sha256, or git's for files outside LFS."""
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _is_here(file: RemoteFile) -> bool:
    return _blob(file).is_file() or _snapshot_path(file).is_file()


def _blob(file: RemoteFile) -> Path:
    return local.repo_folder(file.repo) / "blobs" / file.blob


def _snapshot_path(file: RemoteFile) -> Path:
    folder = local.repo_folder(file.repo) / "snapshots" / file.commit
    return folder.joinpath(*file.path.split("/"))


# Hashes of files, stored by path, size and modification time.


def known_sha256(path: Path) -> str | None:
    """The stored hash of a file, if the file has not changed since."""
    with contextlib.suppress(CacheError, OSError):
        content = json_object(_record_path(path).read_bytes()) or {}
        if content.get("file") == _identity(path):
            return str(content.get("sha256"))
    return None


def hashes_of(paths: Sequence[Path], progress: NamedProgress | None = None) -> Iterator[str]:
    """Yields the sha256 of each file, computed and stored."""
    n_done, n_bytes = 0, sum(path.stat().st_size for path in paths)
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                n_done += len(chunk)
                if progress is not None:
                    progress("Verifying", n_done, n_bytes)
        remember(path, digest.hexdigest())
        yield digest.hexdigest()


def remember(path: Path, sha256: str) -> None:
    """Store the hash of a file; if it cannot be stored, it is computed again next time."""
    with contextlib.suppress(CacheError, OSError):
        data = json.dumps({"file": _identity(path), "sha256": sha256}).encode()
        write_whole(_record_path(path), len(data), [data])


def _identity(path: Path) -> list[str | int]:
    content = path.resolve()
    found = content.stat()
    return [str(content), found.st_size, found.st_mtime_ns]


def _record_path(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogatepass")).hexdigest()
    return default_cache_dir() / "verified" / f"{name[:32]}.json"
