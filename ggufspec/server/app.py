"""The routes of the API, and how each request is answered."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client.exposition import choose_encoder
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ggufspec import __version__
from ggufspec.engine.engine import Engine
from ggufspec.errors import GgufspecError
from ggufspec.llama.vocab import Vocab
from ggufspec.server import adapters, descriptions, fields, schema
from ggufspec.server.errors import ApiError, api_error_of
from ggufspec.server.events import ParsedRequest
from ggufspec.server.metrics import Metrics
from ggufspec.server.middleware import CLIENT_DISCONNECTED, RequestMiddleware
from ggufspec.server.options import ServerOptions
from ggufspec.server.page import page
from ggufspec.server.requests import parse_request
from ggufspec.server.responses import ResponseBuilder
from ggufspec.server.slot_files import SlotFiles
from ggufspec.server.strict_json import parse_json
from ggufspec.server.submission import submit
from ggufspec.server.worker import EngineWorker

_FIELD_OR_INDEX = re.compile(r"(?!str$|int$)[a-z_]+|\d+")  # not the name of a union's member
_NEEDED = "Input should be "  # how pydantic begins an error of type
_FIELDS = {*schema.ChatRequest.model_fields, *schema.CompletionRequest.model_fields}
_MAX_NAME = 100  # characters of a field's name in an error
_KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients ignore
_DONE = b"data: [DONE]\n\n"
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_NOT_SERVED = {
    ("/v1/responses", "/v1/messages", "/api/"): (
        "this server has OpenAI's chat completions and completions only; for this API, put LiteLLM "
        "in front of it: see the guide"
    ),
    ("/v1/embeddings", "/embedding", "/v1/rerank", "/rerank", "/v1/audio", "/v1/images"): (
        "this server generates text only: it has no embeddings, images or audio"
    ),
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in (
        (400, "The request is invalid."),
        (401, "The API key is missing or wrong."),
        (403, "Host header not allowed; set --host or an API key to accept other names."),
        (404, "Not found, or not supported."),
        (408, "The body took too long to arrive."),
        (413, "The body is too large."),
        (415, "The body is not JSON."),
        (429, "The queue is full; retry after the seconds in Retry-After."),
        (500, "Internal error."),
        (503, "The server is stopping, or its engine worker has failed."),
        (504, "The request took longer than --timeout."),
        ("default", "Any other error."),  # also keeps FastAPI from documenting 422, which is 400
    )
}


@dataclass(frozen=True)
class Service:
    """What the routes share. Several services may exist in one process."""

    engine: Engine
    worker: EngineWorker
    metrics: Metrics
    options: ServerOptions
    started_at: int


def make_service(engine: Engine, options: ServerOptions) -> Service:
    """A service whose worker has not started yet."""
    metrics = Metrics()
    worker = EngineWorker(engine, n_waiting_max=options.n_waiting_max, metrics=metrics)
    return Service(engine, worker, metrics, options, int(time.time()))


def make_app(service: Service) -> ASGIApp:
    """The ASGI application: the routes, behind the middleware."""
    app = FastAPI(
        title="ggufspec",
        version=__version__,
        summary="OpenAI's API for a GGUF model, with speculative decoding.",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    _add_error_handlers(app)
    router = APIRouter(route_class=_StrictJsonRoute, responses=_ERRORS)
    _add_generation(router, service)
    _add_tokenization(router, service)
    _add_slots(router, service)
    _add_information(router, service)
    app.include_router(router)
    options = service.options
    checked: ASGIApp = RequestMiddleware(app, options=options, metrics=service.metrics)
    if options.cors_origins:
        checked = CORSMiddleware(
            checked,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return checked


class _StrictJsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


class _StrictJsonRoute(APIRoute):
    """Has FastAPI parse each body once, strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return handle_strictly


