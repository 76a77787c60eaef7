"""When to draft, and what to learn from it: the policy around the rule of each round.

The rule itself, how far to go in a round, is native/draft_length.h's. Pure: no clocks, no models.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from ggufspec import _native
from ggufspec.common import defaults
from ggufspec.decoding.types import Round
from ggufspec.drafting.cost_model import CostModel

_ENDS = ("", "as far as it may go", "unlikely to stand so far", "the draft is unsure of the next")

_N_USUAL = 2  # unread tokens where all was accepted; with more, a draft's first step takes longer
_N_GAPS = 48  # gaps looked back upon: what the next tokens will be like
_N_KINDS = 8  # of them: as many kinds of tokens the rule reckons with
_HOPELESS = (-math.inf,)
_FIRST_GAPS = (0.1, 0.4, 0.8, 1.3, 2.0, 3.0, 4.5, 7.0)  # of a draft that nobody knows,
_N_OWN_GAPS = 16  # until so many of its own were seen
_N_EARLY = 24  # rounds at first, in which the rule is reckoned after each few
_EVERY_EARLY = 2
_EVERY = 8
_N_PLAIN = 2  # passes over one token before anything is compared with them
_PLAIN_EVERY = 64  # rounds without one until another is measured, where that matters
_THIN = 1.4  # speed-up below which it matters
_FIRST_WEIGHT = 2  # lessons that each token of a first probe counts as: of all, it is the most fair
_BONUS_WEIGHT = 400.0  # of the bonus that a text begins with; a round of three weighs 2 or 3,
_MOST_BONUS = 0.5  # and more than that is nobody's
_PROBE_SHARE = 0.015  # of all time, at most, for asking what a draft would have said
_UNPAID = "a draft would not pay"
_N_UNPAID = 32  # such rounds after which it is told,
_UNPAID_SHARE = 0.8  # if they were that many of all
_RECENT = 0.98  # of what the last rounds weigh, what they weigh after each further one
_CAUTION = 0.95  # of what recent rounds brought: so much is asked of the next


class Line(NamedTuple):
    """A logistic line: chance = 1 / (1 + exp(-(at_zero + slope * gap))).

    `gap`: between the two largest logits of the draft. `weight`: how many lessons it counts as;
    `memory`: lessons after which one has lost most of its weight.
    """

    at_zero: float
    slope: float
    weight: float
    memory: float = 100.0


class Weighed(NamedTuple):
    """A draft that is there already: how many tokens of it to take, and what that gains.

    `gain` compares rounds: tokens - rate * seconds, where it is known what seconds are worth.
    """

    n_draft: int
    gain: float
    expected: float


class LengthPolicy(Protocol):
    """Tells a drafter how far to go; `native` says it token by token."""

    native: _native.LengthRule

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

    def weigh(self, chances: Sequence[float]) -> Weighed:
        """How much to take of a draft that is there already, whose tokens stand with `chances`.

        Each if those before it do.
        """
        ...

    @property
    def prospect(self) -> float:
        """What a round with the draft model gains, as Weighed has it."""
        ...

    def learn(self, n_accepted: int, chances: Iterable[float]) -> None:
        """So many of the tokens that were taken stood.

        `chances`: how likely each token that was looked at would have stood if those before it
        did, in hindsight.
        """
        ...

    def learn_unread(self, gaps: Sequence[float], chances: Sequence[float]) -> None:
        """What a probe found: how sure the draft was, and how likely it would have stood."""
        ...

    def share(self, n_sharers: int) -> None:
        """The next pass is one with those of so many texts in all."""
        ...

    def advice(self) -> str | None:
        """What to change, where a draft of this pair does not pay."""
        ...


_NOTHING = Weighed(0, -1e9, 0.0)


class FixedLength:
    """Always as many as there may be."""

    why = ""
    expected = None

    def __init__(self) -> None:
        self.native = _native.LengthRule()
        self._n_rounds, self._n_accepted = 1, 1  # by the model

    @property
    def prospect(self) -> float:
        return self._n_accepted / self._n_rounds

    def weigh(self, chances: Sequence[float]) -> Weighed:
        return Weighed(*self.native.weigh(chances))

    def begin(self, n_max: int, n_unread: int) -> bool:
        self.native.begin(n_max)
        return n_max > 0

    def probes(self) -> bool:
        return False

    def learn(self, n_accepted: int, chances: Iterable[float]) -> None:
        self._n_rounds += 1
        self._n_accepted += n_accepted

    def learn_unread(self, gaps: Sequence[float], chances: Sequence[float]) -> None:
        pass

    def share(self, n_sharers: int) -> None:
        pass

    def advice(self) -> str | None:
        return None


class AutoLength:
    """As many as bring the most tokens a second, by what costs and chances are known to be."""

    def __init__(
        self,
        costs: CostModel,
        line: Line,
        *,
        is_known: bool,
        has_model: bool = True,
        bonus: float = 0.0,
    ) -> None:
        """`line`: of the draft model, if the text `has_model` at all.

        `bonus`: see native/draft_length.h; more than 0 is learned.

        `is_known`: it was learned with this pair. A draft that nobody knows is first asked what it
        would have said of some tokens that the target wrote alone: that costs next to nothing,
        however wrong it is.
        """
        self.costs = costs
        self.native = _native.LengthRule(*line, bonus)
        self._bonus, self._saved, self._bonus_weight = bonus, 0.0, _BONUS_WEIGHT
        self._gaps: deque[float] = deque(maxlen=_N_GAPS)
        self._is_known, self._has_model = is_known, has_model
        self._n_trusted = defaults.N_DRAFT_LIMIT if is_known else 1  # until a first token stood
        self.n_lessons = 0
        self._n_rounds = self._n_until_reckoned = 0
        self._n_since_plain = self._n_unpaid = 0
        self._seconds = self._probe_seconds = 0.0
        self._recent_tokens = self._recent_seconds = 0.0
        self._n_sharers = 1
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
        self._reckon_if_due()
        self.native.begin(min(n_max, self._n_trusted))
        self._why = ""
        if n_max == 0:
            self._why = "the text ends"
        elif self._wants_plain():
            self._why = "plain decoding is measured"
        elif not self._is_known:
            self._why = "the draft is not known yet"
        elif not self.native.pays:
            self._why = _UNPAID
        return not self._why

    def weigh(self, chances: Sequence[float]) -> Weighed:
        self.native.begin(0)
        self._reckon_if_due()
        if not chances or self._wants_plain():
            return _NOTHING
        return Weighed(*self.native.weigh(chances))

    @property
    def prospect(self) -> float:
        return self.native.prospect if self._is_known else _NOTHING.gain

    def probes(self) -> bool:
        if self._n_unread < defaults.N_PROBED:
            return False
        if not self._is_known:
            return True
        if self.native.pays:
            return False
        seconds = self.costs.step + self._n_unread * self.costs.read
        return self._probe_seconds + seconds <= _PROBE_SHARE * self._seconds

    # What it learns from.

    def learn(self, n_accepted: int, chances: Iterable[float]) -> None:
        gaps = self.native.seen
        # Without a bonus to learn, nothing behind the first that fell is worth reckoning.
        known = list(islice(chances, None if self._bonus else n_accepted + 1))
        # What might have stood says more than what did: luck is left out of it.
        for gap, chance in zip(gaps, known[: n_accepted + 1], strict=False):
            self.native.learn(gap, chance)
            self.n_lessons += 1
        self._learn_bonus(n_accepted, known[: self.native.n_taken])
        self._gaps.extend(gaps)
        if n_accepted:
            self._n_trusted = defaults.N_DRAFT_LIMIT

    def _learn_bonus(self, n_accepted: int, chances: Sequence[float]) -> None:
        """What judging a draft as a whole saved, by linear regression."""
        if not self._bonus:
            return
        still, token_wise, further = 1.0, 0.0, 0.0
        for n, chance in enumerate(chances):
            still *= chance
            token_wise += still
            further += n * still
        self._bonus_weight += further**2
        self._saved += further * (n_accepted - token_wise)
        found = (_BONUS_WEIGHT * self._bonus + self._saved) / self._bonus_weight
        self.native.bonus = min(max(found, 0.0), _MOST_BONUS)

    def share(self, n_sharers: int) -> None:
        # What others do must not change what a text with a seed becomes.
        if n_sharers != self._n_sharers and not self.costs.is_frozen:
            self._n_sharers = n_sharers
            self._recent_tokens = self._recent_seconds = 0.0
            self._n_until_reckoned = 0

    def learn_unread(self, gaps: Sequence[float], chances: Sequence[float]) -> None:
        weight = 1 if self._is_known else _FIRST_WEIGHT
        for gap, chance in zip(gaps, chances, strict=True):
            for _ in range(weight):
                self.native.learn(gap, chance)
        self._n_read, self._is_known = self._n_unread, True
        self.n_lessons += len(gaps)
        self._gaps.extend(gaps)
        self._reckon()

    def advice(self) -> str | None:
        if self._n_unpaid < _N_UNPAID or self._n_unpaid < _UNPAID_SHARE * self._n_rounds:
            return None
        if self.costs.draft_cannot_pay:
            share = self.costs.step / self.costs.curve[0]
            return (
                f"this draft cannot pay: one step of it takes {share:.0%} of a pass of its target. "
                "Use a smaller draft, give it more of the GPU (-ngld), or leave it out"
            )
        gaps = self._sorted_gaps()
        chance = self.native.chance(gaps[len(gaps) // 2])
        return (
            f"this draft did not pay: {chance:.0%} of its tokens would have stood, and a pass over "
            f"two tokens takes {self.costs.curve[1] / self.costs.curve[0]:.1f} times as long as "
            f"over one. {self._n_unpaid} of {self._n_rounds} rounds went without it"
        )

    def clock(self, round_: Round) -> None:
        """A round has ended: what did it cost?"""
        costs = self.costs
        n_looked = self.native.n_looked
        if self._n_read:
            costs.observe_reading(self._n_read, round_.draft_seconds)
            self._probe_seconds += self._n_read * costs.read
            self._n_read = 0
        elif n_looked and self._n_unread <= _N_USUAL:
            costs.observe_draft(n_looked, round_.draft_seconds)
        n_drafted = round_.n_drafted
        if round_.n_sharers == 1:
            target_seconds = round_.target_seconds + round_.verify_seconds
            costs.observe_target(n_drafted + 1, target_seconds)
            if not n_drafted and not self._n_since_plain and self._n_rounds:
                costs.observe_plain(target_seconds)
        seconds = costs.part(n_drafted + 1, self._n_sharers) + n_looked * costs.step
        self._seconds += seconds
        # What was expected, not what came: luck says nothing of the next rounds.
        self._recent_tokens = _RECENT * self._recent_tokens + 1 + (round_.expected or 0.0)
        self._recent_seconds = _RECENT * self._recent_seconds + seconds
        self._n_since_plain = self._n_since_plain + 1 if n_drafted else 0
        self._n_rounds += 1
        self._n_unpaid += self._why == _UNPAID and self._n_sharers == 1
        self._n_until_reckoned -= 1

    def _sorted_gaps(self) -> Sequence[float]:
        """How sure the draft has been of late."""
        few = len(self._gaps) < _N_OWN_GAPS
        return sorted([*self._gaps, *_FIRST_GAPS] if few else self._gaps)

    def _wants_plain(self) -> bool:
        costs = self.costs
        if costs.is_frozen or self._n_sharers > 1:
            return False
        if costs.n_measured(1) < _N_PLAIN:
            return True
        return self._n_since_plain >= _PLAIN_EVERY and self.native.rate * costs.plain < _THIN

    def _reckon_if_due(self) -> None:
        if self._n_until_reckoned <= 0:
            self._reckon()

    def _reckon(self) -> None:
        self._n_until_reckoned = _EVERY_EARLY if self._n_rounds < _N_EARLY else _EVERY
        gaps = self._sorted_gaps() if self._has_model else _HOPELESS
        n = len(gaps)
        kinds = [gaps[(2 * k + 1) * n // (2 * _N_KINDS)] for k in range(_N_KINDS)]
        curve = self.costs.shared(self._n_sharers)
        worth = 1 / (self.costs.plain if self._n_sharers == 1 else curve[0])
        if self._recent_seconds:
            worth = max(worth, _CAUTION * self._recent_tokens / self._recent_seconds)
        self.native.reckon(curve, self.costs.step, kinds, worth)
