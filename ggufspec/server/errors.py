"""What goes wrong between a client and the engine, and how OpenAI's clients are told of it.

Knows HTTP's status codes; neither requests nor models. Nothing that is told holds a path or a
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ggufspec.errors import GgufspecError, OptionError, PromptError


class BusyError(GgufspecError):
    """As many requests wait as may wait."""

    def __init__(self, n_waiting: int, retry_seconds: float) -> None:
        super().__init__(f"{n_waiting} requests are waiting, and no more may; try again later")
        self.retry_seconds = retry_seconds


class StoppingError(GgufspecError):
    """The server stops: what did not end in time is told so."""

    def __init__(self) -> None:
        super().__init__("the server is stopping; ask again when it is back")


class TooSlowError(GgufspecError):
    """A request took longer than one may take, waiting included."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the request took longer than {seconds:g} s; ask for fewer tokens, or raise --timeout"
        )


class InternalError(GgufspecError):
    """A mistake of ours. What it was stands in the log, by its kind alone."""

    def __init__(self) -> None:
        super().__init__("the request met an error of the server's own; the next one may not")


@dataclass(eq=False)
class Problem(Exception):
    """An answer that is an error, in OpenAI's form."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}"""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}


def problem_of(error: GgufspecError) -> Problem:
    """What a client is told of an error."""
    message = str(error)
    if isinstance(error, BusyError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_seconds)))}
        return Problem(429, message, "rate_limit_error", code="queue_full", headers=wait)
    if isinstance(error, StoppingError):
        return Problem(503, message, "server_error", code="stopping")
    if isinstance(error, TooSlowError):
        # Asked once more it would take as long again: OpenAI's clients would, if not told.
        never = {"x-should-retry": "false"}
        return Problem(504, message, "timeout_error", code="timeout", headers=never)
    if isinstance(error, PromptError):
        return Problem(400, message, code="invalid_prompt")
    if isinstance(error, OptionError):
        return Problem(400, message, code="invalid_value")
    return Problem(500, message, "server_error", code="failed")
