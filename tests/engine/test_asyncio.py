"""Texts for asyncio: written beside the event loop, and ended with the task that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from patience import comes_true

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError

HOW: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
ENDLESS: dict[str, Any] = {**HOW, "max_tokens": None, "context_shift": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tiny.write_llama(tmp_path_factory.mktemp("models") / "target.gguf")
    with ggufspec.load(path, n_ctx=64, n_slots=2, n_threads=1, tuned=False) as loaded:
        yield loaded


def is_free(engine: Engine) -> bool:
    return len(engine.pair.slots.free) == 2


def test_texts_are_those_of_generate(engine: Engine) -> None:
    wanted = [engine.generate(each, **HOW).text for each in ("a", "b", "c")]

    async def streamed(prompt: str) -> str:
        stream = engine.astream(prompt, **HOW)
        text = "".join([chunk.text async for chunk in stream])
        assert stream.completion.text == text
        assert stream.completion.finish_reason == "length"
        return text

    async def main() -> list[str]:
        whole = [
            each.text
            for each in await asyncio.gather(
                *(engine.agenerate(each, **HOW) for each in ("a", "b", "c"))
            )
        ]
        return whole + await asyncio.gather(*map(streamed, ("a", "b", "c")))

    assert asyncio.run(main()) == wanted * 2
    assert is_free(engine)


def test_the_event_loop_goes_on_meanwhile(engine: Engine) -> None:
    async def main() -> int:
        n_turns, text = 0, asyncio.create_task(engine.agenerate("a", **{**HOW, "max_tokens": 50}))
        while not text.done():
            await asyncio.sleep(0)
            n_turns += 1
        return n_turns

    assert asyncio.run(main()) > 20


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_cancelled_task_ends_its_text(engine: Engine, how: str) -> None:
    async def stream() -> None:
        async for _ in engine.astream("a", **ENDLESS):
            pass

    async def main() -> None:
        text = asyncio.create_task(
            engine.agenerate("a", **ENDLESS) if how == "generate" else stream()
        )
        while is_free(engine):
            await asyncio.sleep(0.001)
        text.cancel()
        with pytest.raises(asyncio.CancelledError):
            await text

    asyncio.run(main())
    assert comes_true(lambda: is_free(engine), 5)


def test_a_stream_that_is_left_ends_its_text(engine: Engine) -> None:
    async def main() -> None:
        async with engine.astream("a", **ENDLESS) as stream:
            async for _ in stream:
                break
        async for _ in engine.astream("a", **ENDLESS):  # dropped
            break

    asyncio.run(main())
    assert comes_true(lambda: is_free(engine), 5)


def test_errors_arrive_where_the_text_is_awaited(engine: Engine) -> None:
    def fails(*_: object) -> None:
        raise OSError("no more")

    async def main() -> None:
        with pytest.raises(OptionError, match="no drafter"):
            await engine.agenerate("a", drafter="oracle")
        with pytest.raises(OSError, match="no more"):
            await engine.agenerate("a " * 20, progress=fails, **HOW)
        with pytest.raises(OptionError, match="has not begun"):
            engine.astream("a").completion  # noqa: B018

    asyncio.run(main())
    assert is_free(engine)


def test_a_text_may_outlive_its_event_loop(engine: Engine) -> None:
    async def main() -> None:
        asyncio.create_task(engine.agenerate("a", **ENDLESS))  # noqa: RUF006
        while is_free(engine):
            await asyncio.sleep(0.001)

    asyncio.run(main())  # which cancels what is left
    assert comes_true(lambda: is_free(engine), 5)
    started = time.perf_counter()
    assert engine.generate("a", **HOW).tokens
    assert time.perf_counter() - started < 5
