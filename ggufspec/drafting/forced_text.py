"""Drafts the text that a constraint leaves no choice about, and learns how often it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Constraint, Draft, Probs, Verdict
from ggufspec.drafting import constants

CHOICE_FOLLOWS = "the constraint allows a choice after the forced text"


class ForcedText:
    """The forced tokens of one text, of which the drafters propose those that are worth a pass.

    The text is certain, but not its tokens: the target may write it in others.
    """

    def __init__(self, constraint: Constraint | None = None) -> None:
        self.positions: list[int] = []  # of the forced tokens in the draft of this round
        self._constraint = constraint
        self._is_learned = True  # from the draft of this round
        self._acceptance = _Mean(constants.FORCED_ACCEPTANCE)
        self._after_rejection = _Mean(constants.FORCED_ACCEPTANCE_AFTER_REJECTION)
        self._was_rejected = False  # a forced token, in the last round
        self._first: int | None = None  # the forced token at the start of this round
        self._has_asked = False  # for it
        self._n_drafted = self._n_accepted = 0

    def start_round(self) -> None:
        self.positions = []
        self._is_learned = self._has_asked = False
        self._first = None

    def after(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens that have to follow; none where there is a choice."""
        forced = () if self._constraint is None else self._constraint.forced(tokens)
        if not self._has_asked:
            self._has_asked = True
            self._first = forced[0] if forced else None
        return forced

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """How many of `draft` may follow `tokens`."""
        constraint = self._constraint
        return len(draft) if constraint is None else constraint.n_allowed(tokens, draft)

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether nothing but the end can follow."""
        return self._constraint is not None and self._constraint.is_over(tokens)

    def probabilities(self, forced: Sequence[int]) -> list[float]:
        """The probability that each of these tokens is accepted, if those before it are."""
        means = [self._acceptance.value] * len(forced)
        if forced and self._was_rejected:
            means[0] = self._after_rejection.value
        return means

    def drafted(self, position: int, n: int) -> None:
        """The draft has `n` forced tokens from `position` on."""
        self.positions.extend(range(position, position + n))

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Learn from the verdict on a draft; once in a round."""
        if self._is_learned:
            return
        self._is_learned = True
        after_rejection, self._was_rejected = self._was_rejected, False
        if self._first is not None and not draft.tokens:
            # Otherwise, forced text that was not worth a pass would never be drafted again.
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
        """How many forced tokens were verified, and the share that was accepted."""
        if not self._n_drafted:
            return {}
        share = self._n_accepted / self._n_drafted
        return {"n_forced": self._n_drafted, "forced_acceptance": share}


class _Mean:
    """The mean of the last acceptance probabilities, about, and at first of a prior."""

    def __init__(self, prior: float) -> None:
        self.value = prior
        self._weight = constants.FORCED_PRIOR_WEIGHT

    def observe(self, acceptance: float) -> None:
        self._weight = min(self._weight + 1, constants.FORCED_MEMORY)
        self.value += (acceptance - self.value) / self._weight
