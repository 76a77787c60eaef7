"""No draft: the baseline. Plain decoding is the same loop with nothing proposed."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.core import Draft, Verdict
from ggufspec.draft import Materials


class NoDrafter:
    """Proposes nothing."""

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        return Draft(())

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        pass


def make(materials: Materials) -> NoDrafter:
    return NoDrafter()
