"""Server-sent events: frames, and a response that closes its generator once the client is gone."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients ignore
DONE = b"data: [DONE]\n\n"


def frame(document: dict[str, Any]) -> bytes:
    """One event."""
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends a first frame, then others as they come, and closes their generator in the end."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            return
        finally:
            await self._frames.aclose()
