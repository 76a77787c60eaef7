"""Composes the passes of the target, for all texts that an engine writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from ggufspec.decoding.types import Ask, Scored
from ggufspec.engine.generation import Generation
from ggufspec.engine.pair import Pair
from ggufspec.errors import DecodeError
from ggufspec.llama.context_options import OWN
from ggufspec.llama.hidden_states import BatchPart

_MOST_WAITED = 0.6  # maximum seconds of a pass with a prompt's piece, beside other texts
# The same without other texts. If there are several slots, a new text waits that long; a pass on a
# GPU cannot be ended, and Ctrl-C waits for it.
_MOST_ALONE, _MOST_BEFORE_NEW = 1.0, 0.5
_FIRST_PIECE = 128  # tokens of a lone prompt's first piece then; as fast per token as 512 on CPUs
# Minimum tokens of a piece. Smaller passes cost more per token: Qwen 1.5B Q4_0 takes 13 ms per
# token in passes of 16, 11 ms in passes of 32. With llama.cpp's flash attention on CPUs it is 64:
# after 4,096 tokens, SmolLM2 takes 14 ms per token in passes of 16 or 32, and 6 ms from 64 on
# (without flash attention 5 ms from 32 on).
_LEAST_PIECE, _LEAST_PIECE_FLASH = 32, 64
_N_SAME = 16  # after this many passes of equal sizes, decide again whether to share one

Failures = list[tuple[Generation, BaseException]]
Asks = list[tuple[Generation, Ask]]


class Passes:
    """Runs rounds of generations, with a common pass where that is faster.

    For one thread. Errors of one generation end that one only.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        is_theirs = pair.target.options.flash_attention not in ("off", OWN)
        self._n_least = _LEAST_PIECE_FLASH if is_theirs else _LEAST_PIECE
        # Maximum prompt tokens of a pass, beside other texts and alone.
        self._n_piece, self._n_alone = self._n_least, pair.target.n_batch
        self._most_alone = _MOST_ALONE
        if pair.n_slots > 1:
            self._n_alone, self._most_alone = min(_FIRST_PIECE, self._n_alone), _MOST_BEFORE_NEW
        # The last decision: whether one pass over parts of these sizes is faster.
        self._sizes: Sequence[int] = ()
        self._was_faster, self._n_same = False, 0
        self._failures: Failures = []

    def run(self, generations: Sequence[Generation]) -> Failures:
        """Run a round of each generation that is not over, and process pieces of prompts.

        Adds chunks to the generations. Returns the failed ones with their errors; the caller ends
        them.
        """
        alive = [each for each in generations if not each.is_over]
        self._pair.keep_threads(bool([each for each in alive if each.repeats]))
        depth = sum(each.n_tokens for each in alive) // max(len(alive), 1)
        self._pair.use_costs(depth)
        for generation, scored in self._scored(self._asks(alive)):
            self._pair.use_costs(depth)  # a pass may have had fewer threads
            try:
                generation.answer(scored)
            except BaseException as error:  # a Rust panic is not an Exception
                self._failures.append((generation, error))
        failures, self._failures = self._failures, []
        return failures

    def _asks(self, alive: Sequence[Generation]) -> Asks:
        """The Asks of the next pass: rounds of texts, and pieces of prompts beside them."""
        target, asks = self._pair.target, Asks()
        writing = [each for each in alive if not each.is_reading]
        reading = sorted([each for each in alive if each.is_reading], key=lambda each: each.turn)
        n_most = target.n_batch - target.n_rows * len(alive)
        n_most = max(min(n_most, self._n_piece if writing else self._n_alone), self._n_least)
        for generation in [*writing, *reading]:
            if (is_reading := generation.is_reading) and n_most <= 0:
                break
            try:
                n_sharers = len(alive if is_reading else writing)
                ask = generation.ask(n_sharers, n_most)
            except BaseException as error:
                self._failures.append((generation, error))
                continue
            if ask is not None:
                asks.append((generation, ask))
                n_most -= ask.n_read
                if is_reading and ask.wants_rows:  # its prompt ends in this pass
                    n_most = min(n_most, self._n_piece)
        return asks

    def _scored(self, asks: Asks) -> Iterator[tuple[Generation, Scored]]:
        """Yields the answers; each is valid until the next one is taken."""
        together = self._prepared(asks)
        sizes = [len(part.tokens) for part in together]
        start = perf_counter()
        if self._is_faster(sizes) and self._decode(together):
            seconds, first = perf_counter() - start, 0
            for (generation, ask), part in zip(asks, together, strict=True):
                rows = generation.session.rows_of(part, first) if ask.wants_rows else None
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
            except BaseException as error:
                self._failures.append((generation, error))
            else:
                n, seconds = ask.n_read, scored.seconds
                if n and len(asks) > 1:
                    self._n_piece = self._resized(self._n_piece, n, seconds, _MOST_WAITED)
                elif n:
                    self._n_alone = self._resized(self._n_alone, n, seconds, self._most_alone)
                yield generation, scored

    def _alone(self, generation: Generation, ask: Ask) -> Scored:
        session, beside = generation.session, generation.reading.beside
        start = perf_counter()
        if ask.wants_rows:
            logits = session.score(ask.tokens, ask.draft, ask.parents)
            return Scored(logits, perf_counter() - start)
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
        if any(ask.n_read and ask.tokens[-1] < 0 for _, ask in asks):
            return ()  # an image has a pass of its own
        try:
            parts = [generation.session.prepare(*ask[:4]) for generation, ask in asks]
        except BaseException:  # as in `run`
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
