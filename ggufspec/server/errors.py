"""The errors of the server, and the error responses that clients get for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ggufspec.errors import GgufspecError, OptionError, PromptError


class QueueFullError(GgufspecError):
    """As many requests are waiting as the queue takes."""

    def __init__(self, n_waiting: int, retry_seconds: float) -> None:
        super().__init__(
            f"the queue is full ({n_waiting} requests are waiting); retry after the seconds in "
            "Retry-After"
        )
        self.retry_seconds = retry_seconds


class ServerStoppingError(GgufspecError):
    """The server is stopping and the request was not finished in time."""

    def __init__(self) -> None:
        super().__init__("the server is stopping; retry once it has restarted")


class RequestTimeoutError(GgufspecError):
    """A request took longer than --timeout, its time in the queue included."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the request took longer than {seconds:g} s; ask for fewer tokens, or start the "
            "server with a larger --timeout"
        )


class InternalError(GgufspecError):
    """An unexpected exception. The log has its type; its message may quote a prompt."""

    def __init__(self) -> None:
        super().__init__("internal error while processing this request; see the server's log")


class WorkerFailedError(GgufspecError):
    """The engine worker's thread has ended, so no request can be processed any more."""

    def __init__(self) -> None:
        super().__init__("the engine worker has failed; restart the server")


class ApiError(HTTPException):
    """An error response in OpenAI's format. Its message holds neither paths nor prompts."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = {"error": error}

    def response(self) -> JSONResponse:
        """The response with this status, body and these headers."""
        return JSONResponse(self.body, self.status_code, self.headers)


def api_error_of(error: GgufspecError) -> ApiError:
    """The response for an error of the engine or of the server."""
    message = str(error)
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_seconds)))}
        return ApiError(429, message, "rate_limit_error", code="queue_full", headers=wait)
    if isinstance(error, ServerStoppingError):
        return ApiError(503, message, "server_error", code="stopping")
    if isinstance(error, WorkerFailedError):
        return ApiError(503, message, "server_error", code="worker_failed")
    if isinstance(error, RequestTimeoutError):
        # OpenAI's clients retry a 504 by default, and the retry would take as long again.
        no_retry = {"x-should-retry": "false"}
        return ApiError(504, message, "timeout_error", code="timeout", headers=no_retry)
    if isinstance(error, PromptError):
        return ApiError(400, message, code="invalid_prompt")
    if isinstance(error, OptionError):
        return ApiError(400, message, code="invalid_value")
    return ApiError(500, message, "server_error", code="failed")
