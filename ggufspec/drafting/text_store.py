"""Texts to draft from: those that the user names, and those that were written before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ggufspec import _native
from ggufspec.drafting.constants import NGRAM_MATCHED


class TextStore:
    """The texts of an engine's target, each in 8 bytes a token."""

    def __init__(self, n_remembered: int = 0) -> None:
        """`n_remembered`: tokens of written texts that are kept, the latest."""
        self._n_remembered = n_remembered
        self._named = _native.SortedTexts()
        self._written = _native.SortedTexts()

    def add_named(self, tokens: Sequence[int]) -> None:
        self._named.add(array("i", tokens))  # type: ignore[arg-type]

    def add_written(self, tokens: Sequence[int], n_prompt: int) -> None:
        """Remember a text of `n_prompt` tokens and what was written after them."""
        first = max(n_prompt - NGRAM_MATCHED, len(tokens) - self._n_remembered + 1, 0)
        if len(tokens) > max(first, n_prompt):
            self._written.add(array("i", tokens[first:]))  # type: ignore[arg-type]
            self._written.drop(self._n_remembered)

    def texts(self, *, repeats: bool) -> list[_native.SortedTexts]:
        """What a text is drafted from; `repeats`: one that is the same whatever was written."""
        found = [self._named] if repeats else [self._named, self._written]
        return [texts for texts in found if len(texts)]

    def forget(self) -> None:
        """Forget the written texts."""
        self._written.drop(0)
