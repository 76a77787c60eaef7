"""A hub of GGUF files on loopback, for the real client: answers as huggingface.co does, and can
misbehave in the ways that networks, disks and hubs do.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Fault = Callable[["Answer"], None]


@dataclass
class Answer:
    """How a GET of a file is answered; a fault changes it."""

    data: bytes  # what the range asks for
    whole: bytes  # the file
    status: int
    headers: dict[str, str]
    n_sent: int | None = None  # bytes after which the connection is closed
    pause: float = 0.0  # seconds between blocks
    block: int = 2**16


def broken_off(n_bytes: int) -> Fault:
    """The connection closes after so many bytes of the body."""

    def change(answer: Answer) -> None:
        answer.n_sent = n_bytes

    return change


def short(n_bytes: int) -> Fault:
    """The body is short, and the header says that this is all."""

    def change(answer: Answer) -> None:
        answer.data = answer.data[:n_bytes]

    return change


def corrupted(at: int) -> Fault:
    """A byte arrives with its lowest bit turned."""

    def change(answer: Answer) -> None:
        data = bytearray(answer.data)
        data[at] ^= 1
        answer.data = bytes(data)

    return change


def status(code: int, **headers: str) -> Fault:
    """Refused; underscores in names of headers are hyphens."""

    def change(answer: Answer) -> None:
        answer.status, answer.data = code, b""
        answer.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    return change


def without_ranges(answer: Answer) -> None:
    """The whole file, whatever was asked for."""
    answer.status, answer.data = 200, answer.whole
    answer.headers.pop("Content-Range", None)


def slow(pause: float, block: int = 2**14) -> Fault:
    """The body comes in blocks with pauses between them."""

    def change(answer: Answer) -> None:
        answer.pause, answer.block = pause, block

    return change


@dataclass
class Repo:
    """What a repository has."""

    files: dict[str, bytes]
    commit: str
    gated: bool = False
    is_lfs: bool = True


@dataclass
class Request:
    """What somebody asked for."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class Hub:
    """The repositories, the faults that wait for their files, and the requests so far."""

    repos: dict[str, Repo] = field(default_factory=dict)
    # by repository and file, or by repository alone for questions about it; each is used once
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    always: dict[str, Fault] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    n_most_at_once: int = 0
    _n_at_once: int = 0
    url: str = ""

    def add(self, repo: str, files: dict[str, bytes], **facts: object) -> Repo:
        """Put files into a repository."""
        hashes = sorted((name, sha256(data)) for name, data in files.items())
        commit = git_sha1(repr((repo, hashes)).encode())
        self.repos[repo] = Repo(files, commit, **facts)  # type: ignore[arg-type]
        return self.repos[repo]

    def downloads(self, file: str = "") -> list[Request]:
        """The requests for the content of a file, or of any."""
        return [
            request
            for request in self.requests
            if request.method == "GET" and "/resolve/" in request.path and file in request.path
        ]

    def start(self) -> ThreadingHTTPServer:
        """Serve on a free port of this machine."""
        hub = self

        class Handler(_Handler):
            at = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def fault(self, *keys: str) -> Fault | None:
        for key in keys:
            if self.faults[key]:
                return self.faults[key].pop(0)
            if key in self.always:
                return self.always[key]
        return None


@lru_cache(64)  # each question about a repository tells the hashes of all its files
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@lru_cache(64)
def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    at: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.at.requests.append(Request(self.command, self.path, dict(self.headers)))
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._tell_of_repo(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._point_to_file(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._send_file(match[1], match[2])
        else:
            self._refuse(404)

    def _known(self, repo: str, revision: str) -> Repo | None:
        found = self.at.repos.get(repo)
        if found is None:
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif revision not in ("main", found.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    def _tell_of_repo(self, repo: str, revision: str) -> None:
        if fault := self.at.fault(repo):
            answer = Answer(b"", b"", 200, {})
            fault(answer)
            self._send(answer)
        elif found := self._known(repo, revision):
            siblings = []
            for path, data in found.files.items():
                sibling = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
                if found.is_lfs:
                    sibling["lfs"] = {"size": len(data), "sha256": sha256(data), "pointerSize": 134}
                siblings.append(sibling)
            body = {"id": repo, "modelId": repo, "sha": found.commit, "siblings": siblings}
            data = json.dumps(body).encode()
            self._send(Answer(data, data, 200, {"Content-Type": "application/json"}))

    def _point_to_file(self, repo: str, revision: str, path: str) -> None:
        found = self._known(repo, revision)
        if found is None:
            return
        if found.gated and self.headers.get("Authorization") != "Bearer hf_welcome":
            self._refuse(401, "GatedRepo", f"Access to model {repo} is restricted")
        elif path not in found.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            data = found.files[path]
            etag = sha256(data) if found.is_lfs else git_sha1(data)
            headers = {
                "X-Repo-Commit": found.commit,
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{etag}"',
                "ETag": f'"{etag}"',
                # Another name of this machine, so that it is another host.
                "Location": f"{self.at.url}/cdn/{repo}/{path}".replace("127.0.0.1", "localhost"),
            }
            self._send(Answer(b"", b"", 302, headers))

    def _send_file(self, repo: str, path: str) -> None:
        whole = self.at.repos[repo].files[path]
        answer = Answer(whole, whole, 200, {"Accept-Ranges": "bytes"})
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            answer.data, answer.status = whole[start:], 206
            answer.headers["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        if fault := self.at.fault(f"{repo}/{path}"):
            fault(answer)
        self.at._n_at_once += 1
        self.at.n_most_at_once = max(self.at.n_most_at_once, self.at._n_at_once)
        try:
            self._send(answer)
        finally:
            self.at._n_at_once -= 1

    def _refuse(self, code: int, error: str = "", message: str = "") -> None:
        headers = {"X-Error-Code": error, "X-Error-Message": message} if error else {}
        self._send(Answer(b"", b"", code, headers))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        data = answer.data[: answer.n_sent]
        try:
            for start in range(0, len(data), answer.block):
                self.wfile.write(data[start : start + answer.block])
                if answer.pause:
                    time.sleep(answer.pause)
        except OSError:
            self.close_connection = True  # whoever asked is gone
        if answer.n_sent is not None:
            self.close_connection = True
