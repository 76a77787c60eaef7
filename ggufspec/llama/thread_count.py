"""Chooses the number of threads of a context's passes while other programs use the processor.

All threads of a pass wait for each other hundreds of times, so one that another program has put
off its processor delays all of them. Then fewer threads are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf
from time import perf_counter
from typing import NamedTuple

from ggufspec.llama.cpu_use import CpuUse, cpu_use

_MOST_FEW = 32  # tokens; larger passes are pieces of prompts
_MEMORY = 0.1  # seconds of passes after which a pass counts 1 / e
_N_TRIED = 2  # passes with another number before it is kept
_FASTER = 0.95  # share of a pass's present seconds, below which another number is kept
_MOST_UNKNOWN = 8  # passes of a trial that cannot be compared

# Fewer threads are tried once passes have lost as much time as this many undisturbed ones take.
# What they take is not counted as lost up to the first factor: repeated passes differ by less.
_N_LOST, _USUAL, _DISTURBED = 3.0, 1.2, 1.5
_MOST_FAILED = 8  # trials in sequence that are counted
_MOST_PATIENCE = 8  # each trial that has failed doubles the limit up to this factor

_MARGIN = 0.55  # of a processor that others may use while one more thread is used or tried
# Between two readings of what other programs use; a reading tells little after longer times.
_SECONDS_READ, _SECONDS_STALE = 0.1, 1.0
# Between two trials of more threads; a trial that has failed doubles the time up to the second.
_SECONDS_BETWEEN, _MOST_BETWEEN = 0.1, 2.0


class _Passes:
    def __init__(self) -> None:
        self.least: dict[int, float] = {}  # by size
        self._seconds = self._seconds_least = 0.0  # of the latest passes

    @property
    def level(self) -> float:
        """Seconds of the latest passes, over the least seconds of passes of the same sizes."""
        return self._seconds / self._seconds_least if self._seconds_least else 1.0

    def add(self, size: int, seconds: float) -> None:
        least = self.least[size] = min(seconds, self.least.get(size, seconds))
        kept = exp(-least / _MEMORY)
        self._seconds = kept * self._seconds + seconds
        self._seconds_least = kept * self._seconds_least + least

    def expected(self, size: int) -> float | None:
        """Seconds that a pass takes now; None: no pass of this size was measured."""
        least = self.least.get(size)
        return None if least is None else self.level * least

    def forget_level(self) -> None:
        self._seconds = self._seconds_least = 0.0

    def accept_level(self) -> None:
        """Take the latest passes for undisturbed ones, which are slower for long texts."""
        level = self.level
        self.least = {size: level * seconds for size, seconds in self.least.items()}
        self.forget_level()


class _Trial(NamedTuple):
    """Passes that took `seconds`; with `n_before` threads they would have taken `expected`."""

    n_before: int
    n_passes: int = 0
    expected: float = 0.0
    seconds: float = 0.0
    n_unknown: int = 0  # passes of sizes that were not measured with `n_before` threads


class ThreadCount:
    """The number of threads for the next pass, at most `n_most`.

    Passes over few tokens: compares passes of equal sizes with the present number and with another
    one, which is tried for a few passes: fewer threads when passes get slow, more when other
    programs leave processors. Pieces of prompts take too long to try: as many as other programs
    leave processors, or as in passes over few tokens where that is unknown.
    `use` and `clock` are arguments for tests.
    """

    def __init__(
        self,
        n_most: int,
        use: Callable[[], CpuUse] = cpu_use,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.n_most = n_most
        self._n = self._n_of_prompts = n_most
        self._use, self._clock = use, clock
        self._passes = {n_most: _Passes()}
        self._trial: _Trial | None = None
        self._n_failed = 0  # trials since the number was changed
        self._lost = 0.0  # seconds, since the last trial
        self._tried_at = clock()
        self._read = use()
        self._passed_at = -inf  # the end of the last pass
        self.is_usual = True

    def n_for(self, n_tokens: int) -> int:
        if n_tokens <= _MOST_FEW:
            if self._clock() - self._passed_at >= _SECONDS_STALE and self._trial is None:
                self._begin()
            return self._n
        if self._clock() - self._read.at >= _SECONDS_READ:
            n_free = self._n_free()
            self._n_of_prompts = self._n if n_free is None else n_free
        return self._n_of_prompts

    def observe(self, n_tokens: int, seconds: float) -> None:
        """Tell that a pass over `n_tokens` with the threads of `n_for` took this long."""
        self._passed_at = self._clock()
        if n_tokens > _MOST_FEW:
            return
        passes = self._passes[self._n]
        passes.add(n_tokens, seconds)
        if self._trial is not None:
            self._judge(self._trial, n_tokens, seconds)
            return
        least = passes.least[n_tokens]
        self._lost = max(self._lost + seconds - _USUAL * least, 0.0)
        self.is_usual = seconds <= _DISTURBED * least
        patience = min(2**self._n_failed, _MOST_PATIENCE)
        if self._lost > _N_LOST * patience * least and self._n > 1:
            self._try(self._n // 2 if self._n_failed % 2 else self._n - 1)
        elif self._n < self.n_most and (n_more := self._more()) > self._n:
            self._try(n_more)

    def _begin(self) -> None:
        """After a pause, begin with as many threads as have a processor now."""
        n_free = self._n_free()
        if n_free is not None and n_free < self._n:
            self._n, self._n_failed, self._lost = n_free, 0, 0.0
            self._passes.setdefault(n_free, _Passes()).forget_level()

    def _try(self, n: int) -> None:
        self._trial, self._n, self.is_usual = _Trial(self._n), n, False
        self._passes.setdefault(n, _Passes()).forget_level()

    def _judge(self, trial: _Trial, size: int, seconds: float) -> None:
        """Count a pass of a trial, and end the trial when its result is clear."""
        n_before, n_passes, all_expected, all_seconds, n_unknown = trial
        expected = self._passes[n_before].expected(size)
        if expected is None:
            n_unknown += 1
        else:
            n_passes += 1
            all_expected, all_seconds = all_expected + expected, all_seconds + seconds
        is_faster = all_seconds <= _FASTER * all_expected and n_unknown < _MOST_UNKNOWN
        if is_faster and n_passes < _N_TRIED:
            self._trial = _Trial(n_before, n_passes, all_expected, all_seconds, n_unknown)
            return
        self._trial, self._lost, self._tried_at = None, 0.0, self._clock()
        if is_faster:
            self._n_failed, self._read = 0, self._use()
            return
        if self._n < n_before:  # passes are slow for another reason
            self._passes[n_before].accept_level()
        self._n = n_before
        self._n_failed = min(self._n_failed + 1, _MOST_FAILED)

    def _more(self) -> int:
        """The number that processors may be free for; 0: it is not time to try it."""
        now = self._clock()
        if now - self._read.at < _SECONDS_READ:
            return 0
        n_free = self._n_free()
        if now - self._tried_at < min(_SECONDS_BETWEEN * 2**self._n_failed, _MOST_BETWEEN):
            return 0
        if n_free is None:  # unknown
            return self._n + 1 if self._n_failed % 2 else self.n_most
        return n_free

    def _n_free(self) -> int | None:
        """How many threads have had a processor since the last reading; None: unknown."""
        before, self._read = self._read, self._use()
        n_others = self._read.n_others(before)
        is_stale = self._clock() - self._passed_at >= _SECONDS_STALE
        if is_stale and self._read.n_running is not None:
            n_others = self._read.n_running
        if n_others is None:
            return None
        return min(max(int(self._read.n_usable - n_others + _MARGIN), 1), self.n_most)
