"""The hub's answers: what a repository has, and what each refusal means to a user.

Imports the client only when it is called, and reads the environment then too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar
from urllib.parse import urlsplit

from ggufspec.errors import DownloadError, OptionError

__all__ = [
    "Listing",
    "RemoteFile",
    "Transient",
    "endpoint",
    "explained",
    "is_offline",
    "listing",
    "offline_message",
    "patiently",
    "quiet",
]

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each new try
LONGEST_WAIT = 30.0  # seconds; who is told to wait longer by the hub is told so
TIMEOUT = 20.0  # seconds without a byte
_TRUE = {"1", "ON", "YES", "TRUE"}
Result = TypeVar("Result")


class Transient(DownloadError):
    """What may pass by itself: the connection, an overloaded hub. `wait`: seconds it asked for."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub, at one commit."""

    repo: str
    revision: str  # as it was asked for
    commit: str
    path: str
    size: int
    sha256: str | None  # None: git keeps it itself, under `blob`
    blob: str  # its name among the blobs of the cache


@dataclass(frozen=True)
class Listing:
    """The GGUF files of a repository at one commit."""

    repo: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, path: str) -> RemoteFile:
        """The file of that path. Raises DownloadError, which names the nearest ones."""
        by_path = {file.path: file for file in self.files}
        if path in by_path:
            return by_path[path]
        near = get_close_matches(path, by_path, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else _there(list(by_path))
        raise DownloadError(f"{self.repo} has no file {path} at {self.revision}; {hint}")


def listing(repo: str, revision: str) -> Listing:
    """Ask the hub for the GGUF files of a repository. Raises DownloadError."""
    from huggingface_hub import HfApi

    def ask() -> Listing:
        with explained(repo, revision):
            try:
                info = HfApi(endpoint=endpoint()).model_info(
                    repo, revision=revision, files_metadata=True, timeout=TIMEOUT
                )
            except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
                raise DownloadError(_no_hub()) from error  # some other page
            except ValueError as error:  # a token that no header can carry, a date that is none
                raise DownloadError(f"{_no_hub()}; or the token in HF_TOKEN ({error})") from error
        commit = info.sha or ""
        files = []
        for found in info.siblings or ():
            path = found.rfilename
            if not isinstance(path, str):
                raise DownloadError(_no_hub())
            is_within = {"", ".", ".."}.isdisjoint(path.split("/"))
            if not is_within or not path.lower().endswith(".gguf"):
                continue
            sha256 = found.lfs.sha256 if found.lfs else None
            blob = sha256 or found.blob_id or ""
            size = found.lfs.size if found.lfs else found.size
            # They become names of files here, so they must be what they claim.
            are_hashes = _is_hex(commit, 40) and _is_hex(blob, 64 if sha256 else 40)
            if not are_hashes or not isinstance(size, int) or size < 0:
                raise DownloadError(_no_hub())
            files.append(RemoteFile(repo, revision, commit, path, size, sha256, blob))
        return Listing(repo, revision, commit, tuple(files))

    with quiet():
        return patiently(ask)


def endpoint() -> str | None:
    """Where the hub is, if not at its own address. Raises OptionError."""
    chosen = (os.environ.get("HF_ENDPOINT") or "").rstrip("/")
    if chosen and not _is_address(chosen):
        raise OptionError(
            f"HF_ENDPOINT is {chosen!r}; it must be the address of a hub, as https://huggingface.co"
        )
    return chosen or None


def is_offline() -> bool:
    """Whether the user has told the hub's tools to stay off the network."""
    chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return chosen.upper() in _TRUE


def patiently(
    attempt: Callable[[], Result],
    *,
    n_done: Callable[[], int] = lambda: 0,
    sleep: Callable[[float], object] = time.sleep,
) -> Result:
    """Try again, after longer and longer waits, what fails for a reason that may pass.

    Whatever gets further, by `n_done`, renews the patience. Raises the last Transient.
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
            sleep(max(wait, asked))


@contextlib.contextmanager
def explained(repo: str, revision: str, path: str | None = None) -> Iterator[None]:
    """Turns what the client raises into a DownloadError that says what to do."""
    import httpx2
    from huggingface_hub import errors

    what = repo if path is None else f"{repo}/{path}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, then give a "
            "token of that account, with the environment variable HF_TOKEN or by `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(
            f"{repo} has no revision {revision}; without an @revision, main is taken"
        ) from error
    except errors.LocalEntryNotFoundError as error:  # what the client makes of a failed question
        raise _broken(what, error.__cause__ or error, path) from error
    except errors.EntryNotFoundError as error:
        raise DownloadError(f"{what} is not there at {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"the hub has no repository {repo}, or it is private: check the name; for a private "
            "one, give a token with the environment variable HF_TOKEN or by `hf auth login`"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refusal(what, repo, error.response) from error
    except errors.OfflineModeIsEnabled as error:
        raise DownloadError(offline_message(what)) from error
    except httpx2.ProxyError as error:
        raise Transient(
            f"the proxy does not let {what} through: {error}; check HTTPS_PROXY"
        ) from error
    except httpx2.HTTPError as error:
        raise _broken(what, error, path) from error
    except errors.HFValidationError as error:
        raise DownloadError(f"{repo} cannot be the name of a repository: {error}") from error
    except (httpx2.InvalidURL, errors.FileMetadataError) as error:
        raise DownloadError(_no_hub()) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The client's own warnings are off: what goes wrong is told in an error, once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def offline_message(what: str) -> str:
    """What is said where something is not in the cache, and must not be fetched."""
    return (
        f"{what} is not in the cache, and the network is off limits (--offline or HF_HUB_OFFLINE): "
        "pull it first where there is a network"
    )


def _broken(what: str, error: BaseException, path: str | None) -> Transient:
    reason = str(error) or type(error).__name__
    stays = "; what has come so far stays, and the next run goes on from there" if path else ""
    return Transient(
        f"the connection to the hub failed for {what}: {reason}. Try again later, or with "
        f"--offline if it is in the cache{stays}"
    )


def _refusal(what: str, repo: str, response: object) -> DownloadError:
    status: int = response.status_code  # type: ignore[attr-defined]
    told: str = response.headers.get("Retry-After", "")  # type: ignore[attr-defined]
    wait = float(told) if told.strip().isdigit() else None
    if status == 401:
        return DownloadError(
            f"the hub does not accept the token for {what}: renew it, with the environment "
            "variable HF_TOKEN or by `hf auth login`"
        )
    if status == 403:
        return DownloadError(
            f"the hub forbids {what}: see https://huggingface.co/{repo} for its conditions, and "
            "give a token that may read it, with HF_TOKEN or by `hf auth login`"
        )
    if status == 429:
        when = "in some minutes" if wait is None else f"in {wait:.0f} seconds"
        # Without a time, more questions only prolong it.
        return Transient(
            f"the hub allows no more requests for now (429): try again {when}; what has come so "
            "far stays",
            wait if wait is not None else 2 * LONGEST_WAIT,
        )
    if status >= 500 or status == 408:
        return Transient(
            f"the hub is in trouble (status {status} for {what}): try again later; what has come "
            "so far stays, and the next run goes on from there",
            wait,
        )
    return DownloadError(f"the hub refused {what} with status {status}")


def _no_hub() -> str:
    where = endpoint() or "https://huggingface.co"
    return f"{where} does not answer as a hub does: check HF_ENDPOINT, a proxy, or a login page"


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_port = parts.port is None or parts.port > 0  # reading it checks it
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port


def _is_hex(text: object, n_digits: int) -> bool:
    return isinstance(text, str) and re.fullmatch(rf"[0-9a-f]{{{n_digits}}}", text) is not None


def _there(paths: list[str]) -> str:
    if not paths:
        return "it has no GGUF files at all"
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return f"it has {', '.join(paths[:8])}{more}"
