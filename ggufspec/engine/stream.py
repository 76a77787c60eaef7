"""Iterates over the chunks of one generation, as they are written."""

from __future__ import annotations

from collections.abc import Iterator

from ggufspec.decoding.types import Round
from ggufspec.engine.generation import Generation
from ggufspec.engine.scheduler import Scheduler
from ggufspec.engine.text import Chunk, Completion, FinishReason


class Stream(Iterator[Chunk]):
    """The chunks of one generation. At any time, `completion` is the text so far.

    As a context manager, it gives its slot back at the end of the block.
    """

    def __init__(self, scheduler: Scheduler, generation: Generation) -> None:
        self._scheduler = scheduler
        self._generation = generation
        self._chunks = generation.chunks

    def __next__(self) -> Chunk:
        if not self._chunks:
            self._advance()
        if not self._chunks:
            raise StopIteration
        return self._chunks.popleft()

    def finish(self) -> Completion:
        """Write the text to its end, without its chunks. Raises what `generate` raises."""
        self._advance(to_end=True)
        self._chunks.clear()
        return self.completion

    def _advance(self, *, to_end: bool = False) -> None:
        try:
            self._scheduler.advance(self._generation, to_end=to_end)
        except BaseException:  # such as Ctrl-C
            self._generation.close()
            raise

    @property
    def completion(self) -> Completion:
        """Text, tokens and statistics so far; the time in llama_decode once it has ended."""
        return self._generation.completion

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds so far; their tokens include the end-of-generation token."""
        return tuple(self._generation.rounds)

    @property
    def seed(self) -> int:
        """The seed, also where none was given."""
        return self._generation.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None: it has not, or was closed before."""
        return self._generation.finish_reason

    def close(self) -> None:
        """End the text and give its slot back. Twice is fine.

        Waits for the round that another thread has under way. Raises OptionError in a progress
        callback.
        """
        self._generation.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
