"""Texts that n-grams draft from: files that the user names, and texts generated before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ggufspec import _native
from ggufspec.drafting.constants import NGRAM_MATCHED


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
        """Keep the tokens that were generated after a prompt of `n_prompt` tokens."""
        first = max(n_prompt - NGRAM_MATCHED, len(tokens) - self._n_remembered + 1, 0)
        if len(tokens) > max(first, n_prompt):
            self._written.add(array("i", tokens[first:]))  # type: ignore[arg-type]
            self._written.drop(self._n_remembered)

    def texts(self, *, repeats: bool) -> list[_native.SortedTexts]:
        """The texts to draft a text from; `repeats`: it has a seed and ignores generated texts."""
        found = [self._named] if repeats else [self._named, self._written]
        return [texts for texts in found if len(texts)]

    def forget(self) -> None:
        """Forget the generated texts."""
        self._written.drop(0)
