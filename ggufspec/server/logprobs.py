"""Keeps the log-probabilities of the last prompts: evaluations ask for prompts that begin alike."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ggufspec.decoding.types import n_same
from ggufspec.engine.engine import Engine
from ggufspec.engine.logprobs import TokenLogprobs, entry_of

_N_KEPT = 8  # prompts
_MOST_KEPT = 20_000  # log-probabilities of a prompt: 5 MB


class _Scored(NamedTuple):
    n_top: int
    tokens: array[int]
    logprobs: Sequence[TokenLogprobs]


class PromptScores:
    """What the target found for the tokens of prompts, with so many of the likeliest instead."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: deque[_Scored] = deque(maxlen=_N_KEPT)

    def known(self, tokens: Sequence[int], n_top: int) -> Sequence[TokenLogprobs]:
        """Those of the first tokens of a prompt, of one at least: it has no value."""
        text = array("i", tokens)
        found = [TokenLogprobs(entry_of(tokens[0], None, self._engine.vocab), [])]
        for kept in self._kept:
            n = n_same(kept.tokens, text)
            if kept.n_top == n_top and n > len(found):
                found = list(kept.logprobs[:n])
        return found

    def keep(self, tokens: Sequence[int], n_top: int, found: Sequence[TokenLogprobs]) -> None:
        """For later prompts: one for each token."""
        text = array("i", tokens)
        is_new = not any(kept.n_top == n_top and kept.tokens == text for kept in self._kept)
        if is_new and len(text) * (n_top + 1) <= _MOST_KEPT:
            self._kept.append(_Scored(n_top, text, found))
