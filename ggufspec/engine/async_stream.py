"""Iterates over the chunks of one text in asyncio, which is imported only where it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from ggufspec.engine.handle import Handle
from ggufspec.engine.stream import Stream
from ggufspec.engine.text import Chunk, Completion
from ggufspec.errors import OptionError


class AsyncStream(AsyncIterator[Chunk]):
    """A Stream for `async for` and `async with`. Cancelling the task that waits ends the text.

    The text begins with the first step, or with the block.
    """

    def __init__(self, begin: Callable[[], Stream]) -> None:
        """`begin` is called in another thread, since preparing a text may take long."""
        self._begin = begin
        self._stream: Stream | None = None
        self._news = asyncio.Event()

    async def __anext__(self) -> Chunk:
        stream = await self._begun()
        while True:
            try:
                chunk = stream.poll()
            except StopIteration:
                raise StopAsyncIteration from None
            if chunk is not None:
                return chunk
            await self._wait(stream)

    async def finish(self) -> Completion:
        """Wait for the end of the text, without its chunks. Raises what `generate` raises."""
        stream = await self._begun(only_end=True)
        while not stream.handle.has_ended:
            await self._wait(stream)
        return stream.finish()

    async def _begun(self, *, only_end: bool = False) -> Stream:
        if self._stream is None:
            self._stream = await asyncio.to_thread(self._begin)
        # Not this object: the text would refer to it, and could not be dropped.
        loop, news = asyncio.get_running_loop(), self._news

        def tell(handle: Handle) -> None:
            if not only_end or handle.has_ended:
                loop.call_soon_threadsafe(news.set)

        self._stream.handle.on_news = tell
        return self._stream

    async def _wait(self, stream: Stream) -> None:
        try:
            await self._news.wait()
        except BaseException:  # the task was cancelled
            stream.end_soon()
            raise
        self._news.clear()

    @property
    def completion(self) -> Completion:
        """See Stream.completion. Raises OptionError before the first step."""
        if self._stream is None:
            raise OptionError("the text has not begun: take a chunk first, or use `async with`")
        return self._stream.completion

    async def aclose(self) -> None:
        """End the text, within a round. Twice is fine."""
        if self._stream is not None:
            self._stream.end_soon()

    async def __aenter__(self) -> AsyncStream:
        await self._begun()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
