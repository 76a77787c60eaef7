"""Drafts only the text that a constraint forces; needs no draft model."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.types import Draft, Probs, Verdict
from ggufspec.drafting.forced_text import CHOICE_FOLLOWS
from ggufspec.drafting.strategies import Materials


class ForcedDrafter:
    """Proposes the forced text, as far as the policy allows."""

    def __init__(self, materials: Materials) -> None:
        self._policy = materials.policy
        self._forced = materials.forced

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        self._forced.start_round()
        forced = self._forced.after(tokens)[:n_max]
        prefix = self._policy.prefix_length((), self._forced.probabilities(forced))
        self._forced.drafted(0, prefix.n_draft)
        return Draft(forced[: prefix.n_draft], None, prefix.expected, CHOICE_FOLLOWS)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        self._forced.observe(draft, target_probs, verdict)

    def notes(self) -> dict[str, float]:
        return self._forced.notes()


def make(materials: Materials) -> ForcedDrafter:
    return ForcedDrafter(materials)
