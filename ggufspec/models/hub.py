"""Lists the files of a repository on the hub, and explains the hub's errors."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ggufspec.errors import DownloadError
from ggufspec.models.quants import stays_within

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each retry
LONGEST_WAIT = 30.0  # seconds; if the hub asks for a longer wait, that is an error
TIMEOUT = 20.0  # seconds in which no byte arrives
SHORT_TIMEOUT = 4.0  # of a question that can be left out
KEPT = "what was received is kept, and the next run continues from there"
_TRUE = {"1", "ON", "YES", "TRUE"}
Result = TypeVar("Result")


class Transient(DownloadError):
    """A temporary failure: connection, overload. wait: seconds, if the hub says when to retry."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub, at one commit."""

    repo: str
    revision: str  # as the user named it
    commit: str
    path: str
    size: int
    sha256: str | None  # None: the file is not in LFS
    blob: str  # the name of its content in the cache


def list_files(repo: str, revision: str, *, patient: bool = True) -> dict[str, RemoteFile]:
    """Ask the hub for a repository's GGUF files, by path. patient: retry. Raises DownloadError."""
    from huggingface_hub import HfApi

    timeout = TIMEOUT if patient else SHORT_TIMEOUT

    def ask() -> dict[str, RemoteFile]:
        with explained(repo, revision):
            try:
                info = HfApi(endpoint=endpoint()).model_info(
                    repo, revision=revision, files_metadata=True, timeout=timeout
                )
            except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
                raise DownloadError(_no_hub()) from error  # the answer is not that of a hub
            except ValueError as error:  # an invalid token, or an invalid date
                raise DownloadError(f"{_no_hub()}; or the token in HF_TOKEN ({error})") from error
        commit = info.sha or ""
        files = {}
        for found in info.siblings or ():
            path = found.rfilename
            if not isinstance(path, str):
                raise DownloadError(_no_hub())
            if not stays_within(path) or not path.lower().endswith(".gguf"):
                continue
            sha256 = found.lfs.sha256 if found.lfs else None
            blob = sha256 or found.blob_id or ""
            size = found.lfs.size if found.lfs else found.size
            # They become names of files, so they are checked.
            are_hashes = _is_hex(commit, 40) and _is_hex(blob, 64 if sha256 else 40)
            if not are_hashes or not isinstance(size, int) or size < 0:
                raise DownloadError(_no_hub())
            files[path] = RemoteFile(repo, revision, commit, path, size, sha256, blob)
        return files

    with quiet():
        return retry(ask) if patient else ask()


def endpoint() -> str | None:
    """The address of the hub, if HF_ENDPOINT is set."""
    return (os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."""
    chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return chosen.upper() in _TRUE


def retry(attempt: Callable[[], Result], n_done: Callable[[], int] = lambda: 0) -> Result:
    """Retry temporary failures after increasing waits. Raises the last Transient.

    Starts again with the shortest wait if `n_done` has grown since the last failure.
    """
    best, waits = n_done(), iter(WAITS)
    while True:
        try:
            return attempt()
        except Transient as error:
            if n_done() > best:
                best, waits = n_done(), iter(WAITS)
            wait = next(waits, None)
            asked = error.wait or 0.0
            if wait is None or asked > LONGEST_WAIT:
                raise
            time.sleep(max(wait, asked))


@contextlib.contextmanager
def explained(repo: str, revision: str, path: str | None = None) -> Iterator[None]:
    """Turns errors of huggingface_hub into a DownloadError that says what to do."""
    import httpx2
    from huggingface_hub import errors

    what = repo if path is None else f"{repo}/{path}"
    token = "the environment variable HF_TOKEN or `hf auth login`"
    messages: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{repo} is gated: accept its licence at "
        f"https://huggingface.co/{repo}, then set a token of that account with {token}",
        errors.RevisionNotFoundError: f"{repo} has no revision {revision}; the default is main",
        errors.EntryNotFoundError: f"{what} does not exist at revision {revision}",
        errors.RepositoryNotFoundError: f"the hub has no repository {repo}, or it is private: "
        f"check the name; for a private one, set a token with {token}",
        errors.OfflineModeIsEnabled: offline_message(what),
        httpx2.InvalidURL: _no_hub(),
        httpx2.UnsupportedProtocol: _no_hub(),
    }
    try:
        yield
    except tuple(messages) as error:
        found = next(messages[kind] for kind in messages if isinstance(error, kind))
        raise DownloadError(found) from error
    except errors.HFValidationError as error:
        raise DownloadError(f"{repo} is not a valid repository name: {error}") from error
    except errors.HfHubHTTPError as error:
        raise _refusal(what, repo, error.response) from error
    except httpx2.ProxyError as error:
        raise Transient(f"the proxy refused {what}: {error}; check HTTPS_PROXY") from error
    except httpx2.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise Transient(
            f"the connection to {_address()} failed for {what}: {reason}. Try again later, or with "
            f"--offline if it is in the cache{f'; {KEPT}' if path else ''}"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switch off the warnings of huggingface_hub: its errors are raised, and reported once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def offline_message(what: str) -> str:
    """The error message for a file that is not in the cache when downloads are switched off."""
    return (
        f"{what} is not in the cache, and downloads are off (--offline or HF_HUB_OFFLINE): "
        "pull it first with network access"
    )


def _refusal(what: str, repo: str, response: object) -> DownloadError:
    status: int = response.status_code  # type: ignore[attr-defined]
    header: str = response.headers.get("Retry-After", "")  # type: ignore[attr-defined]
    wait = float(header) if header.strip().isdigit() else None
    if status == 401:
        return DownloadError(
            f"the hub does not accept the token for {what}: renew it with the environment "
            "variable HF_TOKEN or `hf auth login`"
        )
    if status == 403:
        return DownloadError(
            f"the hub refuses access to {what}: see https://huggingface.co/{repo} for its "
            "conditions, and set a token that may read it with HF_TOKEN or `hf auth login`"
        )
    if status == 429:
        when = "in some minutes" if wait is None else f"in {wait:.0f} seconds"
        message = f"the hub allows no more requests for now (429): try again {when}; {KEPT}"
        # If the hub names no time, retries would only prolong the block.
        return Transient(message, 2 * LONGEST_WAIT if wait is None else wait)
    if status >= 500 or status == 408:
        message = f"the hub failed (status {status} for {what}): try again later; {KEPT}"
        return Transient(message, wait)
    return DownloadError(f"the hub refused {what} with status {status}")


def _no_hub() -> str:
    return f"{_address()} does not answer like a hub: check HF_ENDPOINT, a proxy, or a login page"


def _address() -> str:
    return endpoint() or "https://huggingface.co"


def _is_hex(text: object, n_digits: int) -> bool:
    return isinstance(text, str) and re.fullmatch(rf"[0-9a-f]{{{n_digits}}}", text) is not None
