"""Turns errors into responses, in the form of the API that was called."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ggufspec.errors import (
    ConstraintError,
    GgufspecError,
    OptionError,
    PromptError,
    PromptTooLongError,
)
from ggufspec.server import fields

LOG = logging.getLogger("ggufspec.server")
CLIENT_DISCONNECTED = 499  # nginx's code; only for metrics, as no response can be sent
_FIELD_OR_INDEX = re.compile(r"(?!str$|int$)[a-z_]+|\d+")  # excludes names of union members
_NEEDED = "Input should be "  # start of pydantic's type errors
_OBJECT = re.compile(r"a valid dictionary( or (instance|object) .*)?")  # it names our classes
_MAX_NAME = 100  # characters of a field's name, or of a value, in an error
_INVALID_OPTION = "invalid_value"  # code of errors about options of the engine
_NOT_SERVED = ("/v1/rerank", "/rerank", "/v1/audio", "/v1/images")
_ANTHROPIC_TYPES = {  # by status
    **dict.fromkeys((400, 405, 408, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An error response. Its message contains no paths and no prompts."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body: dict[str, Any] = {"error": {**error, **(facts or {})}}


def error_response(error: ApiError, path: str) -> JSONResponse:
    return JSONResponse(error_document(error, path), error.status_code, error.headers)


def error_document(error: ApiError, path: str) -> dict[str, Any]:
    """An error in the form of the API that the path belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic_error(error)
    return {"error": error.detail} if path.startswith("/api/") else error.body


def anthropic_error(error: ApiError) -> dict[str, Any]:
    message, facts = error.detail, error.body["error"]
    if facts["code"] == "context_length_exceeded":  # text at which agents compact
        message = (
            f"prompt is too long: {facts['n_prompt_tokens']} tokens > {facts['n_ctx']} maximum"
        )
    kind = _ANTHROPIC_TYPES.get(error.status_code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def server_stopping() -> ApiError:
    message = "the server is stopping; retry once it has restarted"
    return ApiError(503, message, "server_error", code="stopping")


def engine_failed() -> ApiError:
    """The error after the engine's thread has ended by itself: no request can be processed."""
    message = "the engine has failed; restart the server"
    return ApiError(503, message, "server_error", code="engine_failed")


def api_error_of(error: BaseException) -> ApiError:
    """The response for an exception; generic if it is unexpected, since it may quote a text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        # Clients look for this code, or "maximum context length is", then shorten the conversation.
        return ApiError(
            400,
            f"This model's maximum context length is {error.n_ctx} tokens. However, your prompt "
            f"has {error.n_prompt} tokens, and at least one must be left for the text. Shorten the "
            "prompt, or start the server with a larger context (-c)",
            code="context_length_exceeded",
            facts={"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx},
        )
    if isinstance(error, (PromptError, OptionError, ConstraintError)):
        code = "invalid_prompt" if isinstance(error, PromptError) else _INVALID_OPTION
        return ApiError(400, str(error), code=code)
    if isinstance(error, GgufspecError):
        return ApiError(500, str(error), "server_error", code="failed")
    message = "internal error while processing this request; see the server's log"
    return ApiError(500, message, "server_error", code="failed")


def log_error(what: str, error: BaseException) -> None:
    """Log an error; at the default level only its type, as messages may quote prompts or paths."""
    LOG.error("%s: %s", what, type(error).__name__)
    LOG.debug("traceback", exc_info=error)


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        if isinstance(error, ApiError):
            return _answer(request, error)
        if error.status_code == 404 and path.startswith(_NOT_SERVED):
            message = "this server has no images, audio or ranking"
            return error_response(ApiError(404, message, code="not_supported"), path)
        message = {
            404: "there is nothing at this path; see /openapi.json",
            405: "this path does not support this method; see /openapi.json",
        }.get(error.status_code, "the request cannot be read")
        return error_response(ApiError(error.status_code, message, headers=error.headers), path)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        place, problem = _nearest(error.errors(), request.scope["route"].endpoint)
        place = fields.sent_place(place, _sent(request))
        message = (place or "the body") + problem
        return error_response(ApiError(400, message, param=place or None), request.scope["path"])

    @app.exception_handler(GgufspecError)
    @app.exception_handler(Exception)
    async def other_error(request: Request, error: Exception) -> Response:
        return _answer(request, api_error_of(error))

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_DISCONNECTED)


def _answer(request: Request, error: ApiError) -> Response:
    """The response for an error, which names fields and options as they were sent."""
    sent, param, code = _sent(request), error.body["error"]["param"], error.body["error"]["code"]
    if error.status_code == 400 and code in (None, _INVALID_OPTION):
        param = param and fields.sent_place(param, sent)
        error = ApiError(400, fields.with_sent_names(error.detail, sent), param=param, code=code)
    return error_response(error, request.scope["path"])


def _sent(request: Request) -> object:
    return getattr(request.state, "sent", None)


def _nearest(errors: Sequence[dict[str, Any]], endpoint: Callable[..., Any]) -> tuple[str, str]:
    """The place of one error in the first wrong field, and what follows it in the message.

    A field that accepts several types has an error for each type. Prefers errors about a value of
    the right type, then errors that are nested deepest: there, the type fits best.
    """
    errors = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    placed = [(_place(each["loc"]), each) for each in errors]
    place, best = max(
        placed, key=lambda each: (not each[1]["type"].endswith("_type"), each[0].count("."))
    )
    if best["type"] == "extra_forbidden":
        *before, name = best["loc"]
        shown = str(name)[:_MAX_NAME]
        body = get_type_hints(endpoint).get("body")
        known, kinds = getattr(body, "model_fields", ()), getattr(body, "kinds", ())
        place = ".".join(filter(None, (_place(before), shown)))
        return place, f": {fields.refusal(shown, known, kinds)}"
    if best["type"] == "missing":
        return place, " is missing; send it"
    if not best["msg"].startswith(_NEEDED):
        return place, f": {best['msg']}"
    alike = [each for at, each in placed if at == place] if best["type"].endswith("_type") else []
    needed = [
        _OBJECT.sub("an object", each["msg"].removeprefix(_NEEDED)) for each in alike or [best]
    ]
    return place, f" is {_shown(best)}; it must be {' or '.join(dict.fromkeys(needed))}"


def _shown(error: dict[str, Any]) -> str:
    """The value that an error is about; texts, which may be prompts, only if they are names."""
    value = error["input"]
    if isinstance(value, str):
        return repr(value[:_MAX_NAME]) if error["type"] == "literal_error" else "a text"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value, ensure_ascii=False, default=lambda _: "an object")[:_MAX_NAME]


def _place(loc: Sequence[str | int]) -> str:
    return ".".join(filter(_FIELD_OR_INDEX.fullmatch, map(str, loc[1:])))
