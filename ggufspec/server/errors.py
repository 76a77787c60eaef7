"""The error responses, in the form of each API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ggufspec.errors import (
    ConstraintError,
    GgufspecError,
    OptionError,
    PromptError,
    PromptTooLongError,
)

LOG = logging.getLogger("ggufspec.server")
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
    """The response for an error, in the form of the API that the path belongs to."""
    found = error.body
    if path.startswith("/v1/messages"):
        found = anthropic_error(error)
    elif path.startswith("/api/"):
        found = {"error": error.detail}
    return JSONResponse(found, error.status_code, error.headers)


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


def worker_failed() -> ApiError:
    """The error after the engine worker's thread has ended: no request can be processed."""
    message = "the engine worker has failed; restart the server"
    return ApiError(503, message, "server_error", code="worker_failed")


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
        what = "prompt" if isinstance(error, PromptError) else "value"
        return ApiError(400, str(error), code=f"invalid_{what}")
    if isinstance(error, GgufspecError):
        return ApiError(500, str(error), "server_error", code="failed")
    message = "internal error while processing this request; see the server's log"
    return ApiError(500, message, "server_error", code="failed")


def log_error(what: str, error: BaseException) -> None:
    """Log an error; at the default level only its type, as messages may quote prompts or paths."""
    LOG.error("%s: %s", what, type(error).__name__)
    LOG.debug("traceback", exc_info=error)
