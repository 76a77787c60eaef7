"""The routes: which body is answered how. Knows HTTP; how texts are made is the worker's affair."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from ggufspec import __version__
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions
from ggufspec.errors import GgufspecError
from ggufspec.server import metrics as prometheus
from ggufspec.server.errors import InternalError, Problem, problem_of
from ggufspec.server.job import Asked, GoneError, Patience, Waiting
from ggufspec.server.metrics import Metrics
from ggufspec.server.middleware import CLIENT_GONE, Guard, Rules, answer
from ggufspec.server.page import page
from ggufspec.server.requests import (
    Generation,
    Limits,
    chat_task,
    completion_task,
    predict_task,
    refuse,
)
from ggufspec.server.responses import Answer, Form
from ggufspec.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PredictRequest,
    TokenizeRequest,
)
from ggufspec.server.sse import ALIVE, DONE, EventStream, frame
from ggufspec.server.worker import Done, News, Task, Worker

_NAMED = re.compile(r"(?!str$|int$)[a-z_]+|\d+")  # fields and places, not kinds of a union
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": what}
    for status, what in (
        (400, "The request cannot be answered as it is."),
        (401, "The API key is missing or wrong."),
        (403, "Called by a name that is not this machine's."),
        (404, "There is no such thing."),
        (408, "The body took too long."),
        (413, "The body is too large."),
        (415, "The body is not JSON."),
        (429, "Too many wait; Retry-After says when to ask again."),
        (503, "The server stops."),
        (504, "The request took too long."),
    )
}


@dataclass(frozen=True)
class ServerOptions:
    """What the operator chose. `hosts`: names that the server may be called by; None: any.

    `defaults`: options of a text where the request does not say. Seconds are those of a whole
    request, of its body, and between signs of life.
    """

    alias: str
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    n_waiting_max: int = 32
    max_tokens: int | None = None
    n_body_bytes: int = 2**20
    timeout: float = 600.0
    body_seconds: float = 30.0
    keep_alive: float = 5.0
    defaults: GenerateOptions = field(default_factory=lambda: GenerateOptions())


@dataclass(frozen=True)
class Service:
    """What the routes work with."""

    engine: Engine
    worker: Worker
    metrics: Metrics
    settings: ServerOptions
    started_at: int

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return Limits(self.settings.max_tokens, self.settings.defaults)

    @property
    def has_chat(self) -> bool:
        """Whether the model was made for chat."""
        return self.engine.target.model.chat_template is not None


def make_service(engine: Engine, settings: ServerOptions) -> Service:
    """A service whose worker has not started yet."""
    metrics = Metrics()
    worker = Worker(engine, n_waiting_max=settings.n_waiting_max, metrics=metrics)
    return Service(engine, worker, metrics, settings, int(time.time()))


def make_app(service: Service) -> ASGIApp:
    """The application: routes, and before them the guard."""
    app = FastAPI(
        title="ggufspec",
        version=__version__,
        summary="OpenAI's API over a GGUF model that writes with the help of a small one.",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    _add_error_handlers(app)
    _add_texts(app, service)
    _add_tokens(app, service)
    _add_facts(app, service)
    _tell_true_errors(app)
    settings = service.settings
    rules = Rules(settings.api_key, settings.hosts, settings.n_body_bytes, settings.body_seconds)
    guarded: ASGIApp = Guard(app, rules=rules, metrics=service.metrics)
    if settings.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return guarded


def _add_texts(app: FastAPI, service: Service) -> None:
    """What makes the model write."""
    model = service.settings.alias

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue a text, as OpenAI's legacy completions."""
        task = await _task(completion_task, asked, request, service)
        form = Form(model, False, **_form(asked), with_logprobs=asked.logprobs is not None)
        return await _answered(task, form, asked, request, service)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        """Answer a conversation, by the model's own chat template."""
        task = await _task(chat_task, asked, request, service)
        reads_tools = bool(asked.tools) and asked.tool_choice != "none"
        form = Form(
            model,
            True,
            **_form(asked),
            with_logprobs=bool(asked.logprobs),
            reads_tools=reads_tools,
        )
        return await _answered(task, form, asked, request, service)

    @app.post("/predict", responses=_ERRORS)
    async def predict(asked: PredictRequest, request: Request) -> Response:
        """Continue a prompt: a JSON text, the prompt before it, as LLMSpeculativeSampling does."""
        task = await _task(predict_task, asked, request, service)
        told = await _whole(task, Form(model, False), request, service)
        return JSONResponse(asked.prompt + told.texts[0])


