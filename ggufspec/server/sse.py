"""Server-sent events: one JSON document a line, and signs of life between. Knows no models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ALIVE = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"


def frame(document: dict[str, Any]) -> bytes:
    """One event."""
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends frames as they come, and closes their generator, however it ends."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async for data in self._frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._frames.aclose()  # type: ignore[attr-defined]
