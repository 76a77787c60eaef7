"""Composes the passes of the target: for all texts of an engine, whichever threads they are of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter, sleep
from weakref import WeakKeyDictionary

from ggufspec.decoding.loop import timed
from ggufspec.decoding.types import Ask, Scored
from ggufspec.engine.completion import Completion
from ggufspec.engine.generation import Generation
from ggufspec.engine.pair import Pair
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.context import BatchPart
from ggufspec.llama.session import PreparedScore

_FIRST_PIECE = 32  # prompt tokens for which other generations wait
_MOST_WAITED = 0.8  # seconds; a piece is made to take about half of that
_LEAST_PIECE = 32  # fewer take longer for each token: 16 of Qwen 1.5B Q4_0 13 ms, 32 11 ms
_N_SAME = 16  # passes of the same sizes for which a decision holds
# A thread that has taken a chunk usually asks for the next one at once: until then its text may
# have so many passes beside those of others, and no other text begins in its slot for so many
# seconds.
_MOST_AHEAD, _SECONDS_AWAY = 2, 0.1
_SECONDS_BETWEEN = 0.002  # until a thread without a slot tries again
# A thread that has computed a pass for others sleeps until they have taken their chunks, for so
# many seconds at most: it would have the lock again before they wake.
_SECONDS_GIVEN, _SECONDS_ASLEEP = 0.005, 0.0001
# For each token of a prompt, the time within which a later, shorter prompt is processed first:
# about what a large model takes for a token on a CPU.
_SECONDS_OVERTAKEN = 0.03

Failures = list[tuple[Generation, Exception]]
Prepared = list[tuple[Generation, PreparedScore]]  # by LlamaSession.prepare


@dataclass
class _Wanted:
    """A generation that a thread waits for, or did when it `asked_at` last."""

    is_waiting: bool = True
    n_ahead: int = 0  # passes since then
    asked_at: float = field(default_factory=perf_counter)


class Scheduler:
    """Advances generations of one pair together, with a common pass where that is faster.

    Several threads may use it, each for its own generations: the thread that holds the lock of the
    pair advances those of the others, too.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        # Of threads. Weak: a generation that is dropped without `close` does not keep its slot.
        self._wanted: WeakKeyDictionary[Generation, _Wanted] = WeakKeyDictionary()
        self._failed: WeakKeyDictionary[Generation, Exception] = WeakKeyDictionary()
        self._n_piece = _FIRST_PIECE
        # The last decision: whether one pass over parts of these sizes is faster.
        self._sizes: Sequence[int] = ()
        self._was_faster, self._n_same = False, 0

    def step(self, generations: Sequence[Generation]) -> Failures:
        """Run a round of each generation in progress, and process pieces of prompts.

        The text is added to their `chunks`. Returns those that failed, and why; the others go on.
        """
        with self._pair.lock.held():
            self._advance(generations)
        failed = [each for each in generations if each in self._failed] if self._failed else []
        return [(each, self._failed.pop(each)) for each in failed]

    def advance(self, generation: Generation) -> None:
        """The same of one generation, unless another thread has done it. Raises its error.

        The generations of other threads that wait in this method, or were in it just before, are
        advanced in the same pass.
        """
        if not generation.is_over:
            self._wait_for(generation)
        if (error := self._failed.pop(generation, None)) is not None:
            raise error

    def _wait_for(self, generation: Generation) -> None:
        wanted = self._wanted[generation] = _Wanted()
        try:
            with self._pair.lock.held():
                others = self._others(generation)
                is_needed = not (generation.chunks or generation.is_over)
                has_computed = not is_needed or self._advance([generation, *others])
            until = perf_counter() + _SECONDS_GIVEN
            while self._are_waiting(others) and perf_counter() < until:
                sleep(_SECONDS_ASLEEP)
            if not has_computed:
                sleep(_SECONDS_BETWEEN)
        finally:
            wanted.is_waiting, wanted.asked_at = False, perf_counter()

    def _are_waiting(self, others: Sequence[Generation]) -> bool:
        """Whether threads wait for some that have chunks by now."""
        with_chunks = [self._wanted.get(each) for each in others if each.chunks]
        return len([1 for each in with_chunks if each is not None and each.is_waiting]) > 0

    def _others(self, mine: Generation) -> list[Generation]:
        found: list[Generation] = []
        for generation, wanted in list(self._wanted.items()) if len(self._wanted) > 1 else ():
            if generation.is_over:
                del self._wanted[generation]
            elif generation is not mine and not (generation.is_reading and generation.reads_alone):
                wanted.n_ahead += not wanted.is_waiting
                if wanted.n_ahead <= _MOST_AHEAD:
                    found.append(generation)
        return found

    def _advance(self, generations: Sequence[Generation]) -> bool:
        """Whether one could be advanced: not where all wait for a slot."""
        alive = [each for each in dict.fromkeys(generations) if not each.is_over]
        pieces = self._read(alive)
        asking = [each for each in alive if not (each.is_reading or each.is_over)]
        asks: list[tuple[Generation, Ask]] = []
        for generation in asking:
            try:
                ask = generation.ask(len(asking))
            except Exception as error:
                self._failed[generation] = error
            else:
                if ask is not None:
                    asks.append((generation, ask))
        for generation, scored in self._scored(asks, pieces):
            try:
                generation.answer(scored)
            except Exception as error:  # only of this generation
                self._failed[generation] = error
        return len([1 for each in alive if each.has_begun]) > 0

    def write_all(self, generations: Iterable[Generation]) -> list[Completion]:
        """Write generations to their ends, as many at once as there are slots.

        Each is taken from the iterable when its turn comes, so that it begins with what was learned
        from those before it. Raises the error of the first that fails.
        """
        left, writing = enumerate(generations), dict[Generation, int]()
        written: dict[int, Completion] = {}
        try:
            while True:
                for i, generation in islice(left, self._pair.n_slots - len(writing)):
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

    def _read(self, alive: Sequence[Generation]) -> Prepared:
        """Begin to read prompts. Returns the pieces that are left to a shared pass."""
        pieces: Prepared = []
        target = self._pair.target
        # No generator that is left in its middle, at whose end Ctrl-C would be lost.
        reading = sorted([each for each in alive if each.is_reading], key=_turn)
        is_writing = len(reading) < len(alive)
        n_most = target.n_batch - target.n_rows * len(alive)
        n_free = max(min(self._n_piece, n_most) if is_writing else n_most, _LEAST_PIECE)
        for generation in reading:
            # Two generations in one slot would process their texts again at each round: one
            # without a slot waits until one is free.
            if n_free <= 0:
                break
            if not (generation.has_begun or self._has_free_slot() or self._is_first(alive)):
                continue
            generation.set_n_sharers(len(alive))
            try:
                unread = generation.unread()
                piece = self._piece(generation, unread, n_free, is_writing, len(alive) == 1)
            except Exception as error:
                self._failed[generation] = error
                continue
            if piece:
                pieces.append((generation, PreparedScore(piece, 0)))
            n_free -= len(piece) or len(unread)
            if not (generation.is_reading or is_writing):  # it writes in this pass
                is_writing, n_free = True, min(n_free, self._n_piece)
        return pieces

    def _has_free_slot(self) -> bool:
        return min(slot.n_users for slot in self._pair.slots) == 0

    def _is_first(self, alive: Sequence[Generation]) -> bool:
        """Whether no text of these, or of a thread that asked just before, has a slot."""
        since = perf_counter() - _SECONDS_AWAY
        here = [each for each, of in list(self._wanted.items()) if of.asked_at > since]
        return not [each for each in (*alive, *here) if each.has_begun and not each.is_over]

    def _piece(
        self,
        generation: Generation,
        unread: Sequence[int],
        n_most: int,
        is_writing: bool,
        is_alone: bool,
    ) -> Sequence[int]:
        """A piece of a prompt for a shared pass; none, if it was read, or is left to `ask`."""
        if self._pair.target.can_share_passes and not generation.reads_alone:
            if len(unread) < n_most and not generation.draft_reads_ahead:
                generation.leave_unread(len(unread))
                return ()
            if unread:
                return unread[:n_most]
        start = perf_counter()
        generation.read(None if is_alone else n_most)
        if is_writing:
            self._observe_piece(perf_counter() - start)
        return ()

    def _scored(
        self, asks: Sequence[tuple[Generation, Ask]], pieces: Prepared
    ) -> Iterator[tuple[Generation, Scored]]:
        """The answers; each is valid until the next is asked for."""
        texts = self._prepared(asks, pieces)
        together = [] if texts is None else [*texts, *pieces]
        sizes = [len(wanted.tokens) for _, wanted in together]
        start = perf_counter()
        if self._is_faster(sizes) and self._decode(together):
            seconds, first = perf_counter() - start, 0
            for generation, wanted in texts or ():
                rows = generation.session.rows_of(wanted, first)
                yield generation, Scored(rows, seconds, len(together))
                first += len(wanted.tokens)
            writes = [len(wanted.tokens) == wanted.n_rows for _, wanted in together]
            if all(writes):
                # The caller has verified each text between the yields: that is part of the cost.
                self._pair.profile.costs.observe_target(first, perf_counter() - start)
            elif any(writes):
                self._observe_piece(seconds)
            return
        for generation, wanted in pieces:
            start = perf_counter()
            try:
                generation.read(len(wanted.tokens))
            except Exception as error:
                self._failed[generation] = error
            if asks:
                self._observe_piece(perf_counter() - start)
        for generation, ask in asks:
            try:
                scored = timed(generation.session, ask)
            except Exception as error:
                generation.end()
                self._failed[generation] = error
            else:
                yield generation, scored

    def _observe_piece(self, seconds: float) -> None:
        """Choose the size of pieces by the time for which other texts waited for the last one."""
        if seconds > _MOST_WAITED:
            self._n_piece = max(self._n_piece // 2, _LEAST_PIECE)
        elif seconds < _MOST_WAITED / 4:
            self._n_piece = min(2 * self._n_piece, self._pair.target.n_batch)

    def _prepared(
        self, asks: Sequence[tuple[Generation, Ask]], pieces: Prepared
    ) -> Prepared | None:
        """What the texts need of a pass with the pieces; None if they cannot have one together."""
        generations = [each for each, _ in (*asks, *pieces)]
        if len(generations) < 2 or not self._pair.target.can_share_passes:
            return None
        if len({each.session.sequence for each in generations}) < len(generations):
            return None  # more generations than slots
        try:
            return [(generation, generation.session.prepare(*ask)) for generation, ask in asks]
        except (DecodeError, ClosedError):
            return None  # the one that fails is found when each has a pass of its own

    def _is_faster(self, sizes: Sequence[int]) -> bool:
        if not 0 < sum(sizes) <= self._pair.target.n_batch:
            return False
        if sizes == self._sizes and self._n_same < _N_SAME:
            self._n_same += 1
            return self._was_faster
        curve = self._pair.profile.costs.curve  # interpolated anew after each pass: 0.1 ms
        cost = [curve[min(size, len(curve)) - 1] for size in (sum(sizes), *sizes)]
        # Of a piece of a prompt that is longer than the curve, a token more costs little.
        self._was_faster = max(sizes) > len(curve) or cost[0] < sum(cost[1:])
        self._sizes, self._n_same = sizes, 0
        return self._was_faster

    def _decode(self, together: Prepared) -> bool:
        """Whether the pass over all succeeded; if not, each has a pass of its own."""
        parts = [BatchPart(generation.session.sequence, *wanted) for generation, wanted in together]
        try:
            self._pair.target.decode_together(parts)
        except DecodeError:
            return False
        return True


def _turn(generation: Generation) -> float:
    """When its prompt is processed, relative to others: short ones that came later go first."""
    return generation.arrived_at + _SECONDS_OVERTAKEN * generation.n_prompt
