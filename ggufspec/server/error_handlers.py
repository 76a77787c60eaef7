"""Turns exceptions of the routes into error responses, in the form of the API that was called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ggufspec.errors import GgufspecError
from ggufspec.server import fields, schema
from ggufspec.server.dialects.messages_request import MessagesRequest
from ggufspec.server.dialects.ollama_request import OllamaRequest
from ggufspec.server.dialects.responses_request import ResponsesRequest
from ggufspec.server.errors import ApiError, api_error_of, error_response
from ggufspec.server.middleware import CLIENT_DISCONNECTED

_FIELD_OR_INDEX = re.compile(r"(?!str$|int$)[a-z_]+|\d+")  # excludes names of union members
_NEEDED = "Input should be "  # start of pydantic's type errors
_MAX_NAME = 100  # characters of a field's name in an error
# The class of the body, by the prefix of the path; "": all other paths.
_BODIES: dict[str, tuple[type[schema.Body], ...]] = {
    "": (schema.ChatRequest, schema.CompletionRequest),
    "/v1/messages": (MessagesRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/api/": (OllamaRequest,),
}
_NOT_SERVED = {
    ("/v1/embeddings", "/embedding", "/v1/rerank", "/rerank", "/v1/audio", "/v1/images"): (
        "this server generates text only: it has no embeddings, images or audio"
    ),
}


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error_response(error, request.url.path)
        path = request.url.path
        message = {
            404: "there is nothing at this path; see /openapi.json",
            405: "this path does not support this method; see /openapi.json",
        }.get(error.status_code, "the request cannot be read")
        made = ApiError(error.status_code, message, headers=error.headers)
        for paths, reason in _NOT_SERVED.items():
            if error.status_code == 404 and path.startswith(paths):
                made = ApiError(404, reason, code="not_supported")
        return error_response(made, path)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        place, problem = _nearest(error.errors(), request.url.path)
        message = f"{place or 'the body'}: {problem}"
        return error_response(ApiError(400, message, param=place or None), request.url.path)

    @app.exception_handler(GgufspecError)
    @app.exception_handler(Exception)
    async def other_error(request: Request, error: Exception) -> Response:
        return error_response(api_error_of(error), request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_DISCONNECTED)


def _nearest(errors: Sequence[dict[str, Any]], path: str) -> tuple[str, str]:
    """The place and the text of one error in the first wrong field.

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
        return ".".join(filter(None, (_place(before), shown))), _refusal(shown, path)
    if best["type"].endswith("_type"):
        needed = [each["msg"].removeprefix(_NEEDED) for at, each in placed if at == place]
        return place, _NEEDED + " or ".join(dict.fromkeys(needed))
    return place, best["msg"]


def _refusal(name: str, path: str) -> str:
    bodies = next(found for begin, found in reversed(_BODIES.items()) if path.startswith(begin))
    known = {each for body in bodies for each in body.model_fields}
    return fields.refusal(name, known, [kind for body in bodies for kind in body.kinds])


def _place(loc: Sequence[str | int]) -> str:
    return ".".join(filter(_FIELD_OR_INDEX.fullmatch, map(str, loc[1:])))
