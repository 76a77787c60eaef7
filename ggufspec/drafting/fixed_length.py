"""The fixed draft length, and the types that draft length decisions return."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from ggufspec import _native
from ggufspec.decoding.types import Round
from ggufspec.drafting import constants
from ggufspec.drafting.acceptance import Acceptance, BlockBonus, RunningMean, SecondChoice


class Action(Enum):
    """What to draft in a round."""

    DRAFT = auto()  # run the draft model
    SKIP = auto()  # do not run it; drafts that exist already may be used
    PLAIN = auto()  # draft nothing at all


class PrefixLength(NamedTuple):
    """How many tokens of an existing draft to verify.

    `expected`: expected number of accepted tokens. `beats_model`: after the forced tokens, the
    existing draft has a higher expected gain than drafting with the draft model.
    """

    n_draft: int
    expected: float
    beats_model: bool


class FixedLength:
    """Drafts as many tokens as each round allows; in a tree, the likeliest ones.

    AutoLength documents the methods, which are the same.
    """

    steps_are_free = True  # costs are not weighed against gains
    why = ""
    expected = None

    def __init__(
        self,
        prior: Acceptance | None = None,
        memory: float = constants.SAMPLED_MEMORY,
        block_bonus: float = 0.0,
    ) -> None:
        """See AutoLength; `prior` None: drafts only chains."""
        self.second: SecondChoice | None = None
        self.rule = _native.LengthRule()
        if prior is not None:
            by_draft = _native.AcceptanceModel(*prior.by_draft, constants.PRIOR_WEIGHT, memory)
            self.rule = _native.LengthRule(by_draft, block_bonus)
            self.second = SecondChoice(prior.second, memory)
        self._block_bonus = BlockBonus(self.rule)
        guess, weight = constants.FIXED_ACCEPTANCE, constants.FIXED_ACCEPTANCE_WEIGHT
        self._acceptance = RunningMean(guess, weight)
        self._n_accepted = RunningMean(1, weight=1)  # per round that used the draft model

    @property
    def mean_acceptance(self) -> float:
        return self._acceptance.value

    def start_round(self, n_max: int, n_unread: int) -> Action:
        self.rule.start(n_max)
        return Action.DRAFT if n_max > 0 else Action.SKIP

    def prefix_length(
        self, probs: Sequence[float], forced: Sequence[float] = (), *, is_own: bool = True
    ) -> PrefixLength:
        return prefix_length(self.rule, probs, forced, self._n_accepted.value)

    def observe_gaps(self, gaps: Iterable[float]) -> None: ...

    def observe_verdict(
        self, n_accepted: int, acceptances: Iterable[float], target_gaps: Iterable[float]
    ) -> None:
        self._n_accepted.observe(n_accepted)
        if self.second is not None:
            known = list(acceptances)
            self._block_bonus.observe(n_accepted, known[: self.rule.n_drawn])
            learned = known[: n_accepted + 1]
            self.rule.observe(learned)
            for acceptance in learned:
                self._acceptance.observe(acceptance)

    def observe_growth(self, value: float, n_steps: int, n_read: int) -> None: ...

    def observe_round(self, round_: Round) -> None: ...

    def n_worth(self, values: Sequence[float], n_drafted: int) -> int:
        return min(len(values), self.rule.n_max - n_drafted)

    def step_price(self, n_read: float) -> float:
        return 0.0

    def set_n_sharers(self, n_sharers: int) -> None: ...

    def reads_ahead(self, n_prompt: int) -> bool:
        return True

    def advice(self) -> str | None:
        return None


def prefix_length(
    rule: _native.LengthRule, probs: Sequence[float], forced: Sequence[float], model_gain: float
) -> PrefixLength:
    """See AutoLength.prefix_length; `model_gain`: expected gain of the draft model instead."""
    n_draft, gain, expected = rule.prefix_length([*forced, *probs])
    further_gain = gain - rule.prefix_length(forced)[1]
    beats_model = n_draft > len(forced) and further_gain > math.prod(forced) * model_gain
    return PrefixLength(n_draft, expected, beats_model)