def _add_generation(router: APIRouter, service: Service) -> None:
    @router.post("/v1/completions")
    async def completions(body: schema.CompletionRequest, request: Request) -> Response:
        """Continue a prompt, like OpenAI's legacy completions."""
        return await _respond(body, request, service)

    @router.post("/v1/chat/completions")
    async def chat(body: schema.ChatRequest, request: Request) -> Response:
        """Continue a conversation, with the model's chat template."""
        return await _respond(body, request, service)

    @router.post("/predict")
    async def predict(body: schema.PredictRequest, request: Request) -> Response:
        """Continue a prompt; returns a JSON string, prompt included (LLMSpeculativeSampling)."""
        parsed = await run_in_threadpool(parse_request, body, service.engine, service.options)
        builder = ResponseBuilder(body, parsed, service.options.alias)
        await _collect(builder, parsed, request, service)
        return JSONResponse(body.prompt + builder.body()["choices"][0]["text"])


def _add_tokenization(router: APIRouter, service: Service) -> None:
    vocab = service.engine.vocab

    @router.post("/tokenize")
    async def tokenize(body: schema.TokenizeRequest) -> Response:
        """Convert a text to token ids."""
        tokens = await run_in_threadpool(
            vocab.tokenize,
            body.content,
            add_special=body.add_special,
            parse_special=body.parse_special,
        )
        found = [_with_piece(vocab, each) for each in tokens] if body.with_pieces else tokens
        return JSONResponse({"tokens": found})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Name the first and the last token, and the chat template, as vLLM's server does."""
        return JSONResponse(descriptions.tokenizer(service.engine))

    @router.post("/detokenize")
    async def detokenize(body: schema.DetokenizeRequest) -> Response:
        """Convert token ids to a text; control tokens have none."""
        for token in body.tokens:
            if token >= vocab.n_tokens:
                raise ApiError(
                    400,
                    f"token {token} does not exist; ids are 0 to {vocab.n_tokens - 1:,}",
                    param="tokens",
                )
        data = await run_in_threadpool(lambda: b"".join(map(vocab.piece, body.tokens)))
        text = data.decode("utf-8", "replace")
        return JSONResponse({"content": text, "prompt": text})  # as llama.cpp and vLLM name it


def _add_slots(router: APIRouter, service: Service) -> None:
    options = service.options
    files = SlotFiles(service.engine, service.worker, options.slot_folder, options.timeout)

    @router.post("/slots/{id_slot}")
    async def slots(
        id_slot: str, action: str | None = None, body: schema.SlotFile | None = None
    ) -> Response:
        """Save the text of a slot to a file, restore or erase it, as llama.cpp's server does."""
        found = await files.act(id_slot, action, body or schema.SlotFile.model_construct())
        return JSONResponse(found)


def _with_piece(vocab: Vocab, token: int) -> dict[str, object]:
    """A token with its text, or with its bytes where they are no text, as in llama.cpp."""
    data = vocab.piece(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


def _add_information(router: APIRouter, service: Service) -> None:
    model = descriptions.model(service.engine, service.options, service.started_at)

    @router.get("/v1/models")
    async def models() -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Describe the model, whatever name it is called by."""
        return JSONResponse(model)

    @router.get("/health")
    async def health() -> Response:
        """Report "ok"; or, with status 503, "stopping", "stalled" or "failed"."""
        status = service.worker.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @router.get("/props")
    async def properties() -> Response:
        """Describe model, slots and default options, as llama.cpp's server does."""
        return JSONResponse(descriptions.properties(service.engine, service.options))

    @router.get("/lora-adapters")
    async def lora_adapters() -> Response:
        """List the LoRA adapters and their scales, as llama.cpp's server does."""
        return JSONResponse(adapters.described(service.engine))

    @router.post("/lora-adapters")
    async def set_lora_adapters(body: list[schema.AdapterScale]) -> Response:
        """Accept the scales that the server was started with; others are refused."""
        adapters.check_scales(body, service.engine)
        return JSONResponse({"success": True})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(service.metrics.registry), headers={"content-type": content_type})

    @router.get("/", include_in_schema=False)
    async def built_in_page() -> Response:
        return page()


