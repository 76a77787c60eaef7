"""When to draft, and what to learn from it: the policy around the rule of each round.

The rule itself, how far to go in a round, is native/pace.h's. Pure: no clocks, no models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ggufspec import _native, defaults
from ggufspec.core import Round
from ggufspec.costs import Costs

_ENDS = ("", "as far as it may go", "unlikely to stand so far", "the draft is unsure of the next")

_N_USUAL = 2  # unread tokens where all was accepted; with more, a draft's first step takes longer
_N_GAPS = 48  # gaps looked back upon: what the next tokens will be like
_N_KINDS = 8  # of them: as many kinds of tokens the rule reckons with
_FIRST_GAPS = (0.1, 0.4, 0.8, 1.3, 2.0, 3.0, 4.5, 7.0)
_N_EARLY = 24  # rounds at first, in which the rule is reckoned after each few
_EVERY_EARLY = 2
_EVERY = 8
_N_SLOW_LESSONS = 16  # lessons until an unknown draft may go as far as it likes
_N_PLAIN = 2  # passes over one token before anything is compared with them
_PLAIN_EVERY = 64  # rounds without one until another is measured, where that matters
_THIN = 1.4  # speed-up below which it matters
_PROBE_SHARE = 0.015  # of all time, at most, for asking what a draft would have said


class Line(NamedTuple):
    """A logistic line: chance = 1 / (1 + exp(-(at_zero + slope * gap))).

    `gap`: between the two largest logits of the draft. `weight`: how many lessons it counts as.
    """

    at_zero: float
    slope: float
    weight: float


class Pace(Protocol):
    """Tells a drafter how far to go; `native` says it token by token."""

    native: _native.Pace

    @property
    def why(self) -> str:
        """Why the round's draft is no longer."""
        ...

    @property
    def expected(self) -> float | None:
        """How many of the tokens that were taken will stand, on average; None: nobody knows."""
        ...

    def begin(self, n_max: int, n_unread: int) -> bool:
        """A round of at most `n_max` drafted tokens starts: is any worth a look?

        `n_unread`: tokens that the draft has not read yet.
        """
        ...

    def probes(self) -> bool:
        """Nothing was worth a look: shall the draft be asked what it would have said?"""
        ...

    def learn(self, n_accepted: int) -> None:
        """So many of the tokens that were taken stood."""
        ...

    def learn_unread(self, gaps: Sequence[float], chances: Sequence[float]) -> None:
        """What a probe found: how sure the draft was, and how likely it would have stood."""
        ...


class Fixed:
    """Always as many as there may be."""

    why = ""
    expected = None

    def __init__(self) -> None:
        self.native = _native.Pace()

    def begin(self, n_max: int, n_unread: int) -> bool:
        self.native.begin(n_max)
        return n_max > 0

    def probes(self) -> bool:
        return False

    def learn(self, n_accepted: int) -> None:
        pass

    def learn_unread(self, gaps: Sequence[float], chances: Sequence[float]) -> None:
        pass


class Chosen:
    """As many as bring the most tokens a second, by what costs and chances are known to be."""

    def __init__(self, costs: Costs, line: Line, n_most: int, *, is_known: bool) -> None:
        """`is_known`: the line was learned with this pair; else the draft has to earn trust."""
        self.costs = costs
        self.native = _native.Pace(*line)
        self._n_most = n_most
        self._gaps: deque[float] = deque(_FIRST_GAPS, _N_GAPS)
        self._limit = n_most if is_known else 1
        self.n_lessons = 0
        self._n_rounds = self._n_until_reckoned = 0
        self._n_since_plain = 0
        self._seconds = self._probe_seconds = 0.0
        # The round under way.
        self._why = ""
        self._n_unread = self._n_read = 0

    @property
    def why(self) -> str:
        return self._why or _ENDS[self.native.end]

    @property
    def expected(self) -> float | None:
        return self.native.expected

    # What a drafter asks.

    def begin(self, n_max: int, n_unread: int) -> bool:
        self._n_unread = n_unread
        if self._n_until_reckoned <= 0:
            self._reckon()
        self.native.begin(min(n_max, self._limit))
        self._why = ""
        if n_max == 0:
            self._why = "the text ends"
        elif self._wants_plain():
            self._why = "plain decoding is measured"
        elif not self.native.pays:
            self._why = "a draft would not pay"
        return not self._why

    def probes(self) -> bool:
        if self.native.pays or self._n_unread < defaults.N_PROBED:
            return False
        seconds = self.costs.step + self._n_unread * self.costs.read
        return self._probe_seconds + seconds <= _PROBE_SHARE * self._seconds

    # What it learns from.

    def learn(self, n_accepted: int) -> None:
        pace = self.native
        n_taken = pace.n_taken
        pace.learn(n_accepted)
        self._gaps.extend(pace.seen)
        if self._limit < self._n_most:
            self.n_lessons += min(n_taken, n_accepted + 1)
            if n_taken and n_accepted >= n_taken:
                self._limit = min(2 * self._limit + 1, self._n_most)
            if self.n_lessons >= _N_SLOW_LESSONS:
                self._limit = self._n_most

    def learn_unread(self, gaps: Sequence[float], chances: Sequence[float]) -> None:
        self._n_read = self._n_unread
        for gap, chance in zip(gaps, chances, strict=True):
            self.native.learn_one(gap, chance)
        self._gaps.extend(gaps)
        self._reckon()

    def clock(self, turn: Round) -> None:
        """A round has ended: what did it cost?"""
        costs = self.costs
        n_looked = self.native.n_looked
        if self._n_read:
            costs.observe_reading(self._n_read, turn.draft_seconds)
            self._probe_seconds += self._n_read * costs.read
            self._n_read = 0
        elif n_looked and self._n_unread <= _N_USUAL:
            costs.observe_draft(n_looked, turn.draft_seconds)
        n_drafted = turn.n_drafted
        costs.observe_target(n_drafted + 1, turn.target_seconds + turn.verify_seconds)
        self._seconds += costs.curve[n_drafted] + n_looked * costs.step
        self._n_since_plain = self._n_since_plain + 1 if n_drafted else 0
        self._n_rounds += 1
        self._n_until_reckoned -= 1

    def _wants_plain(self) -> bool:
        costs = self.costs
        if costs.is_frozen:
            return False
        if costs.n_measured(1) < _N_PLAIN:
            return True
        return self._n_since_plain >= _PLAIN_EVERY and self.native.rate * costs.curve[0] < _THIN

    def _reckon(self) -> None:
        self._n_until_reckoned = _EVERY_EARLY if self._n_rounds < _N_EARLY else _EVERY
        gaps = sorted(self._gaps)
        n = len(gaps)
        kinds = [gaps[(2 * k + 1) * n // (2 * _N_KINDS)] for k in range(_N_KINDS)]
        self.native.reckon(self.costs.curve, self.costs.step, kinds)
