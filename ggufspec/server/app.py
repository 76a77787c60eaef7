"""The application: its routes, behind the middleware."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from ggufspec import __version__
from ggufspec.errors import PromptTooLongError
from ggufspec.server import schema
from ggufspec.server.answering import answer, collect, parse, submit
from ggufspec.server.dialects.chat_response import CompletionRenderer
from ggufspec.server.dialects.messages import CountTokensRequest, MessageRenderer, MessagesRequest
from ggufspec.server.dialects.ollama import VERSION, OllamaRenderer, OllamaRequest, described
from ggufspec.server.dialects.responses_request import ResponsesRequest, ResponseStore
from ggufspec.server.dialects.responses_response import ResponsesRenderer
from ggufspec.server.errors import add_error_handlers
from ggufspec.server.middleware import RequestMiddleware
from ggufspec.server.routes import add_information, add_slots, add_tokenization
from ggufspec.server.service import Service
from ggufspec.server.strict_json import parse_json

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
        ("default", "Any other error."),  # keeps FastAPI from documenting 422; we send 400
    )
}


def make_app(service: Service) -> ASGIApp:
    app = FastAPI(
        title="ggufspec",
        version=__version__,
        summary="APIs of OpenAI, Anthropic and Ollama for a GGUF model, with speculative decoding.",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    add_error_handlers(app)
    router = APIRouter(route_class=_StrictJsonRoute, responses=_ERRORS)
    _add_generation(router, service)
    _add_responses(router, service)
    _add_ollama(router, service)
    add_tokenization(router, service)
    add_slots(router, service)
    add_information(router, service)
    app.include_router(router)
    options = service.options
    checked: ASGIApp = RequestMiddleware(app, options=options, metrics=service.metrics)
    if options.cors_origins:
        checked = CORSMiddleware(
            checked,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return checked


class _StrictJsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


class _StrictJsonRoute(APIRoute):
    """Makes FastAPI parse each body once, strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return handle_strictly


def _add_generation(router: APIRouter, service: Service) -> None:
    alias = service.options.alias

    @router.post("/v1/completions")
    async def completions(body: schema.CompletionRequest, request: Request) -> Response:
        """Continue a prompt, like OpenAI's legacy completions."""
        return await answer(
            body, request, service, lambda parsed: CompletionRenderer(body, parsed, alias)
        )

    @router.post("/v1/chat/completions")
    async def chat(body: schema.ChatRequest, request: Request) -> Response:
        """Continue a conversation, with the model's chat template."""
        return await answer(
            body, request, service, lambda parsed: CompletionRenderer(body, parsed, alias)
        )

    @router.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Continue a conversation, like Anthropic's Messages API."""
        return await answer(
            body.chat(), request, service, lambda parsed: MessageRenderer(parsed, alias)
        )

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Count the tokens of a conversation, like Anthropic's API."""
        try:
            n_tokens = len((await parse(body.chat(), service)).prompts[0])
        except PromptTooLongError as error:
            n_tokens = error.n_prompt
        return JSONResponse({"input_tokens": n_tokens})

    @router.post("/predict")
    async def predict(body: schema.PredictRequest, request: Request) -> Response:
        """Continue a prompt; returns a JSON string, prompt included (LLMSpeculativeSampling)."""
        parsed = await parse(body, service)
        renderer = CompletionRenderer(body, parsed, alias)
        await collect(renderer, submit(service.worker, parsed, service.options, request.receive))
        return JSONResponse(body.prompt + renderer.body()["choices"][0]["text"])


def _add_responses(router: APIRouter, service: Service) -> None:
    store = ResponseStore()

    @router.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation, as OpenAI's responses API does."""
        items = store.items(body)
        keep = partial(store.add, items=items)
        return await answer(
            body.chat(items),
            request,
            service,
            lambda parsed: ResponsesRenderer(body, parsed, service.options.alias, keep),
        )

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
        make = partial(OllamaRenderer, model=alias, is_chat=request.url.path == "/api/chat")
        if not (body.messages or body.prompt):
            return JSONResponse(make(None).body())
        is_raw = not body.messages and (body.raw or engine.chat_template is None)
        return await answer(body.completion() if is_raw else body.chat(), request, service, make)

    @router.get("/api/tags")
    def tags() -> Response:
        """List the model, like Ollama."""
        return JSONResponse({"models": [described(engine, alias, service.started_at)]})

    @router.post("/api/show")
    def show() -> Response:
        """Describe the model, like Ollama; any name is accepted."""
        return JSONResponse(described(engine, alias, service.started_at))

    @router.get("/api/version")
    def version() -> Response:
        """Report the version of Ollama's API that is supported."""
        return JSONResponse({"version": VERSION})
