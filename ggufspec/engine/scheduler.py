"""Several texts at once: what they ask of the target is one pass, where that is faster.

Weights are read once for all of them. No text depends on the others: each has its own slot, random
numbers and rows of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from time import perf_counter

from ggufspec.decoding.loop import timed
from ggufspec.decoding.types import Ask, Scored
from ggufspec.drafting.cost_model import CostModel
from ggufspec.engine.slots import Slots
from ggufspec.engine.stream import Completion, Stream
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.context import BatchPart, Context
from ggufspec.llama.session import PreparedScore

_FIRST_PIECE = 32  # prompt tokens that others wait for
_MOST_WAITED = 0.2  # seconds, at about half of which such a piece is to stay
_LEAST_PIECE = 16


class Scheduler:
    """The passes of an engine's streams. Each step takes every one of them a round further."""

    def __init__(
        self,
        target: Context,
        costs: Callable[[], CostModel],
        slots: Slots,
        lock: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._target = target
        self._costs = costs
        self._slots = slots
        self._lock = lock
        self._piece = _FIRST_PIECE
        self._seconds = 0.0  # of the last pass

    def step(self, streams: Sequence[Stream]) -> list[tuple[Stream, Exception]]:
        """A round of each stream that writes, and a piece of the prompt of the first that reads.

        Their chunks are then `taken`. Returns those that failed, and why; the others go on.
        """
        failed: list[tuple[Stream, Exception]] = []
        with self._lock():
            alive = [stream for stream in dict.fromkeys(streams) if not stream.is_over]
            writing = [stream for stream in alive if not stream.is_reading]
            asks: list[tuple[Stream, Ask]] = []
            # Where two have one slot, each reads again what the other made it forget: so who has
            # none waits for those who will leave theirs.
            waits = bool(writing) and self._slots.are_taken
            reads = (each for each in alive if each.is_reading and (each.has_begun or not waits))
            reading = next(reads, None)
            if reading is not None:
                asks += self._advanced([reading], failed, others_wait=bool(writing))
            for stream in writing:
                stream.share(len(writing))
            asks += self._advanced(writing, failed)
            for stream, answer in self._answers(asks, failed):
                try:
                    stream.advance(answer)
                except Exception as error:  # it is told to whoever asked for this text
                    failed.append((stream, error))
        return failed

    def _advanced(
        self,
        streams: Sequence[Stream],
        failed: list[tuple[Stream, Exception]],
        *,
        others_wait: bool = False,
    ) -> list[tuple[Stream, Ask]]:
        """What streams ask next, of those that ask. A prompt is read a piece further."""
        asks: list[tuple[Stream, Ask]] = []
        for stream in streams:
            stream.n_piece = self._piece if others_wait else None
            start = perf_counter()
            try:
                ask = stream.advance()
            except Exception as error:
                failed.append((stream, error))
                continue
            if ask is not None:
                asks.append((stream, ask))
            elif others_wait:
                self._pace_reading(perf_counter() - start)
        return asks

    def _pace_reading(self, seconds: float) -> None:
        """A piece took that long: how many tokens should the next one have?"""
        if seconds > _MOST_WAITED:
            self._piece = max(self._piece // 2, _LEAST_PIECE)
        elif seconds < _MOST_WAITED / 4:
            self._piece = min(2 * self._piece, self._target.n_batch)

    def _answers(
        self, asks: Sequence[tuple[Stream, Ask]], failed: list[tuple[Stream, Exception]]
    ) -> Iterator[tuple[Stream, Scored]]:
        """Each is valid until the next is asked for."""
        together = self._prepared(asks)
        sizes = [len(wanted.tokens) for _, wanted in together]
        if self._pays(sizes) and self._decoded(together):
            start = perf_counter() - self._seconds
            first = 0
            for (stream, wanted), size in zip(together, sizes, strict=True):
                rows = stream.session.rows_of(wanted, first)
                yield stream, Scored(rows, self._seconds, len(together))
                first += size
            self._costs().observe_target(first, perf_counter() - start)
            return
        for stream, ask in asks:
            try:
                answer = timed(stream.session.score, ask)
            except Exception as error:
                stream.end()
                failed.append((stream, error))
            else:
                yield stream, answer

    def _prepared(self, asks: Sequence[tuple[Stream, Ask]]) -> list[tuple[Stream, PreparedScore]]:
        """What the streams want of one pass; none where they cannot have one."""
        if len(asks) < 2 or not self._target.can_share_passes:
            return []
        sequences = {stream.session.sequence for stream, _ in asks}
        if len(sequences) < len(asks):
            return []  # more texts than slots
        try:
            return [(stream, stream.session.prepare(*ask)) for stream, ask in asks]
        except (DecodeError, ClosedError):
            return []  # whose it is will show when each is scored alone

    def _pays(self, sizes: Sequence[int]) -> bool:
        """Whether one pass over all is faster than one over each, as far as is known."""
        if not 0 < sum(sizes) <= self._target.n_batch:
            return False
        curve = self._costs().curve
        cost = [curve[min(size, len(curve)) - 1] for size in (sum(sizes), *sizes)]
        return cost[0] < sum(cost[1:])

    def _decoded(self, together: Sequence[tuple[Stream, PreparedScore]]) -> bool:
        parts = [
            BatchPart(stream.session.sequence, wanted.tokens, wanted.n_rows)
            for stream, wanted in together
        ]
        start = perf_counter()
        try:
            self._target.decode_together(parts)
        except DecodeError:
            return False  # likewise
        self._seconds = perf_counter() - start
        return True


def write_all(scheduler: Scheduler, streams: Iterable[Stream], n_at_once: int) -> list[Completion]:
    """Streams to their ends, so many at a time; each is asked for when its turn comes.

    So it knows what those before it have taught. Raises what the first that fails raises.
    """
    left, writing = enumerate(streams), dict[Stream, int]()
    written: dict[int, Completion] = {}
    try:
        while True:
            for i, stream in islice(left, n_at_once - len(writing)):
                writing[stream] = i
            if not writing:
                return [written[i] for i in sorted(written)]
            for _, error in scheduler.step(list(writing)):
                raise error
            for stream in [stream for stream in writing if stream.is_over]:
                written[writing.pop(stream)] = stream.completion
    finally:
        for stream in writing:
            stream.close()
