"""A stream with many events does not delay a timeout or the detection of a disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from ggufspec.engine.options import CheckedOptions
from ggufspec.server.app import submit
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceDelta, ParsedRequest, RequestEvent
from ggufspec.server.service import ServerOptions


class FloodingWorker:
    """Has sent more events than anybody reads before `submit` returns."""

    def __init__(self) -> None:
        self.n_cancelled = 0

    def submit(
        self, parsed: ParsedRequest, on_event: Callable[[RequestEvent], None], run_soon: object
    ) -> object:
        for _ in range(1000):
            on_event(ChoiceDelta(0, "a", (1,), (False,), (), (1,)))
        return self

    def cancel(self, queued: object) -> None:
        self.n_cancelled += 1


@pytest.mark.parametrize(
    ("timeout", "is_gone", "error"),
    [(0.005, False, ApiError), (60.0, True, ClientDisconnect)],
)
def test_many_events_do_not_delay_the_end(
    timeout: float, is_gone: bool, error: type[Exception]
) -> None:
    async def receive() -> Any:
        if not is_gone:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def read(worker: Any) -> int:
        n_read = 0
        options = ServerOptions("tiny", timeout=timeout)
        events = submit(worker, ParsedRequest([[1]], CheckedOptions()), options, receive)
        async with aclosing(events):
            try:
                async for _ in events:
                    n_read += 1
                    await asyncio.sleep(0.001)
            except error:
                return n_read
        return -1

    worker = FloodingWorker()
    assert 0 <= asyncio.run(read(worker)) < 10
    assert worker.n_cancelled == 1
