"""The text so far drafts: what followed the same tokens before. Needs no draft model.

Knows guesses and their policy; no probabilities, since a guess is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.types import Draft, Probs, Verdict
from ggufspec.drafting.draft_length import Weighed
from ggufspec.drafting.ngram_index import Guess, Guesser
from ggufspec.drafting.strategies import Materials

_NOTHING = Guess((), ())


class NgramDrafter:
    """Proposes what followed the longest match of the text's end, as far as that is worth it."""

    def __init__(self, materials: Materials) -> None:
        self._policy = materials.policy
        self._stop_tokens = materials.stop_tokens
        self._guesser = Guesser()
        self._guess = _NOTHING

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        return self.take(self.weigh(tokens, n_max))

    def weigh(self, tokens: Sequence[int], n_max: int) -> Weighed:
        """Guess, and tell how much of it is worth to be drafted."""
        self._guess = self._guesser.guess(tokens, n_max)
        return self._policy.weigh(self._guess.chances)

    def take(self, weighed: Weighed) -> Draft:
        """That much of the guess."""
        n = weighed.n_draft
        if not n:
            return Draft((), None, 0.0, "nothing to repeat that is likely enough")
        drafted = self._guess.tokens[:n]
        stops = [i for i, token in enumerate(drafted) if token in self._stop_tokens]
        if stops:
            drafted = drafted[: stops[0] + 1]
        return Draft(drafted, None, weighed.expected, "n-gram: the rest is not likely enough")

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Whoever drafted: was the guess right?"""
        guessed = self._guess.tokens
        if not guessed:
            return
        n_accepted = verdict.n_accepted
        written = [*draft.tokens[:n_accepted], verdict.next_token]
        n = min(len(guessed), len(written))
        n_right = next((i for i in range(n) if guessed[i] != written[i]), n)
        self._guesser.learn(self._guess, n, n_right)


def make(materials: Materials) -> NgramDrafter:
    return NgramDrafter(materials)