# One request for text


async def _respond(
    body: schema.CompletionRequest | schema.ChatRequest, request: Request, service: Service
) -> Response:
    parsed = await run_in_threadpool(parse_request, body, service.engine, service.options)
    builder = ResponseBuilder(body, parsed, service.options.alias)
    if not body.stream:
        await _collect(builder, parsed, request, service)
        # A long echo is hundreds of thousands of numbers, for which other responses do not wait.
        return await run_in_threadpool(lambda: JSONResponse(builder.body()))
    frames = _frames(builder, parsed, request, service)
    # An error before the first frame gets a status of its own; later ones are sent in the stream.
    return _EventStream(await anext(frames), frames)


async def _collect(
    builder: ResponseBuilder, parsed: ParsedRequest, request: Request, service: Service
) -> None:
    async with aclosing(submit(service.worker, parsed, service.options, request.receive)) as events:
        async for together in events:
            for event in together:
                builder.add(event)


async def _frames(
    builder: ResponseBuilder, parsed: ParsedRequest, request: Request, service: Service
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    events = submit(service.worker, parsed, service.options, request.receive)
    try:
        async with aclosing(events):
            async for together in events:
                chunks = [chunk for event in together for chunk in builder.add(event)]
                data = b"".join(map(_frame, chunks)) if together else _KEEP_ALIVE
                if data:
                    has_begun = True
                    yield data
        if (usage := builder.usage_chunk()) is not None:
            yield _frame(usage)
        yield _DONE
    except ApiError as error:
        if not has_begun:
            raise
        yield _frame(builder.error_chunk(error.body))


class _EventStream(StreamingResponse):
    """Sends a first frame, then others as they come, and closes their generator in the end.

    Starlette's own would wait for a disconnect, which `submit` does.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None]) -> None:
        async def all_frames() -> AsyncGenerator[bytes, None]:
            yield first
            async for frame in frames:
                yield frame

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(all_frames(), headers=headers)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            with suppress(ClientDisconnect):
                await self.stream_response(send)


def _frame(document: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % _to_json(document).encode()


# Errors, all in OpenAI's format


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        for paths, reason in _NOT_SERVED.items():
            if error.status_code == 404 and request.url.path.startswith(paths):
                return ApiError(404, reason, code="not_supported").response()
        message = {
            404: "there is nothing at this path; see /openapi.json",
            405: "this path does not support this method; see /openapi.json",
        }.get(error.status_code, "the request cannot be read")
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        place, problem = _nearest(error.errors())
        message = f"{place or 'the body'}: {problem}"
        return ApiError(400, message, param=place or None).response()

    @app.exception_handler(GgufspecError)
    @app.exception_handler(Exception)
    async def other_error(request: Request, error: Exception) -> Response:
        return api_error_of(error).response()

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_DISCONNECTED)


def _nearest(errors: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The place and the text of one error in the first wrong field.

    A field of several types has an error for each of them. The best is one about a value of the
    right type, and then the one that is found deepest: the other types do not fit at all.
    """
    errors = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    placed = [(_place(each["loc"]), each) for each in errors]
    place, best = max(
        placed, key=lambda each: (not each[1]["type"].endswith("_type"), each[0].count("."))
    )
    if best["type"] == "extra_forbidden":
        *before, name = best["loc"]
        shown = str(name)[:_MAX_NAME]
        return ".".join(filter(None, (_place(before), shown))), fields.refusal(shown, _FIELDS)
    if best["type"].endswith("_type"):
        needed = [each["msg"].removeprefix(_NEEDED) for at, each in placed if at == place]
        return place, _NEEDED + " or ".join(dict.fromkeys(needed))
    return place, best["msg"]


def _place(loc: Sequence[str | int]) -> str:
    return ".".join(filter(_FIELD_OR_INDEX.fullmatch, map(str, loc[1:])))
