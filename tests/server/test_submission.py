"""Who has plenty to hear is told in time that it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ggufspec.server.errors import TooSlowError
from ggufspec.server.job import Asked, GoneError, Patience
from ggufspec.server.worker import Event, Piece, Task


class Flood:
    """A worker that has told more than anybody will hear, before it is asked a second time."""

    def __init__(self) -> None:
        self.n_given_up = 0

    def ask(self, task: Task, tell: Callable[[Event], None]) -> object:
        for _ in range(1000):
            tell(Piece(0, "a", (1,), (False,), ()))
        return self

    def give_up(self, ticket: object) -> None:
        self.n_given_up += 1


@pytest.mark.parametrize(
    ("timeout", "is_gone", "error"), [(0.0, False, TooSlowError), (60.0, True, GoneError)]
)
def test_what_is_there_to_hear_delays_no_end(
    timeout: float, is_gone: bool, error: type[Exception]
) -> None:
    async def receive() -> Any:
        if not is_gone:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def ask(worker: Any) -> int:
        n_heard = 0
        with Asked(worker, Task([[1]], {}), Patience(timeout, 1.0), receive) as asked:
            await asyncio.sleep(0.01)
            try:
                async for _ in asked.events():
                    n_heard += 1
            except error:
                return n_heard
        return -1

    flood = Flood()
    assert 0 <= asyncio.run(ask(flood)) < 10
    assert flood.n_given_up == 1
