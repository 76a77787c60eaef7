"""Drafts nothing: plain decoding is the same loop with empty drafts."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.types import Draft, Probs, Verdict
from ggufspec.drafting.strategies import Materials


class NoDrafter:
    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        return Draft(())

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        pass


def make(materials: Materials) -> NoDrafter:
    return NoDrafter()
