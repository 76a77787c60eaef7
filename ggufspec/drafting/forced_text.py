"""Drafts the text that a constraint leaves no choice about, and learns how often it is accepted.

The text is certain, but not its tokens: the target may write it in others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Constraint, Draft, Probs, Verdict
from ggufspec.drafting import constants


class ForcedText:
    """The forced tokens of one text, of which the drafters propose those that are worth a pass."""

    def __init__(self, constraint: Constraint | None = None) -> None:
        self.positions: list[int] = []  # of the forced tokens in the draft of this round
        self._constraint = constraint
        self._is_learned = True  # from the draft of this round
        self._inner = _Acceptance(constants.FORCED_ACCEPTANCE)
        self._last: dict[int, _Acceptance] = {}  # by token: it may begin a longer one
        self._n_drafted = 0
        self._n_accepted = 0.0
        self._ends: set[int] = set()  # positions of last tokens

    def start_round(self) -> None:
        self.positions = []
        self._ends = set()
        self._is_learned = False

    def after(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens that have to follow; none where there is a choice."""
        return () if self._constraint is None else self._constraint.forced(tokens)

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """How many of `draft` may follow `tokens`."""
        if self._constraint is None:
            return len(draft)
        return self._constraint.n_allowed(tokens, draft)

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether nothing but the end can follow."""
        return self._constraint is not None and self._constraint.is_over(tokens)

    def probabilities(self, forced: Sequence[int]) -> list[float]:
        """The probability that each of these tokens is accepted, if those before it are."""
        if not forced:
            return []
        last = self._last.get(forced[-1])
        end = constants.LAST_FORCED_ACCEPTANCE if last is None else last.mean
        return [self._inner.mean] * (len(forced) - 1) + [end]

    def drafted(self, position: int, forced: Sequence[int], n: int) -> None:
        """The first `n` of the tokens are in the draft, from `position` on."""
        self.positions.extend(range(position, position + n))
        if n == len(forced):
            self._ends.add(position + n - 1)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Learn from the verdict on a draft; once in a round."""
        if self._is_learned:
            return
        self._is_learned = True
        for i in self.positions:
            if i > verdict.n_accepted:
                break
            acceptance = as_rows(target_probs).of(i, draft.tokens[i])
            self._n_drafted += 1
            self._n_accepted += acceptance
            known = self._inner
            if i in self._ends:
                first = _Acceptance(constants.LAST_FORCED_ACCEPTANCE)
                known = self._last.setdefault(draft.tokens[i], first)
            known.observe(acceptance)

    def notes(self) -> dict[str, float]:
        """How many forced tokens were verified, and the share that was accepted."""
        if not self._n_drafted:
            return {}
        share = self._n_accepted / self._n_drafted
        return {"n_forced": self._n_drafted, "forced_acceptance": share}


class _Acceptance:
    """The mean of acceptance probabilities, and of a prior."""

    def __init__(self, prior: float) -> None:
        self.mean = prior
        self._weight = constants.FORCED_PRIOR_WEIGHT

    def observe(self, acceptance: float) -> None:
        self._weight += 1
        self.mean += (acceptance - self.mean) / self._weight
