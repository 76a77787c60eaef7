"""The application: its routes, behind the middleware, and how those for text answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ggufspec import __version__
from ggufspec.errors import PromptTooLongError
from ggufspec.server import schema
from ggufspec.server.dialects.chat_response import CompletionRenderer
from ggufspec.server.dialects.llama_cpp import InfillRequest, LlamaCompletion, LlamaRenderer
from ggufspec.server.dialects.messages import CountTokensRequest, MessageRenderer, MessagesRequest
from ggufspec.server.dialects.ollama import (
    VERSION,
    OllamaRenderer,
    OllamaRequest,
    described,
    running,
)
from ggufspec.server.dialects.responses_request import ResponsesRequest, ResponseStore
from ggufspec.server.dialects.responses_response import ResponsesRenderer
from ggufspec.server.dialects.shared import Renderer
from ggufspec.server.embeddings import OF_TEXTS, PATHS, EmbeddingService, add_embeddings, refuse
from ggufspec.server.errors import ApiError, add_error_handlers
from ggufspec.server.events import ParsedRequest
from ggufspec.server.middleware import checked
from ggufspec.server.requests import parse_request
from ggufspec.server.routes import add_information, add_slots, add_tokenization
from ggufspec.server.service import Service
from ggufspec.server.strict_json import parsed_body
from ggufspec.server.texts import Events, disconnect

_NOT_ENFORCED, _MAX_HEADER = "X-Ggufspec-Not-Enforced", 4000
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
        (503, "The server is stopping, or its engine has failed."),
        (504, "The request took longer than --timeout."),
        ("default", "Any other error."),  # keeps FastAPI from documenting 422; we send 400
    )
}


def make_app(service: Service) -> ASGIApp:
    router = _router()
    _add_generation(router, service)
    _add_responses(router, service)
    _add_ollama(router, service)
    add_tokenization(router, service)
    add_slots(router, service)
    add_information(router, service)
    refuse(router, PATHS, "this server writes texts; start another one with --embeddings")
    return _app(router, service)


def make_embedding_app(service: EmbeddingService) -> ASGIApp:
    router = _router()
    add_embeddings(router, service)
    refuse(router, OF_TEXTS, "this server makes embeddings only; start it without --embeddings")
    return _app(router, service)


def _router() -> APIRouter:
    return APIRouter(route_class=_StrictJsonRoute, responses=_ERRORS)


def _app(router: APIRouter, service: Service | EmbeddingService) -> ASGIApp:
    app = FastAPI(
        title="ggufspec",
        version=__version__,
        summary="APIs of OpenAI, Anthropic, Ollama and llama.cpp for a GGUF model, with drafts.",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,
        strict_content_type=False,  # the middleware decides
    )
    add_error_handlers(app)
    app.include_router(router)
    return checked(app, service.options, service.metrics)


class _StrictJsonRequest(Request):
    async def json(self) -> Any:
        self.state.sent = await parsed_body(await self.body())
        return self.state.sent


class _StrictJsonRoute(APIRoute):
    """Makes FastAPI parse each body once, strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return handle_strictly


def _add_generation(router: APIRouter, service: Service) -> None:
    alias, vocab, n_ctx = service.options.alias, service.engine.vocab, service.engine.n_ctx

    llama = partial(LlamaRenderer, model=alias, vocab=vocab, n_ctx=n_ctx)

    @router.post("/v1/completions")
    async def completions(body: schema.CompletionRequest, request: Request) -> Response:
        """Continue a prompt, like OpenAI's legacy completions."""
        return await _answer(body, request, service, partial(CompletionRenderer, body, model=alias))

    @router.post("/v1/chat/completions")
    async def chat(body: schema.ChatRequest, request: Request) -> Response:
        """Continue a conversation, with the model's chat template."""
        return await _answer(body, request, service, partial(CompletionRenderer, body, model=alias))

    @router.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Continue a conversation, like Anthropic's Messages API."""
        return await _answer(body.chat(), request, service, partial(MessageRenderer, model=alias))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation, like Anthropic's API."""
        return JSONResponse({"input_tokens": await _n_tokens(body.chat(), service, request)})

    @router.post("/v1/chat/completions/input_tokens")
    async def input_tokens(body: schema.ChatRequest, request: Request) -> Response:
        """Count the tokens of a conversation, like llama.cpp's server."""
        return _counted(await _n_tokens(body, service, request))

    @router.post("/completion")
    @router.post("/completions")
    async def completion(body: LlamaCompletion, request: Request) -> Response:
        """Continue a prompt, like llama.cpp's own completions."""
        return await _answer(body, request, service, partial(llama, body))

    @router.post("/infill")
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Write the text between two others, like llama.cpp's server."""
        return await _answer(body, request, service, partial(llama, body))

    @router.post("/predict")
    async def predict(body: schema.PredictRequest, request: Request) -> Response:
        """Continue a prompt; returns a JSON string, prompt included (LLMSpeculativeSampling)."""
        parsed = await _parse(body, service, request)
        renderer = CompletionRenderer(body, parsed, alias)
        await _collect(renderer, service.events(parsed, request.receive))
        return JSONResponse(body.prompt + renderer.body()["choices"][0]["text"])


