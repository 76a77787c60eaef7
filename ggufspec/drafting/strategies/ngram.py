"""Drafts what followed the same tokens earlier in the text; needs no draft model."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.types import Draft, Probs, Verdict
from ggufspec.drafting.draft_length import PrefixLength
from ggufspec.drafting.ngram_index import NgramIndex, Prediction
from ggufspec.drafting.strategies import Materials


class NgramDrafter:
    """Proposes what followed the longest match of the text's end, as far as the policy allows."""

    def __init__(self, materials: Materials) -> None:
        self._policy = materials.policy
        self._stop_tokens = materials.stop_tokens
        self._index = NgramIndex()
        self._prediction = Prediction()

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        return self.draft_prefix(self.predict(tokens, n_max))

    def predict(self, tokens: Sequence[int], n_max: int) -> PrefixLength:
        """Predict the continuation; returns how much of it is worth verifying."""
        self._prediction = self._index.predict(tokens, n_max)
        return self._policy.prefix_length(self._prediction.probs)

    def draft_prefix(self, prefix: PrefixLength) -> Draft:
        """That much of the prediction."""
        if not prefix.n_draft:
            return Draft((), None, 0.0, "no n-gram match is likely enough")
        drafted = self._prediction.tokens[: prefix.n_draft]
        for i, token in enumerate(drafted):
            if token in self._stop_tokens:
                drafted = drafted[: i + 1]
                break
        why = "n-gram: further tokens are not likely enough"
        return Draft(drafted, None, prefix.expected, why)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Compare the prediction with what was written, no matter what was drafted."""
        predicted = self._prediction.tokens
        if not predicted:
            return
        written = [*draft.tokens[: verdict.n_accepted], verdict.next_token]
        n_tried = min(len(predicted), len(written))
        n_right = 0
        while n_right < n_tried and predicted[n_right] == written[n_right]:
            n_right += 1
        self._index.observe(n_right, n_tried)
        self._prediction = Prediction()


def make(materials: Materials) -> NgramDrafter:
    return NgramDrafter(materials)
