"""Advances several generations at once, with common passes of the target where that is faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

from ggufspec.decoding.loop import timed
from ggufspec.decoding.types import Ask, Scored
from ggufspec.engine.generation import Completion, Generation
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.context import BatchPart
from ggufspec.llama.session import PreparedScore

if TYPE_CHECKING:
    from ggufspec.engine.engine import Engine

_FIRST_PIECE = 32  # prompt tokens for which other generations wait
_MOST_WAITED = 0.2  # seconds; a piece is made to take about half of that
_LEAST_PIECE = 16

Failures = list[tuple[Generation, Exception]]
Prepared = list[tuple[Generation, PreparedScore]]  # by LlamaSession.prepare


class Scheduler:
    """Advances generations of one engine together. Used from one thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._n_piece = _FIRST_PIECE

    def step(self, generations: Sequence[Generation]) -> Failures:
        """Run a round of each generation in progress, and process a piece of one prompt.

        The text is added to their `chunks`. Returns those that failed, and why; the others go on.
        """
        failed: Failures = []
        with self._engine.lock.held():
            alive = [each for each in dict.fromkeys(generations) if not each.is_over]
            writing = [each for each in alive if not each.is_reading]
            together = [*self._read(alive, writing, failed), *writing]
            asks: list[tuple[Generation, Ask]] = []
            for generation in together:
                try:
                    ask = generation.ask(len(together))
                except Exception as error:
                    failed.append((generation, error))
                else:
                    if ask is not None:
                        asks.append((generation, ask))
            for generation, scored in self._scored(asks, failed):
                try:
                    generation.answer(scored)
                except Exception as error:  # only of this generation
                    failed.append((generation, error))
        return failed

    def write_all(self, generations: Iterable[Generation]) -> list[Completion]:
        """Write generations to their ends, as many at once as there are slots.

        Each is taken from the iterable when its turn comes, so that it begins with what was learned
        from those before it. Raises the error of the first that fails.
        """
        left, writing = enumerate(generations), dict[Generation, int]()
        written: dict[int, Completion] = {}
        try:
            while True:
                for i, generation in islice(left, self._engine.n_slots - len(writing)):
                    writing[generation] = i
                if not writing:
                    return [written[i] for i in sorted(written)]
                for _, error in self.step(list(writing)):
                    raise error
                for generation in [each for each in writing if each.is_over]:
                    written[writing.pop(generation)] = generation.completion
        finally:
            for generation in writing:
                generation.close()

    def _read(
        self, alive: Sequence[Generation], writing: Sequence[Generation], failed: Failures
    ) -> Sequence[Generation]:
        """A piece of the first prompt that is being read; its generation, if that was the last."""
        # Two generations in one slot would process their texts again at each round: one without a
        # slot waits until one is free.
        waits = bool(writing) and all(slot.n_users for slot in self._engine.slots)
        reads = (each for each in alive if each.is_reading and (each.has_begun or not waits))
        if (generation := next(reads, None)) is None:
            return ()
        start = perf_counter()
        try:
            generation.read(self._n_piece if writing else None)
        except Exception as error:
            failed.append((generation, error))
            return ()
        if not generation.is_reading:
            return (generation,)
        seconds = perf_counter() - start
        if writing and seconds > _MOST_WAITED:
            self._n_piece = max(self._n_piece // 2, _LEAST_PIECE)
        elif writing and seconds < _MOST_WAITED / 4:
            self._n_piece = min(2 * self._n_piece, self._engine.target.n_batch)
        return ()

    def _scored(
        self, asks: Sequence[tuple[Generation, Ask]], failed: Failures
    ) -> Iterator[tuple[Generation, Scored]]:
        """The answers; each is valid until the next is asked for."""
        together = self._prepared(asks)
        sizes = [len(wanted.tokens) for _, wanted in together]
        start = perf_counter()
        if self._is_faster(sizes) and self._decode(together):
            seconds, first = perf_counter() - start, 0
            for (generation, wanted), size in zip(together, sizes, strict=True):
                rows = generation.session.rows_of(wanted, first)
                yield generation, Scored(rows, seconds, len(together))
                first += size
            # The caller has verified each text between the yields: that is part of the cost.
            self._engine.profile.costs.observe_target(first, perf_counter() - start)
            return
        for generation, ask in asks:
            try:
                scored = timed(generation.session, ask)
            except Exception as error:
                generation.end()
                failed.append((generation, error))
            else:
                yield generation, scored

    def _prepared(self, asks: Sequence[tuple[Generation, Ask]]) -> Prepared:
        """What the generations need of one pass; none where they cannot have one together."""
        if len(asks) < 2 or not self._engine.target.can_share_passes:
            return []
        sequences = {generation.session.sequence for generation, _ in asks}
        if len(sequences) < len(asks):
            return []  # more generations than slots
        try:
            return [(generation, generation.session.prepare(*ask)) for generation, ask in asks]
        except (DecodeError, ClosedError):
            return []  # the one that fails is found when each has a pass of its own

    def _is_faster(self, sizes: Sequence[int]) -> bool:
        if not 0 < sum(sizes) <= self._engine.target.n_batch:
            return False
        curve = self._engine.profile.costs.curve
        cost = [curve[min(size, len(curve)) - 1] for size in (sum(sizes), *sizes)]
        return cost[0] < sum(cost[1:])

    def _decode(self, together: Prepared) -> bool:
        """Whether the pass over all succeeded; if not, each has a pass of its own."""
        parts = [BatchPart(generation.session.sequence, *wanted) for generation, wanted in together]
        try:
            self._engine.target.decode_together(parts)
        except DecodeError:
            return False
        return True
