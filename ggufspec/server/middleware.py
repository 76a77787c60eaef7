"""What every request passes before anything else looks at it. Knows HTTP and JSON, no meanings.

The body is read whole, within its limits of size and time, and is JSON that leaves no question:
UTF-8, finite numbers of 64 bits, no key twice, no half of a surrogate pair, not nested too deeply.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ggufspec.server.errors import Problem
from ggufspec.server.metrics import Metrics

LOG = logging.getLogger("ggufspec.server")

CLIENT_GONE = 499  # nginx's code: nobody reads it, but it is counted
OPEN_PATHS = ("/", "/health", "/openapi.json")
_MAX_DEPTH = 64
_N_DIGITS = 19
_N_DISCARDED = 4  # times the limit, of a body that is too large
_DISCARD_SECONDS = 2.0


@dataclass(frozen=True)
class Rules:
    """`hosts`: names by which the server may be called; None: any."""

    api_key: str | None
    hosts: Sequence[str] | None
    n_body_bytes: int
    body_seconds: float


class Guard:
    """Lets through what keeps the rules; the rest is answered here."""

    def __init__(self, app: ASGIApp, *, rules: Rules, metrics: Metrics) -> None:
        self._app = app
        self._rules = rules
        self._metrics = metrics
        self._key_hash = None if rules.api_key is None else _hash(rules.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            body = await self._checked(scope, receive)
            await self._app(scope, _again(body, receive), noted)
        except Problem as problem:
            await answer(problem)(scope, receive, noted)
        except _Gone:
            status = CLIENT_GONE
        except Exception as error:
            # Told to the client already; to the log by its kind, as it may quote a prompt.
            LOG.error("a request failed: %s", type(error).__name__)
            LOG.debug("it was", exc_info=error)
        finally:
            route = scope.get("route")
            self._metrics.answered(getattr(route, "path", "other"), status)

    async def _checked(self, scope: Scope, receive: Receive) -> bytes:
        """The body. Raises Problem, _Gone."""
        headers = Headers(scope=scope)
        self._check_host(headers)
        self._check_key(scope["path"], headers)
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        body = await self._body(headers, receive)
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                # Besides being wrong, anything else could come from any page without being asked.
                raise Problem(415, "send JSON, with `Content-Type: application/json`")
            check_json(body)
        return body

    def _check_host(self, headers: Headers) -> None:
        if self._rules.hosts is None:
            return
        name = re.sub(r":\d+\Z", "", headers.get("host", "")).lower()
        if name not in self._rules.hosts:
            # Or a page elsewhere, whose name points here, could speak with us.
            raise Problem(
                403, "this server listens to this machine alone, not to such a Host", "host_error"
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key_hash is None or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(_hash(key.strip()), self._key_hash)
        if scheme.lower() != "bearer" or not is_right:
            raise Problem(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._rules.n_body_bytes
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit and "expect" in headers:
            raise self._too_large()
        until = monotonic() + self._rules.body_seconds
        body = bytearray()
        n_bytes = 0
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(until - monotonic(), 0.001))
            except asyncio.TimeoutError:
                if n_bytes > limit:
                    raise self._too_large() from None
                raise Problem(
                    408,
                    f"the body did not arrive within {self._rules.body_seconds:g} s",
                    "timeout_error",
                    headers={"Connection": "close"},
                ) from None
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            if n_bytes <= limit < n_bytes + len(part):
                # Read on for a moment: who is still sending does not hear an answer.
                until = min(until, monotonic() + _DISCARD_SECONDS)
            n_bytes += len(part)
            if n_bytes <= limit:
                body += part
            if n_bytes > limit * _N_DISCARDED:
                raise self._too_large()
            if not message.get("more_body", False):
                break
        if n_bytes > limit:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> Problem:
        return Problem(
            413,
            f"the body is larger than {self._rules.n_body_bytes:,} bytes; send less, or raise "
            "--max-body",
            headers={"Connection": "close"},
        )


class _Gone(Exception):
    """The client went away before it had sent everything."""


def answer(problem: Problem) -> JSONResponse:
    """The response that tells of a problem."""
    return JSONResponse(problem.body, problem.status, dict(problem.headers))


def check_json(body: bytes) -> None:
    """Raise Problem for anything that is not JSON, or that two readers might read in two ways."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _wrong(f"it is not UTF-8 at byte {error.start}") from None
    try:
        document = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_without_doubles,
        )
    except RecursionError:
        raise _wrong(f"it is nested deeper than {_MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise _wrong(f"{error.msg} at character {error.pos}") from None
    _check_values(document)


def _check_values(document: object) -> None:
    level: list[object] = [document]
    for _ in range(_MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and not _is_whole(value):
                raise _wrong("a text has half of a surrogate pair")
        if not below:
            return
        level = below
    raise _wrong(f"it is nested deeper than {_MAX_DEPTH}")


def _is_whole(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _refuse_constant(name: str) -> object:
    raise _wrong(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _wrong("a number is too large")
    return value


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > _N_DIGITS:
        raise _wrong("a number is too large")
    return int(text)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _wrong("a key stands twice in one object")
    return found


def _wrong(what: str) -> Problem:
    return Problem(400, f"the body is not JSON as needed here: {what}", code="invalid_json")


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once more, then goes on with what is left: the end."""
    is_given = False

    async def give() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
