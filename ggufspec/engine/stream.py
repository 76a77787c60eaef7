"""Iterates over the chunks of one text, as the engine's thread writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from ggufspec.decoding.types import Round
from ggufspec.engine.handle import Handle, Signal
from ggufspec.engine.prepared import PreparedText
from ggufspec.engine.scheduler import Scheduler
from ggufspec.engine.text import Chunk, Completion, FinishReason


class Stream(Iterator[Chunk]):
    """The chunks of one text, which is written in the background, as fast as it can be.

    As a context manager, it ends the text at the end of the block; so does dropping it.
    """

    def __init__(self, scheduler: Scheduler, text: PreparedText) -> None:
        """Submit the text. Raises ClosedError; OptionError in a progress callback."""
        self._scheduler = scheduler
        self._news = Signal()
        self.handle = Handle(text, on_news=partial(_set_at_end, self._news))
        scheduler.submit(self.handle, self)

    def __next__(self) -> Chunk:
        if (chunk := self.poll()) is None:
            self.handle.on_news = partial(_set, self._news)
            while (chunk := self.poll()) is None:
                self._wait()
        return chunk

    def poll(self) -> Chunk | None:
        """The next chunk; None: there is none yet. Raises StopIteration, and the text's error."""
        has_ended = self.handle.has_ended  # read first: chunks may be added until then
        if (chunk := self.handle.take()) is not None or not has_ended:
            return chunk
        if (error := self.handle.take_error()) is not None:
            raise error
        raise StopIteration

    def finish(self) -> Completion:
        """Wait for the end of the text, without its chunks. Raises what `generate` raises."""
        self.handle.on_news = partial(_set_at_end, self._news)
        while not self.handle.has_ended:
            self._wait()
        if (error := self.handle.take_error()) is not None:
            raise error
        while self.handle.take() is not None:
            pass
        return self.completion

    def _wait(self) -> None:
        self._scheduler.check_wait()
        try:
            self._news.wait()
        except BaseException:  # such as Ctrl-C
            self.close()
            raise
        if self.handle.has_ended:
            self._news.set()  # for other threads that wait

    @property
    def completion(self) -> Completion:
        """Text, tokens and statistics so far; the time in llama_decode once it has ended.

        The text may be ahead of the chunks that were taken.
        """
        return self.handle.completion

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds so far; their tokens include the end-of-generation token."""
        generation = self.handle.generation
        return () if generation is None else tuple(generation.rounds)

    @property
    def seed(self) -> int:
        """The seed, also where none was given."""
        return self.handle.text.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None: it has not, or was closed before."""
        generation = self.handle.generation
        return None if generation is None else generation.finish_reason

    def end_soon(self) -> None:
        """End the text within a round, without waiting."""
        if not self.handle.has_ended:
            self._scheduler.cancel(self.handle)

    def close(self) -> None:
        """End the text, and wait for the end of its round. Twice is fine.

        The chunks so far can still be taken. Raises OptionError in a progress callback.
        """
        if not self.handle.has_ended:
            self._scheduler.check_wait()
            self.end_soon()
            while not self.handle.has_ended:
                self._news.wait()
            self._news.set()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def write_all(
    scheduler: Scheduler, texts: Iterable[PreparedText], *, n_open: int
) -> list[Completion]:
    """Write texts to their ends. Raises the error of the first that fails.

    At most `n_open` are submitted at a time: each is taken from the iterable, and so prepared, when
    its turn comes, while others are written.
    """
    written: dict[int, Completion] = {}
    opened: dict[int, Handle] = {}
    news = Signal()

    def await_room(n_most: int) -> None:
        while True:
            for i, handle in [each for each in opened.items() if each[1].has_ended]:
                if (error := handle.take_error()) is not None:
                    raise error
                written[i] = handle.completion
                del opened[i]
            if len(opened) <= n_most:
                return
            news.wait()

    try:
        for i, text in enumerate(texts):
            handle = Handle(text, on_news=partial(_set_at_end, news))
            scheduler.submit(handle)
            opened[i] = handle
            await_room(n_open - 1)
        await_room(0)
    finally:
        for handle in opened.values():
            scheduler.cancel(handle)
        while not all(handle.has_ended for handle in opened.values()):
            news.wait()
    return [written[i] for i in sorted(written)]


def _set(news: Signal, handle: Handle) -> None:
    news.set()


def _set_at_end(news: Signal, handle: Handle) -> None:
    if handle.has_ended:
        news.set()
