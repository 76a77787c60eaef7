"""Checks each request before it is routed: origin, Host header, API key, body."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Sequence
from hashlib import sha256
from itertools import product
from time import monotonic

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ggufspec.server.errors import CLIENT_DISCONNECTED, ApiError, error_response, log_error
from ggufspec.server.metrics import Metrics
from ggufspec.server.service import ServerOptions

PUBLIC_PATHS = ("/", "/health", "/openapi.json")
_OF_OPENAI = ("/completions", "/chat/", "/models", "/responses", "/messages")
_OF_OTHERS = (
    *("/health", "/props", "/metrics", "/tokenize", "/detokenize"),
    *("/tokenizer_info", "/lora-adapters", "/completion", "/infill", "/apply-template", "/slots"),
)
_OF_LLAMA_CPP = "/completions"  # as in its server: OpenAI's has /v1
_DISCARD_FACTOR = 4  # a body that is too large is discarded up to this multiple of the limit
_DISCARD_SECONDS = 2.0
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")


class OriginMiddleware(CORSMiddleware):
    """Lets web pages of some origins read responses; a browser asks first, with OPTIONS."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(app, allow_origins=origins, allow_methods=_METHODS, allow_headers=["*"])

    def preflight_response(self, request_headers: Headers) -> Response:
        """As in llama.cpp's server without a body; the browser compares the headers."""
        headers = super().preflight_response(request_headers).headers
        kept = {name: headers[name] for name in headers if not name.startswith("content-")}
        return Response(status_code=204, headers=kept)


def checked(app: ASGIApp, options: ServerOptions, metrics: Metrics) -> ASGIApp:
    """The application behind the checks."""
    behind: ASGIApp = RequestMiddleware(app, options=options, metrics=metrics)
    return OriginMiddleware(behind, options.cors_origins) if options.cors_origins else behind


class RequestMiddleware:
    """Passes allowed requests on, answers others with an error, and counts all requests."""

    def __init__(self, app: ASGIApp, *, options: ServerOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        keys = (key.encode("utf-8", "surrogateescape") for key in options.api_keys)
        self._key_hashes = [sha256(key).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # Routed as GET; uvicorn leaves out the body.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": _usual_path(scope["path"])}
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            if method == "OPTIONS":  # of any path, without a key: browsers send none
                allowed = Response(status_code=204, headers={"Allow": ", ".join(_METHODS)})
                await allowed(scope, receive, send_and_note)
                return
            self._check_key(scope["path"], headers)
            if method != "GET":
                receive = _replay(await self._body(headers, receive), receive)
            if method == "POST":
                kind = headers.get("content-type", "").partition(";")[0].strip().lower()
                # Web pages may send other types, or none, without a preflight; they have an origin.
                if kind != "application/json" and (kind or "origin" in headers):
                    raise ApiError(
                        415, "the body is not JSON; send `Content-Type: application/json`"
                    )
            await self._app(scope, receive, send_and_note)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_and_note)
        except ClientDisconnect:
            status = CLIENT_DISCONNECTED
        except Exception as error:
            log_error("a request failed", error)  # a response was sent already
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(path, status).inc()

    def _check_host(self, headers: Headers) -> None:
        """Refuse foreign Host headers: web pages could use a name that resolves to 127.0.0.1."""
        if self._options.hosts is None:
            return
        name = re.sub(r":\d+\Z", "", headers.get("host", "")).lower()
        if name not in self._options.hosts:
            raise ApiError(
                403,
                "Host header not allowed; set --host or an API key to accept other names",
                "host_error",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._key_hashes or path in PUBLIC_PATHS:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        keys = [bearer] * (scheme.lower() == "bearer") + headers.getlist("x-api-key")
        found = [sha256(key.strip().encode("latin-1")).digest() for key in keys]
        # Compares all keys, so that the time does not depend on which key is right.
        if not sum(hmac.compare_digest(*pair) for pair in product(found, self._key_hashes)):
            raise ApiError(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._options.n_body_bytes
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit and "expect" in headers:
            raise self._too_large()
        deadline = monotonic() + self._options.body_seconds
        body = bytearray()
        n_bytes = 0
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(deadline - monotonic(), 0.001))
            except asyncio.TimeoutError:
                if n_bytes > limit:
                    break
                raise ApiError(
                    408,
                    f"the body did not arrive within {self._options.body_seconds:g} s; send it "
                    "faster, or send less",
                    "timeout_error",
                    headers={"Connection": "close"},
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            if n_bytes <= limit < n_bytes + len(part):
                # Clients read the response only after sending the body: discard more of it.
                deadline = min(deadline, monotonic() + _DISCARD_SECONDS)
            n_bytes += len(part)
            if n_bytes <= limit:
                body += part
            if n_bytes > limit * _DISCARD_FACTOR or not message.get("more_body", False):
                break
        if n_bytes > limit:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._options.n_body_bytes:,} bytes; send less, or start "
            "the server with a larger --max-body",
            headers={"Connection": "close"},
        )


def _usual_path(path: str) -> str:
    """The path as routed: with /v1 for OpenAI's, without for others; requests may use either.

    Slashes at the end make no difference.
    """
    path = path.rstrip("/") or "/"
    rest = path.removeprefix("/v1")
    if rest.startswith(_OF_OPENAI) and path != _OF_LLAMA_CPP:
        return f"/v1{rest}"
    return rest if rest in _OF_OTHERS or rest.startswith("/slots/") else path


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then further events of the connection."""
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(first, None) or await receive()

    return replay
