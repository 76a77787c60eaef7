"""Drafts what followed the same tokens earlier in the text, or in other texts; needs no model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple

from ggufspec import _native
from ggufspec.decoding.tree import n_equal
from ggufspec.decoding.types import Draft, Probs, Verdict, token_array
from ggufspec.drafting import constants
from ggufspec.drafting.draft_length import PrefixLength
from ggufspec.drafting.forced_text import CHOICE_FOLLOWS
from ggufspec.drafting.strategies import Materials


class Origin(IntEnum):
    TEXT = 0  # in the text itself
    PREDICTION = 1  # in the caller's prediction of the text
    OTHERS = 2  # in other texts


class Continuation(NamedTuple):
    """Tokens that may follow a text, and for each its acceptance probability if those before it are
    accepted."""

    tokens: Sequence[int] = ()
    probs: Sequence[float] = ()
    origin: Origin = Origin.TEXT


class NgramIndex:
    """Predicts what follows a text, and learns how often its predictions are accepted.

    `prediction`: tokens that the text may repeat, stored after a copy of the prompt's last tokens:
    so at the start of the text, the longest match ends right before them. `others`: further texts.
    `read_as`: tokens that stand for as many first ones of each text; empty: they stand as they are.
    """

    def __init__(
        self,
        prediction: Sequence[int] = (),
        others: Sequence[_native.SortedTexts] = (),
        read_as: Sequence[int] = (),
    ) -> None:
        self._prediction = prediction
        self._read_as = token_array(read_as)
        self._repeated = _native.SortedTexts()
        self._ngrams = _native.Ngrams(
            constants.NGRAM_PRIORS,
            constants.NGRAM_PRIOR_WEIGHT,
            self._repeated,
            others,
        )

    def predict(self, tokens: Sequence[int], n_max: int) -> Continuation:
        """Up to `n_max` tokens to follow `tokens`; none if the end of `tokens` has no match.

        Fastest if `tokens` is an array of int32 that continues the previous call's.
        """
        tokens = token_array(tokens)
        if self._read_as:
            tokens = self._read_as + tokens[len(self._read_as) :]
        if self._prediction:
            before = tokens[-constants.NGRAM_MATCHED :]
            self._repeated.add(array("i", [*before, *self._prediction]))  # type: ignore[arg-type]
            self._prediction = ()
        self._ngrams.update(tokens)  # type: ignore[arg-type]
        found, probs, _, _, origin = self._ngrams.predict(n_max)
        if found and min(found) < 0:  # cells of an image, which no model writes
            found = [*takewhile(lambda token: token >= 0, found)]
            probs = probs[: len(found)]
        return Continuation(found, probs, Origin(origin))

    def observe(self, n_accepted: int, n_tried: int) -> None:
        """Learn that `n_accepted` of the last prediction's first `n_tried` tokens were accepted.

        Each prediction can be observed once. Raises ValueError if the last one is shorter.
        """
        self._ngrams.observe(n_accepted, n_tried)


class TextStore:
    """Texts in tokens of an engine's target; a token takes 8 bytes."""

    def __init__(self, n_remembered: int = 0) -> None:
        """`n_remembered`: number of tokens of the latest generated texts that are kept."""
        self._n_remembered = n_remembered
        self._named = _native.SortedTexts()
        self._written = _native.SortedTexts()

    def add_named(self, tokens: Sequence[int]) -> None:
        self._named.add(array("i", tokens))  # type: ignore[arg-type]

    def add_written(self, tokens: Sequence[int], n_prompt: int) -> None:
        first = max(n_prompt - constants.NGRAM_MATCHED, len(tokens) - self._n_remembered + 1, 0)
        if len(tokens) > max(first, n_prompt):
            written = array("i", [token for token in tokens[first:] if token >= 0])
            self._written.add(written)  # type: ignore[arg-type]
            self._written.drop(self._n_remembered)

    def texts(self, *, repeats: bool) -> list[_native.SortedTexts]:
        """The texts to draft a text from; `repeats`: it has a seed and ignores generated texts."""
        found = [self._named] if repeats else [self._named, self._written]
        return [texts for texts in found if len(texts)]

    def forget(self) -> None:
        self._written.drop(0)


