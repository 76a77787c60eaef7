"""A stream with many events does not delay a timeout or the detection of a disconnect."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ParsedRequest
from ggufspec.server.metrics import Metrics
from ggufspec.server.texts import Texts


@pytest.mark.parametrize(
    ("timeout", "is_gone", "error"),
    [(0.02, False, ApiError), (60.0, True, ClientDisconnect)],
)
def test_many_events_do_not_delay_the_end(
    endless: Engine, timeout: float, is_gone: bool, error: type[Exception]
) -> None:
    async def receive() -> Any:
        if not is_gone:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def read() -> int:
        texts = Texts(endless, n_waiting_max=1, metrics=Metrics())
        request = ParsedRequest([endless.tokenize("hi")], CheckedOptions.of({"temperature": 0}))
        events = texts.events(request, receive, timeout=timeout, keep_alive=60)
        n_read = 0
        async with aclosing(events):
            try:
                async for _ in events:
                    n_read += 1
                    await asyncio.sleep(0.005)  # the text writes faster
            except error:
                return n_read
        return -1

    assert 0 <= asyncio.run(read()) < 10
