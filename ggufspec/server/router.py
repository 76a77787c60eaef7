"""Several pairs behind one address: a request's `model` chooses one, whose answer is passed on."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx2
from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ggufspec.common import validate
from ggufspec.errors import OptionError
from ggufspec.server.dialects.ollama import VERSION, description, line_of_stream, running
from ggufspec.server.dialects.shared import CHUNKS, JSON_LINES, NAMED_EVENTS, Framing
from ggufspec.server.errors import ApiError, error_document
from ggufspec.server.metrics import Metrics
from ggufspec.server.middleware import checked
from ggufspec.server.pair_process import BROKEN, PairProcess
from ggufspec.server.pairs import Pair, Pairs
from ggufspec.server.routes import page
from ggufspec.server.service import ServerOptions
from ggufspec.server.strict_json import parsed_body
from ggufspec.server.texts import disconnect, timed_out

_GET = ("/props", "/slots", "/tokenizer_info", "/lora-adapters")  # that pairs answer
_STORED = "/v1/responses/"
_OF_OLLAMA = ("/api/chat", "/api/generate")  # they stream unless told otherwise
_OWN = re.compile(  # headers that belong to a connection, or to the checks in front
    rb"host|authorization|x-api-key|connection|keep-alive|expect|date|server"
    rb"|transfer-encoding|te|trailer|upgrade|accept-encoding|origin",
)
_REQUESTS = "ggufspec_requests"


class Router:
    """Answers what concerns all pairs, and passes on the rest."""

    def __init__(self, pairs: Pairs, options: ServerOptions, metrics: Metrics) -> None:
        self._pairs, self._options, self._metrics = pairs, options, metrics
        self._started_at = int(time.time())
        self._page = page()
        self._first = next(iter(pairs.by_name.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        found = await parsed_body(body) if body else {}
        document: Mapping[str, Any] = found if isinstance(found, dict) else {}
        response = await self._own_response(request, document)
        if response is not None:
            is_stored = scope["path"].startswith(_STORED)  # one name for all, in the metrics
            path = f"{_STORED}{{response_id}}" if is_stored else scope["path"]
            scope["route"] = SimpleNamespace(path=path)
            await response(scope, receive, send)
            return
        pair, keep_alive = self._named(request, document), _keep_alive(document)
        reply = _Reply(send, scope["path"], document)
        work = asyncio.ensure_future(self._passed_on(pair, keep_alive, scope, body, reply))
        gone = asyncio.ensure_future(disconnect(receive))
        try:
            seconds = self._options.timeout
            await asyncio.wait({work, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif gone.done():
                raise ClientDisconnect
            else:
                await _ended(work)
                raise timed_out(seconds)
        except ApiError as error:
            await reply.fail(error)
        finally:
            gone.cancel()
            await _ended(work)
        if scope["method"] == "POST" and reply.status < 400:  # a path that exists
            scope["route"] = SimpleNamespace(path=scope["path"])

    def _named(self, request: Request, document: Mapping[str, Any]) -> Pair:
        name = document.get("model") or document.get("name") or request.query_params.get("model")
        return self._first if not name else self._pair(name)

    def _pair(self, name: object) -> Pair:
        by_name = self._pairs.by_name
        text = str(name)
        if (found := by_name.get(text) or by_name.get(text.removesuffix(":latest"))) is None:
            raise ApiError(
                404,
                f"there is no model {text[:100]!r} here; there are {', '.join(by_name)}",
                param="model",
                code="model_not_found",
            )
        return found

    async def _own_response(self, request: Request, document: Mapping[str, Any]) -> Response | None:
        """The response that the router gives itself; None: a pair answers. Raises ApiError."""
        path, all_pairs = request.scope["path"], self._pairs.by_name.values()
        if request.method == "POST":
            if path in ("/v1/models/load", "/v1/models/unload"):
                pair = self._pair(document.get("model"))
                act = self._pairs.load if path.endswith("/load") else self._pairs.unload
                await act(pair)
                return JSONResponse({"success": True})
            if path == "/api/show" and not (pair := self._named(request, document)).process:
                return JSONResponse(self._shown(pair))
            is_empty = not (document.get("messages") or document.get("prompt"))
            if path in _OF_OLLAMA and is_empty and _keep_alive(document) == 0:
                pair = self._named(request, document)
                await self._pairs.unload(pair)
                unloaded = {"done": True, "done_reason": "unload"}
                is_chat = path == "/api/chat"
                return JSONResponse(line_of_stream(pair.name, is_chat=is_chat) | unloaded)
            return None
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": [*map(self._described, all_pairs)]})
        if path.startswith("/v1/models/"):
            return JSONResponse(self._described(self._pair(path.removeprefix("/v1/models/"))))
        if path == "/api/tags":
            return JSONResponse({"models": [*map(self._shown, all_pairs)]})
        if path == "/api/ps":
            running = [self._running(pair) for pair in all_pairs if pair.process]
            return JSONResponse({"models": running})
        if path == "/api/version":
            return JSONResponse({"version": VERSION})
        if path == "/health":
            is_stopping = self._pairs.is_stopping
            status = "stopping" if is_stopping else "ok"
            return JSONResponse({"status": status}, 503 if is_stopping else 200)
        if path == "/metrics":
            return Response(await self._all_metrics(), media_type="text/plain; version=0.0.4")
        if path == "/":
            return self._page
        if path.startswith(_STORED) or path == "/openapi.json":
            return await self._from_any(request)
        if path not in _GET and not path.startswith("/slots/"):
            raise ApiError(404, "there is nothing at this path; see /openapi.json")
        return None

    def _described(self, pair: Pair) -> dict[str, Any]:
        status = {"value": pair.status, "failed": pair.n_failures > 0}
        head = {"id": pair.name, "object": "model", "created": self._started_at}
        return head | {"owned_by": "ggufspec", **pair.plan.described, "status": status}

    def _shown(self, pair: Pair) -> dict[str, Any]:
        return description(pair.plan.facts, pair.name, self._started_at)

    def _running(self, pair: Pair) -> dict[str, Any]:
        ends = pair.expires_at if pair.keep_alive < math.inf else math.inf
        return running(self._shown(pair), ends, pair.plan.memory.gpu)

    async def _from_any(self, request: Request) -> Response:
        """What one of the loaded pairs has at a path; the others answer 404."""
        for pair in self._pairs.by_name.values():
            if pair.process is not None:
                found = await _fetched(pair.process, request.method, request.scope["raw_path"])
                if found.status_code != 404:
                    kind = "application/json"
                    return Response(found.content, found.status_code, media_type=kind)
        raise ApiError(404, "no model that is loaded has it", code="not_found")

    async def _all_metrics(self) -> bytes:
        """The metrics of the loaded pairs, with their names as the label `model`."""
        families: dict[str, Metric] = {}
        for pair in self._pairs.by_name.values():
            if pair.process is not None:
                with suppress(ApiError):  # it has just ended
                    found = await _fetched(pair.process, "GET", b"/metrics")
                    _add_metrics(families, found.text, pair.name)
        own = text_string_to_metric_families(generate_latest(self._metrics.registry).decode())
        families |= {each.name: each for each in own if each.name == _REQUESTS}
        loads = CounterMetricFamily("ggufspec_model_loads", "Loads of a model.", labels=["model"])
        for name in self._pairs.by_name:
            loads.add_metric([name], self._pairs.n_loads[name])
        return generate_latest(SimpleNamespace(collect=lambda: [*families.values(), loads]))

    async def _passed_on(
        self, pair: Pair, keep_alive: float | None, scope: Scope, body: bytes, reply: _Reply
    ) -> None:
        """Pass a request on to its pair, and the response back. Raises ApiError."""
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [each for each in scope["headers"] if not _OWN.fullmatch(each[0])]
        telling = asyncio.ensure_future(reply.tell_progress(pair, self._options.keep_alive))
        try:
            async with self._pairs.used(pair, keep_alive) as process:
                await _ended(telling)
                target = scope["raw_path"] + query
                try:
                    async with process.ask(scope["method"], target, headers, body) as response:
                        await reply.pass_on(response)
                except BROKEN as error:
                    raise await self._pairs.broken(pair, process) from error
                pair.n_failures = 0
        finally:
            await _ended(telling)


def make_router_app(pairs: Pairs, options: ServerOptions) -> ASGIApp:
    """The application for several pairs, behind the same checks as one."""
    metrics = Metrics()
    return checked(Router(pairs, options, metrics), options, metrics)


class _Reply:
    """The response to one request, as far as the client has it."""

    def __init__(self, send: Send, path: str, document: Mapping[str, Any]) -> None:
        self._send, self._path, self._document = send, path, document
        self._is_stream = document.get("stream", path in _OF_OLLAMA) is True
        self._has_begun = False
        self.status = 200

    async def tell_progress(self, pair: Pair, seconds: float) -> None:
        """Keep the client of a stream waiting, until this is cancelled."""
        while self._is_stream:
            await asyncio.sleep(seconds)
            if not self._has_begun:
                headers = [
                    (b"content-type", self._framing.media_type.encode()),
                    (b"cache-control", b"no-store"),
                    (b"x-accel-buffering", b"no"),
                ]
                await self._begin(200, headers)
            await self._more(self._progress(pair))

    async def pass_on(self, response: httpx2.Response) -> None:
        """Pass on what a pair answers; an error after the first bytes, as an event."""
        if self._has_begun and response.status_code >= 400:
            found = json.loads(await response.aread())
            kind = {"type": "error"} if self._framing.is_named else {}
            await self._more(self._framing.frame({**kind, **found}))
        else:
            if not self._has_begun:
                given = response.headers.raw
                headers = [each for each in given if not _OWN.fullmatch(each[0].lower())]
                await self._begin(response.status_code, headers)
            async for data in response.aiter_raw():
                await self._more(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """End with an error: of the stream, if it has begun. Raises ApiError otherwise."""
        if not self._has_begun:
            raise error
        if not self._is_stream:  # its length was announced: only a broken connection tells
            raise RuntimeError("a pair has ended within its response")
        kind = {"type": "error"} if self._framing.is_named else {}
        end = self._framing.frame({**kind, **error_document(error, self._path)})
        await self._send({"type": "http.response.body", "body": end, "more_body": False})

    @property
    def _framing(self) -> Framing:
        if self._path.startswith("/api/"):
            return JSON_LINES
        return NAMED_EVENTS if self._path.startswith(("/v1/messages", "/v1/responses")) else CHUNKS

    def _progress(self, pair: Pair) -> bytes:
        """An event if the dialect has one that clients ignore, or was asked for; else a comment."""
        said = {"model": pair.name, "status": pair.status, "progress": pair.progress}
        if self._path.startswith("/v1/messages"):
            return NAMED_EVENTS.frame({"type": "ping", "load_progress": said})
        if self._path.startswith("/api/"):
            line = line_of_stream(pair.name, is_chat=self._path == "/api/chat")
            return JSON_LINES.frame(line | {"load_progress": said})
        if self._document.get("return_progress") and self._framing is CHUNKS:
            return CHUNKS.frame({"choices": [], "model": pair.name, "load_progress": said})
        return b": %b\n\n" % json.dumps(said).encode()

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_begun, self.status = True, status
        start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        await self._send(start)

    async def _more(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


def _keep_alive(document: Mapping[str, Any]) -> float | None:
    """Seconds that a pair stays after a request, from now on; None: as before. Raises ApiError."""
    given = document.get("keep_alive")
    try:
        return None if given is None else validate.duration("keep_alive", given)
    except OptionError as error:
        raise ApiError(400, str(error), param="keep_alive") from error


async def _fetched(process: PairProcess, method: str, path: bytes) -> httpx2.Response:
    """The whole response of a pair. Raises ApiError."""
    try:
        async with process.ask(method, path) as response:
            await response.aread()
            return response
    except BROKEN as error:
        raise ApiError(503, "a model has ended; try again", "server_error") from error


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # else asyncio logs it


def _add_metrics(families: dict[str, Metric], text: str, model: str) -> None:
    """Add the samples of a pair to their families, whose lines must be together."""
    for found in text_string_to_metric_families(text):
        new = Metric(found.name, found.documentation, found.type)
        samples = families.setdefault(found.name, new).samples
        for sample in found.samples:
            labels = dict(sample.labels)
            if "model" in labels:
                labels["exported_model"] = labels.pop("model")  # as Prometheus does
            samples.append(sample._replace(labels=labels | {"model": model}))
