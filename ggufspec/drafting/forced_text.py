"""Drafts text that a constraint forces, and learns how often its tokens are accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Constraint, Draft, Probs, Verdict
from ggufspec.drafting import constants

CHOICE_FOLLOWS = "the constraint allows a choice after the forced text"


class RunningMean:
    """A mean that starts from a prior; each value fades after `memory` further values."""

    def __init__(self, prior: float, weight: float, memory: float) -> None:
        self.value = prior  # counts as `weight` values
        self._weight, self._memory = weight, memory

    def observe(self, value: float) -> None:
        self._weight = min(self._weight + 1, self._memory)
        self.value += (value - self.value) / self._weight


class ForcedText:
    """The forced tokens of one text, and their acceptance probabilities.

    Forced text is certain, but its tokens are not: the target may use other tokens for it.
    """

    def __init__(self, constraint: Constraint | None = None) -> None:
        self.positions: list[int] = []  # of the forced tokens in the draft of this round
        self._constraint = constraint
        self._is_learned = True  # whether this round's verdict was learned from
        priors = constants.FORCED_ACCEPTANCE, constants.FORCED_ACCEPTANCE_AFTER_REJECTION
        weight, memory = constants.FORCED_PRIOR_WEIGHT, constants.FORCED_MEMORY
        self._acceptance, self._after_rejection = (RunningMean(p, weight, memory) for p in priors)
        self._was_rejected = False  # whether a forced token was rejected in the last round
        self._first: int | None = None  # forced token right after the text in this round
        self._knows_first = False
        self._n_drafted = self._n_accepted = 0

    def start_round(self) -> None:
        self.positions = []
        self._is_learned = self._knows_first = False
        self._first = None

    def after(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens that must follow `tokens`. The first call of a round has no drafted tokens."""
        forced = () if self._constraint is None else self._constraint.forced(tokens)
        if not self._knows_first:
            self._knows_first = True
            self._first = forced[0] if forced else None
        return forced

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        constraint = self._constraint
        return len(draft) if constraint is None else constraint.n_allowed(tokens, draft)

    def is_over(self, tokens: Sequence[int]) -> bool:
        return self._constraint is not None and self._constraint.is_over(tokens)

    def probabilities(self, forced: Sequence[int]) -> list[float]:
        """For each forced token, the probability that it is accepted if those before it are."""
        means = [self._acceptance.value] * len(forced)
        if forced and self._was_rejected:
            means[0] = self._after_rejection.value
        return means

    def drafted(self, position: int, n: int) -> None:
        """Note that the draft has `n` forced tokens from `position` on."""
        self.positions.extend(range(position, position + n))

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Learn from the verdict on a draft; further calls in a round do nothing."""
        if self._is_learned:
            return
        self._is_learned = True
        after_rejection, self._was_rejected = self._was_rejected, False
        if self._first is not None and not draft.tokens:
            # Else forced text, once not worth drafting, would never be drafted again.
            mean = self._after_rejection if after_rejection else self._acceptance
            mean.observe(as_rows(target_probs).of(0, self._first))
            self._was_rejected = verdict.next_token != self._first
        for i in self.positions:
            if i > verdict.n_accepted:
                break
            acceptance = as_rows(target_probs).of(i, draft.tokens[i])
            self._n_drafted += 1
            self._n_accepted += i < verdict.n_accepted
            mean = self._after_rejection if i == 0 and after_rejection else self._acceptance
            mean.observe(acceptance)
            self._was_rejected = i == verdict.n_accepted

    def notes(self) -> dict[str, float]:
        if not self._n_drafted:
            return {}
        share = self._n_accepted / self._n_drafted
        return {"n_forced": self._n_drafted, "forced_acceptance": share}
