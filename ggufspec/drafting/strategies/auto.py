"""Drafts with n-grams or with the draft model; the policy chooses in each round."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.types import Draft, Drafter, Probs, Verdict
from ggufspec.drafting.strategies import Materials, ngram
from ggufspec.drafting.strategies.model import ModelDrafter

USES_MODEL = True  # the draft model may read a prompt before the first round


class AutoDrafter:
    """Predicts with n-grams, which costs nothing; runs the draft model if it has more to gain."""

    def __init__(self, ngrams: ngram.NgramDrafter, model: ModelDrafter) -> None:
        self._ngrams = ngrams
        self._model = model

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        prefix = self._ngrams.predict(tokens, n_max)
        if prefix.beats_model:
            return self._ngrams.draft_prefix(prefix)
        return self._model.draft(tokens, n_max)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        self._ngrams.observe(draft, target_probs, verdict)
        self._model.observe(draft, target_probs, verdict)

    def notes(self) -> dict[str, float]:
        return {**self._ngrams.notes(), **self._model.notes()}


def make(materials: Materials) -> Drafter:
    ngrams = ngram.make(materials)
    if materials.session is None:
        return ngrams
    return AutoDrafter(ngrams, ModelDrafter(materials.session, materials))
