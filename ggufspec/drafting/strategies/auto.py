"""The text so far drafts where it is strong, the draft model elsewhere: whoever gains more.

Knows what each expects to gain; neither how the one guesses nor how the other draws.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.types import Draft, Drafter, Probs, Verdict
from ggufspec.drafting.strategies import Materials
from ggufspec.drafting.strategies.model import ModelDrafter
from ggufspec.drafting.strategies.ngram import NgramDrafter


class AutoDrafter:
    """Asks the n-grams first, which cost nothing, and the model where it promises more."""

    def __init__(self, ngrams: NgramDrafter, model: ModelDrafter, materials: Materials) -> None:
        self._ngrams = ngrams
        self._model = model
        self._policy = materials.policy

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        weighed = self._ngrams.weigh(tokens, n_max)
        if weighed.n_draft and weighed.gain > self._policy.prospect:
            return self._ngrams.take(weighed)
        return self._model.draft(tokens, n_max)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        self._ngrams.observe(draft, target_probs, verdict)
        self._model.observe(draft, target_probs, verdict)

    def notes(self) -> dict[str, float]:
        return self._model.notes()


def make(materials: Materials) -> Drafter:
    ngrams = NgramDrafter(materials)
    if materials.session is None:
        return ngrams
    return AutoDrafter(ngrams, ModelDrafter(materials.session, materials), materials)