def _add_responses(router: APIRouter, service: Service) -> None:
    store = ResponseStore()

    @router.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation, as OpenAI's responses API does."""
        items = store.items(body)
        keep, alias = partial(store.add, items=items), service.options.alias
        make = partial(ResponsesRenderer, body, model=alias, store=keep)
        return await _answer(body.chat(items), request, service, make)

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
        """Count the tokens of a conversation, as OpenAI's responses API does."""
        return _counted(await _n_tokens(body.chat(store.items(body)), service, request))

    @router.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str) -> Response:
        """Return a stored response."""
        return JSONResponse(store.get(response_id))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        """Delete a stored response; responses that continue it remain."""
        return JSONResponse(store.delete(response_id))


def _add_ollama(router: APIRouter, service: Service) -> None:
    alias, engine = service.options.alias, service.engine

    @router.post("/api/chat")
    @router.post("/api/generate")
    async def ollama(body: OllamaRequest, request: Request) -> Response:
        """Answer a conversation or a prompt, like Ollama."""
        make = partial(OllamaRenderer, model=alias, is_chat=request.scope["path"] == "/api/chat")
        if not (body.messages or body.prompt):
            return JSONResponse(make(None).body())
        is_raw = body.raw or bool(body.suffix) or engine.chat_template is None
        is_raw = is_raw and not body.messages
        return await _answer(body.completion() if is_raw else body.chat(), request, service, make)

    @router.get("/api/tags")
    def tags() -> Response:
        """List the model, like Ollama."""
        return JSONResponse({"models": [described(engine, alias, service.started_at)]})

    @router.get("/api/ps")
    def loaded() -> Response:
        """List the model, which stays loaded, like Ollama."""
        model = engine.pair.target.model
        share = model.n_gpu_layers / (model.n_layers + 1) if model.devices else 0.0
        shown = described(engine, alias, service.started_at)
        return JSONResponse({"models": [running(shown, math.inf, int(share * model.n_bytes))]})

    @router.post("/api/show")
    def show() -> Response:
        """Describe the model, like Ollama; any name is accepted."""
        return JSONResponse(described(engine, alias, service.started_at))

    @router.get("/api/version")
    def version() -> Response:
        """Report the version of Ollama's API that is supported."""
        return JSONResponse({"version": VERSION})


async def _answer(
    body: schema.CompletionRequest | schema.ChatRequest,
    request: Request,
    service: Service,
    make_renderer: Callable[[ParsedRequest], Renderer],
) -> Response:
    """The response, or the beginning of a stream. Raises GgufspecError, ApiError."""
    parsed = await _parse(body, service, request)
    shown = json.dumps("; ".join(parsed.not_enforced))[1:-1]  # ASCII without line breaks
    renderer, headers = make_renderer(parsed), {_NOT_ENFORCED: shown[:_MAX_HEADER]} if shown else {}
    events = service.events(parsed, request.receive)
    if not body.stream:
        await _collect(renderer, events)
        # A long echo has hundreds of thousands of numbers: here it would delay other responses.
        return await run_in_threadpool(lambda: JSONResponse(renderer.body(), headers=headers))
    frames = _frames(renderer, events)
    # An error before the first frame sets the status; later errors are sent in the stream.
    return _EventStream(await anext(frames), frames, renderer.framing.media_type, headers)


async def _parse(
    body: schema.CompletionRequest | schema.ChatRequest | schema.PredictRequest,
    service: Service,
    request: Request,
) -> ParsedRequest:
    """The request for texts, parsed from a body. Raises GgufspecError.

    Encodes its images, until the client disconnects: then raises ClientDisconnect.
    """
    engine, options = service.engine, service.options
    if engine.pair.target.projector is None:
        return await run_in_threadpool(parse_request, body, engine, options)
    gone = asyncio.ensure_future(disconnect(request.receive))

    def check(*_: object) -> None:
        if gone.done() and not gone.cancelled():
            raise ClientDisconnect

    try:
        return await run_in_threadpool(parse_request, body, engine, options, check)
    finally:
        gone.cancel()


async def _n_tokens(body: schema.ChatRequest, service: Service, request: Request) -> int:
    try:
        return len((await _parse(body, service, request)).prompts[0])
    except PromptTooLongError as error:
        return error.n_prompt


def _counted(n_tokens: int) -> Response:
    return JSONResponse({"object": "response.input_tokens", "input_tokens": n_tokens})


async def _collect(renderer: Renderer, events: Events) -> None:
    """Run a request to its end. Raises ApiError, ClientDisconnect."""
    async with aclosing(events):
        async for together in events:
            for event in together:
                renderer.add(event)


async def _frames(renderer: Renderer, events: Events) -> AsyncGenerator[bytes, None]:
    framing, has_begun = renderer.framing, False
    try:
        async with aclosing(events):
            async for together in events:
                found = [document for event in together for document in renderer.add(event)]
                data = b"".join(map(framing.frame, found)) if together else framing.keep_alive
                if data:
                    has_begun = True
                    yield data
        # A text may have ended before any event was sent: its stream begins here.
        yield b"".join([*map(framing.frame, renderer.end()), framing.end])
    except ApiError as error:
        if not has_begun:
            raise
        yield b"".join(map(framing.frame, renderer.error(error)))


class _EventStream(StreamingResponse):
    """Sends a first frame, then others as they come, and closes their generator at the end.

    Starlette's StreamingResponse would also listen for a disconnect, as `events` already does.
    """

    def __init__(
        self,
        first: bytes,
        frames: AsyncGenerator[bytes, None],
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        async def all_frames() -> AsyncGenerator[bytes, None]:
            yield first
            async for frame in frames:
                yield frame

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(all_frames(), headers=headers, media_type=media_type)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            with suppress(ClientDisconnect):
                await self.stream_response(send)
