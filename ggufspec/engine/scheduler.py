"""Composes the passes of the target, for all texts of an engine and of all threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from threading import Event, Lock
from time import perf_counter, sleep
from weakref import WeakKeyDictionary

from ggufspec.decoding.loop import timed
from ggufspec.decoding.types import Ask, Scored
from ggufspec.engine.generation import Generation
from ggufspec.engine.pair import Pair
from ggufspec.engine.text import Completion
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.session import PreparedScore
from ggufspec.llama.threadpool import end_threads

_MOST_WAITED = 0.6  # maximum seconds of a pass with a prompt's piece, beside other texts
# The same without other texts: Ctrl-C waits that long, and if there are several slots, a new text.
_MOST_ALONE, _MOST_BEFORE_NEW = 1.0, 0.5
_FIRST_PIECE = 128  # tokens of a lone prompt's first piece then; as fast per token as 512 on CPUs
# Minimum tokens of a piece. Smaller passes cost more per token: Qwen 1.5B Q4_0 takes 13 ms per
# token in passes of 16, 11 ms in passes of 32. With flash attention on CPUs the minimum is 64:
# after 4,096 tokens, SmolLM2 takes 14 ms per token in passes of 16 or 32, and 6 ms from 64 on
# (without flash attention 5 ms from 32 on).
_LEAST_PIECE, _LEAST_PIECE_FLASH = 32, 64
_N_SAME = 16  # after this many passes of equal sizes, decide again whether to share one
# A thread that has taken a chunk usually asks for the next one at once. Until then its text may be
# advanced in this many passes of others, and its slot is kept for this many seconds.
_MOST_AHEAD, _SECONDS_AWAY = 2, 0.1
# A waiting thread looks again after this many seconds, and one without a slot, when no text can be
# advanced: usually it is woken before.
_SECONDS_ASLEEP, _SECONDS_BETWEEN = 0.05, 0.002
# Before a pass, the threads that have just taken a chunk have this share of its seconds to return.
_SHARE_AWAITED, _SECONDS_DOZING = 0.05, 0.0001
# A prompt that is k tokens shorter goes first if it arrives less than k times this many seconds
# later. A large model on a CPU takes about this long for a token.
_SECONDS_OVERTAKEN = 0.03

Failures = list[tuple[Generation, Exception]]
Asks = list[tuple[Generation, Ask]]


@dataclass
class _Wanted:
    """A generation, and when a thread last asked for it (`asked_at`)."""

    is_waiting: bool = True
    to_end: bool = False  # it waits for the end of the text, not for the next chunk
    n_ahead: int = 0  # passes that advanced it since `asked_at`
    asked_at: float = field(default_factory=perf_counter)
    woken: Event = field(default_factory=Event)


class Scheduler:
    """Advances generations of one pair together, with a common pass where that is faster.

    Several threads may use it, each for its own generations: the thread that holds the lock of the
    pair advances those of the others, too.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        # Weak: a generation that is dropped without `close` does not keep its slot.
        self._wanted: WeakKeyDictionary[Generation, _Wanted] = WeakKeyDictionary()
        self._guard = Lock()  # of `_wanted`, which waiting threads change without the pair's lock
        self._is_computing = False  # in a pass; Ctrl-C can leave it True: test the lock too
        self._patience, self._advanced_at = 0.0, -inf
        has_flash = pair.target.options.flash_attention != "off"
        self._n_least = _LEAST_PIECE_FLASH if has_flash else _LEAST_PIECE
        # Maximum prompt tokens of a pass, beside other texts and alone.
        self._n_piece, self._n_alone = self._n_least, pair.target.n_batch
        self._most_alone = _MOST_ALONE
        if pair.n_slots > 1:
            self._n_alone, self._most_alone = min(_FIRST_PIECE, self._n_alone), _MOST_BEFORE_NEW
        # The last decision: whether one pass over parts of these sizes is faster.
        self._sizes: Sequence[int] = ()
        self._was_faster, self._n_same = False, 0

    def step(self, generations: Sequence[Generation]) -> Failures:
        """Run a round of each generation in progress, and process pieces of prompts.

        Adds chunks to the generations. Returns the failed ones with their errors.
        """
        with self._pair.lock.held():
            self._advance([*generations, *self._others(generations)])
        self._wake(1)
        errors = ((each, _taken_error(each)) for each in generations)
        return [(each, error) for each, error in errors if error is not None]

    def advance(self, generation: Generation, *, to_end: bool = False) -> None:
        """Advance one generation until it has a chunk, or `to_end`. Raises its error.

        The generations of other threads that wait in this method, or were in it just before, are
        advanced in the same pass.
        """
        if not generation.is_over:
            self._wait_for(generation, to_end)
        if generation.is_over and generation.finish_reason is None:
            with self._pair.lock.held():
                pass  # the thread that ended it has set its error by now
        if (error := _taken_error(generation)) is not None:
            raise error

    def _wait_for(self, generation: Generation, to_end: bool) -> None:
        with self._guard:
            wanted = self._wanted.setdefault(generation, _Wanted())
        wanted.is_waiting, wanted.n_ahead, wanted.asked_at = True, 0, perf_counter()
        wanted.to_end = to_end
        lock, has_computed = self._pair.lock.held(), False
        try:
            while not self._has_news(generation, wanted):
                wanted.woken.clear()
                if self._is_computing and lock.locked():  # that thread wakes this one afterwards
                    wanted.woken.wait(_SECONDS_ASLEEP)
                    continue
                is_alone = len(self._wanted) == 1
                if not is_alone:
                    self._await_others()
                with lock:
                    if self._has_news(generation, wanted):
                        break
                    others = () if is_alone else self._others([generation])
                    has_computed = self._advance([generation, *others])
                self._wake(1)
                if not has_computed:
                    wanted.woken.wait(_SECONDS_BETWEEN)
        finally:
            wanted.is_waiting, wanted.asked_at = False, perf_counter()
            if has_computed:
                self._wake(0)
                if len(self._wanted) > 1 or generation.is_over:
                    end_threads()

    def _await_others(self) -> None:
        """Sleep until the threads that have just left with a chunk are back, if that is soon.

        What they do in Python beside a pass would take a processor from it.
        """
        until = perf_counter() + self._patience
        while any(
            not (wanted.is_waiting or text.is_over) and until - wanted.asked_at < 2 * self._patience
            for text, wanted in self._listed()
        ):
            sleep(_SECONDS_DOZING)
            if perf_counter() > until:
                return

    def _has_news(self, generation: Generation, wanted: _Wanted) -> bool:
        has_chunk = not wanted.to_end and bool(generation.chunks)
        return has_chunk or generation.is_over

    def _wake(self, n_computing: int) -> None:
        """Wake threads whose texts have chunks, and if none is computing, one to do so."""
        if len(self._wanted) < 2:
            return
        for generation, wanted in self._listed():
            if not wanted.is_waiting:
                continue
            if (has_news := self._has_news(generation, wanted)) or not n_computing:
                wanted.woken.set()
                n_computing += not has_news
        sleep(0)  # lets a thread that waits for the lock have it, such as one that closes a text

    def _listed(self) -> list[tuple[Generation, _Wanted]]:
        with self._guard:
            return list(self._wanted.items())

    def _others(self, mine: Sequence[Generation]) -> list[Generation]:
        """What other threads wait for, or have asked for just before."""
        found: list[Generation] = []
        for generation, wanted in self._listed():
            if generation.is_over:
                with self._guard:
                    del self._wanted[generation]
            elif generation not in mine:
                wanted.n_ahead += not wanted.is_waiting
                if wanted.n_ahead <= _MOST_AHEAD:
                    found.append(generation)
        return found

    def _advance(self, generations: Sequence[Generation]) -> bool:
        """Advance what can be advanced; false if all generations wait for a slot."""
        self._is_computing, start = True, perf_counter()
        alive = [each for each in dict.fromkeys(generations) if not each.is_over]
        self._pair.keep_threads(bool([each for each in alive if each.repeats]))
        for generation, scored in self._scored(self._asks(alive)):
            self._pair.use_costs()
            try:
                generation.answer(scored)
            except Exception as error:  # the other generations go on
                generation.error = error
        now = perf_counter()
        self._is_computing, self._patience = False, _SHARE_AWAITED * (now - start)
        has_advanced = len([1 for each in alive if each.has_begun]) > 0
        if has_advanced:
            self._advanced_at = now
        return has_advanced

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
            end_threads()

    def _asks(self, alive: Sequence[Generation]) -> Asks:
        """The Asks of the next pass: rounds of texts, and pieces of prompts beside them."""
        target, asks = self._pair.target, Asks()
        writing = [each for each in alive if not each.is_reading]
        reading = sorted([each for each in alive if each.is_reading], key=_turn)
        n_most = target.n_batch - target.n_rows * len(alive)
        n_most = max(min(n_most, self._n_piece if writing else self._n_alone), self._n_least)
        # A list, not a generator: closing an unfinished generator can lose Ctrl-C.
        for generation in [*writing, *reading]:
            if is_reading := generation.is_reading:
                # Two generations in one slot would process their texts again at each round: one
                # without a slot waits until one is free.
                if n_most <= 0:
                    break
                if not (generation.has_begun or self._has_free_slot() or self._is_first(alive)):
                    continue
            try:
                n_sharers = len(alive if is_reading else writing)
                ask = generation.ask(n_sharers, n_most)
            except Exception as error:
                generation.error = error
                continue
            if ask is not None:
                asks.append((generation, ask))
                n_most -= ask.n_read
                if is_reading and ask.wants_rows:  # its prompt ends in this pass
                    n_most = min(n_most, self._n_piece)
        return asks

    def _has_free_slot(self) -> bool:
        return min(slot.n_users for slot in self._pair.slots) == 0

    def _is_first(self, alive: Sequence[Generation]) -> bool:
        """Whether no text has a slot among `alive`, nor one that was advanced just before."""
        if perf_counter() - self._advanced_at < _SECONDS_AWAY:
            return False
        return not [each for each in alive if each.has_begun]

    def _scored(self, asks: Asks) -> Iterator[tuple[Generation, Scored]]:
        """Yields the answers; each is valid until the next one is taken."""
        together = self._prepared(asks)
        sizes = [len(part.tokens) for part in together]
        start = perf_counter()
        if self._is_faster(sizes) and self._decode(together):
            seconds, first = perf_counter() - start, 0
            for (generation, ask), part in zip(asks, together, strict=True):
                wanted = PreparedScore(part.tokens, part.n_rows)
                rows = generation.session.rows_of(wanted, first) if ask.wants_rows else None
                yield generation, Scored(rows, seconds, len(asks))
                first += len(part.tokens)
            reads = [ask.n_read > 0 for _, ask in asks]
            if not any(reads):
                # The caller has verified each text between the yields: that is part of the cost.
                self._pair.profile.costs.observe_target(first, perf_counter() - start)
            elif not all(reads):
                n_read = sum(ask.n_read for _, ask in asks)
                self._n_piece = self._resized(self._n_piece, n_read, seconds, _MOST_WAITED)
            return
        for generation, ask in asks:
            try:
                scored = self._alone(generation, ask)
            except Exception as error:
                generation.end()
                generation.error = error
            else:
                n, seconds = ask.n_read, scored.seconds
                if n and len(asks) > 1:
                    self._n_piece = self._resized(self._n_piece, n, seconds, _MOST_WAITED)
                elif n:
                    self._n_alone = self._resized(self._n_alone, n, seconds, self._most_alone)
                yield generation, scored

    def _alone(self, generation: Generation, ask: Ask) -> Scored:
        """Answer an Ask with a pass of its own."""
        session, beside = generation.session, generation.reading.beside
        if ask.wants_rows:
            return timed(session, ask)
        start = perf_counter()
        if beside is None:
            session.feed(ask.tokens)
        else:
            piece = [BatchPart(session.sequence, ask.tokens[-ask.n_read :], 0)]
            of_draft = [BatchPart(beside.sequence, beside.tokens, 0)]
            try:
                self._pair.target.decode_beside(piece, beside.context, of_draft)
            except DecodeError:
                if session.n_common(ask.tokens) < len(ask.tokens):
                    raise
                generation.reading.beside = None  # the draft failed: see Reading
        return Scored(None, perf_counter() - start)

    def _resized(self, n_piece: int, n_read: int, seconds: float, most: float) -> int:
        """The size of the next piece of a prompt, after one of `n_read` tokens."""
        if seconds > most:
            return max(min(n_piece, n_read) // 2, self._n_least)
        if 2 * seconds < most and n_read >= n_piece:
            return min(2 * n_piece, self._pair.target.n_batch)
        return n_piece

    def _prepared(self, asks: Asks) -> Sequence[BatchPart]:
        """The parts of one pass for all Asks; empty if they cannot share a pass."""
        target = self._pair.target
        if len(asks) < 2 or not target.can_share_passes:
            return ()
        if len({each.session.sequence for each, _ in asks}) < len(asks):
            return ()  # more generations than slots
        try:
            parts = [
                BatchPart(generation.session.sequence, *generation.session.prepare(*ask[:4]))
                for generation, ask in asks
            ]
        except (DecodeError, ClosedError):
            return ()  # separate passes then show which one fails
        return parts if sum(part.n_rows for part in parts) <= target.n_outputs else ()

    def _is_faster(self, sizes: Sequence[int]) -> bool:
        if not 0 < sum(sizes) <= self._pair.target.n_batch:
            return False
        if sizes == self._sizes and self._n_same < _N_SAME:
            self._n_same += 1
            return self._was_faster
        curve = self._pair.profile.costs.curve  # read once: it is a copy
        cost = [curve[min(size, len(curve)) - 1] for size in (sum(sizes), *sizes)]
        # Beyond the measured sizes, an extra prompt token is cheap.
        self._was_faster = max(sizes) > len(curve) or cost[0] < sum(cost[1:])
        self._sizes, self._n_same = sizes, 0
        return self._was_faster

    def _decode(self, parts: Sequence[BatchPart]) -> bool:
        """Decode all parts in one pass. False: it failed, so each part needs its own pass."""
        try:
            self._pair.target.decode_together(parts)
        except DecodeError:
            return False
        return True


def _taken_error(generation: Generation) -> Exception | None:
    """The error of a failed generation; None from the second time on."""
    error, generation.error = generation.error, None
    return error


def _turn(generation: Generation) -> float:
    """Sort key of prompts: arrival plus a delay by length, so shorter ones may go first."""
    return generation.arrived_at + _SECONDS_OVERTAKEN * generation.n_prompt
