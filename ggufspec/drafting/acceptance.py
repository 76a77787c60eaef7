"""What is learned of a pair's drafts: how likely tokens are accepted, what they saved and lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ggufspec import _native
from ggufspec.drafting import constants

Coefficients = tuple[float, float]  # intercept and slope of AcceptanceModel


class Acceptance(NamedTuple):
    """Acceptance as a function of logit gaps; the next text starts with what one has learned.

    (intercept, slope) of AcceptanceModel in native/draft_length.h: by the draft model's gap (its
    largest logit minus the second largest), and by the target's gap at the same position; `second`:
    of the draft model's second choice after a rejected first one, by the gap of remaining tokens.
    """

    by_draft: Coefficients
    by_target: Coefficients
    second: Coefficients = (constants.SECOND_SAMPLED_INTERCEPT, constants.SECOND_SAMPLED_SLOPE)


class RunningMean:
    """A mean that starts from a prior; each value fades after `memory` further values."""

    def __init__(self, prior: float, weight: float, memory: float) -> None:
        self.value = prior  # counts as `weight` values
        self._weight, self._memory = weight, memory

    def observe(self, value: float) -> None:
        self._weight = min(self._weight + 1, self._memory)
        self.value += (value - self.value) / self._weight


class Account:
    """Two balances in plain passes: of free drafts (n-grams, forced text), and of model drafts.

    Savings are added and losses subtracted. A share of the generated tokens is also added, so that
    a losing pair can try again. An upper limit keeps old savings from paying for many new losses.

    `length`: the mean number of tokens of a text, which a draft model has to read a prompt for.
    """

    def __init__(self, balances: Sequence[float] = (constants.START_BALANCE,) * 2) -> None:
        self.balances = list(balances)
        self.length = RunningMean(constants.USUAL_LENGTH, 1, constants.LENGTH_MEMORY)

    def observe(self, n_tokens: int, saved: float, *, is_free: bool) -> None:
        """A round added `n_tokens` and saved `saved` plain passes (negative: lost them)."""
        invested = constants.INVESTED_SHARE / 2 * n_tokens
        for i, balance in enumerate(self.balances):
            balance += invested + (saved if is_free == (i == 0) else 0.0)
            self.balances[i] = min(balance, constants.MAX_BALANCE)

    def n_affordable(
        self,
        probs: Sequence[float],
        rule: _native.LengthRule,
        plain: float,
        reading: float = 0.0,
        step: float = 0.0,
        n_per_step: int = 1,
        *,
        is_free: bool,
        is_own: bool = True,
    ) -> int:
        """How many tokens with acceptance probabilities `probs` may be drafted.

        All of them while the balance is positive. Otherwise, and always for drafts from other texts
        (not `is_own`), the largest number whose expected loss is small beside its expected gain.
        `rule` has the costs of target passes; `plain`: seconds per token without drafts. Of the
        draft model: seconds of `reading` before its first step, of a step, and tokens per step.
        """
        if is_own and self.balances[0 if is_free else 1] > 0:
            return len(probs)
        return rule.n_of_small_risk(probs, plain, constants.SMALL_RISK, reading, step, n_per_step)
