"""Events of requests: how they end, and what is counted of them."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest
from serving import written
from starlette.requests import ClientDisconnect

from ggufspec.engine.engine import Engine
from ggufspec.engine.handle import Handle
from ggufspec.engine.options import CheckedOptions
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceEvent, ParsedRequest
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


def test_a_text_is_counted_once_although_its_end_is_heard_twice(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Handle.tell

    def twice(handle: Handle) -> None:
        """As when the text has ended before its last chunks are heard of."""
        tell(handle)
        if handle.has_ended:
            time.sleep(0.05)  # the request ends meanwhile
            tell(handle)

    monkeypatch.setattr(Handle, "tell", twice)
    metrics = Metrics()
    texts = Texts(endless, n_waiting_max=1, metrics=metrics)
    options = CheckedOptions.of({"temperature": 0, "max_tokens": 20})

    async def read() -> None:
        found: list[ChoiceEvent] = []
        assert await written(texts, ParsedRequest([endless.tokenize("hi")], options), found) is None
        await asyncio.sleep(0.2)

    asyncio.run(read())
    assert metrics.registry.get_sample_value("ggufspec_generated_tokens_total") == 20