class NgramDrafter:
    """Proposes text that a constraint forces, then what followed the longest match of the text's
    end, as far as the policy allows."""

    def __init__(self, materials: Materials, index: NgramIndex | None = None) -> None:
        """`index`: None: only forced text is drafted."""
        self._policy = materials.policy
        self._stop_tokens = materials.stop_tokens
        self._forced_text = materials.forced
        self._index = index
        self._forced: Sequence[int] = ()
        self.continuation = Continuation()  # the tokens after the forced ones
        self._drafted: Draft | None = None  # in the last round
        self._has_prediction = bool(index and materials.prediction)
        self._n_drafted = self._n_accepted = 0  # tokens of the caller's prediction

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        return self.draft_prefix(self.predict(tokens, n_max))

    def predict(self, tokens: Sequence[int], n_max: int) -> PrefixLength:
        """Predict the continuation; returns how much of it is worth verifying."""
        self._forced_text.start_round()
        self._forced = self._forced_text.after(tokens)[:n_max]
        self.continuation = Continuation()
        if self._index is not None:
            if self._forced:
                tokens = [*tokens, *self._forced]
            found = self._index.predict(tokens, n_max - len(self._forced))
            n = self._forced_text.n_allowed(tokens, found.tokens)
            self.continuation = Continuation(found.tokens[:n], found.probs[:n], found.origin)
        forced_probs = self._forced_text.probabilities(self._forced)
        return self._policy.prefix_length(
            self.continuation.probs, forced_probs, is_own=self.continuation.origin != Origin.OTHERS
        )

    def draft_prefix(self, prefix: PrefixLength) -> Draft:
        """The draft of the first `prefix.n_draft` tokens: the forced ones, then the prediction."""
        if not prefix.n_draft:
            why = "no n-gram match is likely enough" if self._index else CHOICE_FOLLOWS
            return Draft((), None, 0.0, why)
        drafted = [*self._forced, *self.continuation.tokens][: prefix.n_draft]
        for i, token in enumerate(drafted):
            if token in self._stop_tokens:
                drafted = drafted[: i + 1]
                break
        self._forced_text.drafted(0, min(len(drafted), len(self._forced)))
        is_forced = len(drafted) <= len(self._forced)
        why = CHOICE_FOLLOWS if is_forced else "n-gram: further tokens are not likely enough"
        self._drafted = Draft(drafted, None, prefix.expected, why)
        return self._drafted

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Learn whether the prediction was right, even if something else was drafted."""
        self._forced_text.observe(draft, target_probs, verdict)
        predicted, n_forced = self.continuation.tokens, len(self._forced)
        if draft is self._drafted and self.continuation.origin == Origin.PREDICTION:
            self._n_drafted += max(len(draft.tokens) - n_forced, 0)
            self._n_accepted += max(verdict.n_accepted - n_forced, 0)
        written = [*draft.accepted(verdict), verdict.next_token]
        if self._index is None or not predicted or written[:n_forced] != list(self._forced):
            return
        del written[:n_forced]
        n_tried = min(len(predicted), len(written))
        self._index.observe(n_equal(predicted, written), n_tried)
        self.continuation = Continuation()

    def notes(self) -> dict[str, float]:
        notes = self._forced_text.notes()
        if self._has_prediction:
            share = self._n_accepted / max(self._n_drafted, 1)
            notes |= {"n_predicted": self._n_drafted, "predicted_acceptance": share}
        return notes


def make(materials: Materials) -> NgramDrafter:
    return NgramDrafter(
        materials, NgramIndex(materials.prediction, materials.texts, materials.read_as)
    )