def _add_tokens(app: FastAPI, service: Service) -> None:
    """What needs the vocabulary alone: these do not wait."""
    vocab = service.engine.vocab

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(asked: TokenizeRequest) -> Response:
        """A text as token ids."""
        tokens = await run_in_threadpool(
            vocab.tokenize,
            asked.content,
            add_special=asked.add_special,
            parse_special=asked.parse_special,
        )
        return JSONResponse({"tokens": tokens})

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(asked: DetokenizeRequest) -> Response:
        """Token ids as a text; control tokens show nothing."""
        for token in asked.tokens:
            if token >= vocab.n_tokens:
                raise Problem(400, f"token {token}: there are {vocab.n_tokens:,}", param="tokens")
        data = await run_in_threadpool(lambda: b"".join(map(vocab.piece, asked.tokens)))
        return JSONResponse({"content": data.decode("utf-8", "replace")})


def _add_facts(app: FastAPI, service: Service) -> None:
    """What asks the model nothing."""
    engine, alias = service.engine, service.settings.alias
    model = {
        "id": alias,
        "object": "model",
        "created": service.started_at,
        "owned_by": "ggufspec",
        "ggufspec": {
            "chat": service.has_chat,
            "draft": engine.draft is not None,
            "n_ctx": engine.n_ctx,
            "n_vocab": engine.vocab.n_tokens,
        },
    }

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def one_model(name: str) -> Response:
        """The one model, by its name."""
        if name != alias:
            raise Problem(404, "there is no such model here", code="model_not_found")
        return JSONResponse(model)

    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        """Whether requests are taken."""
        if service.worker.is_stopping:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", responses=_ERRORS)
    async def metrics() -> Response:
        """Counts and seconds, for Prometheus."""
        worker = service.worker
        text = service.metrics.text(n_waiting=worker.n_waiting, n_running=worker.n_running)
        return PlainTextResponse(text, media_type=prometheus.CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def built_in_page() -> Response:
        found = page()
        return Response(found.html, media_type="text/html", headers=found.headers)


# One request


async def _task(
    make: Callable[[Any, Engine, Limits], Task],
    asked: Generation,
    request: Request,
    service: Service,
) -> Task:
    """The task that a body makes. Raises Problem, GgufspecError; long prompts block nobody."""
    refuse(json.loads(await request.body()), asked.refused)
    return await run_in_threadpool(make, asked, service.engine, service.limits)


def _form(asked: Generation) -> dict[str, bool]:
    options = asked.stream_options
    return {
        "with_usage": options is not None and options.include_usage,
        "reports": asked.report_drafted,
    }


async def _answered(
    task: Task, form: Form, asked: Generation, request: Request, service: Service
) -> Response:
    if not asked.stream:
        return JSONResponse((await _whole(task, form, request, service)).whole())
    frames = _frames(task, form, request, service)
    # What fails at once gets a status of its own; afterwards it can only be told in the stream.
    first = await anext(frames)
    return EventStream(_after(first, frames))


async def _whole(task: Task, form: Form, request: Request, service: Service) -> Answer:
    told = Answer(form, len(task.prompts), task.n)
    with Asked(service.worker, task, _patience(service), request.receive) as asked:
        async for event in asked.events():
            if not isinstance(event, (Waiting, Done)):
                for _ in told.add(event):
                    pass
    return told


async def _frames(
    task: Task, form: Form, request: Request, service: Service
) -> AsyncIterator[bytes]:
    told = Answer(form, len(task.prompts), task.n)
    has_begun = False
    try:
        with Asked(service.worker, task, _patience(service), request.receive) as asked:
            async for event in asked.events():
                for data in _frames_of(told, event):
                    has_begun = True
                    yield data
    except GgufspecError as error:
        if not has_begun:
            raise
        yield frame(problem_of(error).body)


def _frames_of(told: Answer, event: News | Waiting) -> list[bytes]:
    if isinstance(event, Waiting):
        return [ALIVE]
    if isinstance(event, Done):
        usage = told.usage_chunk()
        return [*([] if usage is None else [frame(usage)]), DONE]
    return [frame(chunk) for chunk in told.add(event)]


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for data in rest:
            yield data
    except GoneError:
        return
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


def _patience(service: Service) -> Patience:
    return Patience(service.settings.timeout, service.settings.keep_alive)


# Errors, all in OpenAI's form


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def of_ours(request: Request, error: Problem) -> Response:
        return answer(error)

    @app.exception_handler(GgufspecError)
    async def of_the_engine(request: Request, error: GgufspecError) -> Response:
        return answer(problem_of(error))

    @app.exception_handler(GoneError)
    async def of_nobody(request: Request, error: GoneError) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(RequestValidationError)
    async def of_the_body(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(filter(_NAMED.fullmatch, map(str, first["loc"][1:])))
        return answer(Problem(400, f"{place or 'the body'}: {first['msg']}", param=place or None))

    @app.exception_handler(HTTPException)
    async def of_the_route(request: Request, error: HTTPException) -> Response:
        told = {404: "there is nothing at this path", 405: "this path has other methods"}
        message = told.get(error.status_code, "the request cannot be read")
        return answer(Problem(error.status_code, message, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def of_nobody_foresaw(request: Request, error: Exception) -> Response:
        return answer(problem_of(InternalError()))


def _tell_true_errors(app: FastAPI) -> None:
    """FastAPI's document promises 422; here it is 400."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
