"""A submitted text, as its consumer and the engine's thread see it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from weakref import ref

from ggufspec.common.failures import log_failure
from ggufspec.decoding.stats import summarize
from ggufspec.engine.generation import Generation
from ggufspec.engine.pair import Pair
from ggufspec.engine.prepared import PreparedText
from ggufspec.engine.text import Chunk, Completion

# Windows does not interrupt a thread that waits.
_SECONDS_WAITED = 0.05 if sys.platform == "win32" else -1


class Signal:
    """Wakes one of the threads that wait for it, which Ctrl-C may interrupt at any moment.

    An interrupted threading.Event could keep its lock, which code in Python takes: `set` would then
    wait forever.
    """

    def __init__(self) -> None:
        self._unset = Lock()
        self._unset.acquire()

    def set(self) -> None:
        """End the present or the next `wait`."""
        with suppress(RuntimeError):  # it is set
            self._unset.release()

    def wait(self) -> None:
        while not self._unset.acquire(timeout=_SECONDS_WAITED):
            pass


class Handle:
    """A text that waits for a slot, is under way, or has ended.

    The engine's thread calls `begin`, `tell` and `end`, and within these `on_news`, with the
    handle: when chunks were added, and at the end of the text. It must not wait.
    """

    def __init__(
        self,
        text: PreparedText,
        *,
        group: object = None,
        on_news: Callable[[Handle], object] | None = None,
    ) -> None:
        """`group`: the texts of one request have the same; None: it is alone."""
        self.text = text
        self.group = group
        self.on_news = on_news
        self.generation: Generation | None = None  # None: it has not begun
        self.is_cancelled = False
        self.owner: ref[object] | None = None  # once it is dropped, the text is unwanted
        self.told_at = 0.0  # when the consumer was last woken, by `perf_counter`
        self.error: BaseException | None = None  # why it ended early
        self.has_ended = False

    @property
    def is_unwanted(self) -> bool:
        """Whether it was cancelled, or its owner was dropped."""
        return self.is_cancelled or (self.owner is not None and self.owner() is None)

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is not read yet."""
        return self.generation is not None and self.generation.is_reading

    @property
    def has_news(self) -> bool:
        """Whether there are chunks that were not taken."""
        return self.generation is not None and bool(self.generation.chunks)

    def begin(self, pair: Pair) -> None:
        """Take a slot. Raises what Generation raises."""
        self.generation = Generation(pair, self.text)

    def tell(self) -> None:
        if self.on_news is not None:
            try:
                self.on_news(self)
            except Exception as error:  # such as that of a closed event loop
                log_failure("the consumer of a text was not notified", error)

    def end(self, error: BaseException | None) -> None:
        """No more chunks follow. The error of an unwanted text is dropped."""
        self.error = None if self.is_unwanted else error
        self.has_ended = True
        self.tell()

    def take(self) -> Chunk | None:
        """The next chunk; None: there is none yet, or none any more."""
        chunks = self.generation.chunks if self.generation is not None else None
        return chunks.popleft() if chunks else None

    def take_error(self) -> BaseException | None:
        """The error; None from the second time on."""
        error, self.error = self.error, None
        return error

    @property
    def completion(self) -> Completion:
        """Text, tokens and statistics so far; the time in llama_decode once it has ended."""
        if self.generation is not None:
            return self.generation.completion
        return Completion("", (), None, summarize((), n_prompt=len(self.text.tokens)))
